"""`python -m normscale` is `normscale`."""

import sys

from normscale.cli import main

if __name__ == "__main__":
    sys.exit(main())
