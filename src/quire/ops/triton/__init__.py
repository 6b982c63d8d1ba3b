"""The kernels of an NVIDIA GPU, in Triton, which every CUDA build of torch brings."""

import os

# As measured: a kernel that does not say otherwise fuses multiplications and additions. Triton 3.9 warns at each start
# where this is not said, and 3.10 no longer fuses.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
