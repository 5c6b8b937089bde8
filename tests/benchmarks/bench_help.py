"""`shardviz --help` against `python -c "import argparse"`."""

from __future__ import annotations

import sys
from pathlib import Path

from whole import compare, python, verdict


def main() -> None:
    """Print the ratio."""
    shardviz = str(Path(sys.executable).with_name("shardviz"))
    shown, bare = compare([shardviz, "--help"], python("import argparse"), runs=20)
    print(f"shardviz --help: {shown}\nimport argparse: {bare}")
    verdict("--help / import argparse", shown.median / bare.median, 3)


if __name__ == "__main__":
    main()
