"""`python -m gossamer` is the `gossamer` command."""

import sys

from gossamer.cli import main

if __name__ == "__main__":
    sys.exit(main())
