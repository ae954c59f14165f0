"""Where the process begins: Ctrl-C during the first imports ends it quietly too."""

from __future__ import annotations

import sys

STOPPED = 130  # as a shell says of Ctrl-C


def main() -> None:
    try:
        from rlhfspec.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
