"""Products of Triton's interpreter, in which no row depends on another, as a GPU's do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

import tests.triton_launches  # noqa: F401  # for every test


@pytest.fixture(autouse=True)
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU's products do not mix rows; numpy's, on some machines, depend on where in the matrix a row stands."""

    def dot(builder: Any, a: Any, b: Any, sums: Any, *settings: Any) -> Any:
        dtype = sums.data.dtype
        left, right = a.data.astype(dtype), b.data.astype(dtype)
        total = sums.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k : k + 1] * right[k]
        return interpreter.TensorHandle(total, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    with np.errstate(all="ignore"):
        yield
