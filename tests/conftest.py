"""Shared by all tests: one thread, since the tests' matrices are tiny and a second thread only waits."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
