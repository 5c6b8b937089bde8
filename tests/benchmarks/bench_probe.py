"""`shardviz probe tp_fsdp --mesh 2,4` against a bare import of torch's modules, and against the same under torchrun."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from whole import TORCH_MODULES, compare, python, verdict

PROBE = ["probe", "tp_fsdp", "--mesh", "2,4", "--force", "-o", "out.shardviz"]


def main() -> None:
    """Print both ratios."""
    shardviz = [sys.executable, "-m", "shardviz"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8", "-m", "shardviz"]
    with tempfile.TemporaryDirectory() as folder:
        probe, bare = compare([*shardviz, *PROBE], python(f"import {TORCH_MODULES}"), cwd=Path(folder))
        (under_torchrun,) = compare([*torchrun, *PROBE], runs=2, cwd=Path(folder))
    print(f"probe:       {probe}\nbare import: {bare}\ntorchrun:    {under_torchrun}")
    verdict("probe / bare import", probe.median / bare.median, 1.5)
    verdict("torchrun / probe", under_torchrun.median / probe.median, 5, at_least=True)


if __name__ == "__main__":
    main()
