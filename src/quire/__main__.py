"""`quire`, and `python -m quire`: the command line. A Ctrl-C while it is imported ends it quietly, too."""

from __future__ import annotations

import sys


def main() -> int:
    """Run `quire` with the process's arguments; returns the exit code, see `cli.main`."""
    try:
        from quire.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
