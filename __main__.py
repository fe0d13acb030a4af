"""``python -m moesaic``: the command line."""

import sys

from moesaic.cli import main

if __name__ == "__main__":
    sys.exit(main())
