"""Shared by all tests: one thread, since the tests' matrices are tiny and a second thread only waits; and Triton's
kernels in its interpreter, which must be chosen before they are imported."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
os.environ["TRITON_INTERPRET"] = "1"
