"""`python -m shardviz`."""

import sys

from shardviz.cli import main

if __name__ == "__main__":
    sys.exit(main())
