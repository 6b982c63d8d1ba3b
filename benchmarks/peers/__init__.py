"""Quire beside other engines on the same machine, in one sitting: `python -m benchmarks.peers` (`make bench-peers`).

Each engine has a virtual environment of its own, in a folder outside the repository; none is a dependency of Quire.
`run_ENGINE.py` runs there, loads a model once and then measures cells when it is told to (see `protocol`), so that
the driver can measure a cell on one engine after the other before it goes on to the next cell.
"""
