"""A pytest plugin of `make check`: what imports torch fails, since that takes longer than all of these tests."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
