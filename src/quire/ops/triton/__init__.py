"""The kernels of an NVIDIA GPU, in Triton, which every CUDA build of torch brings."""
