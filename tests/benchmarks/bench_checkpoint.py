"""List a checkpoint of 10,000 tensors in 1,000 files against reading the metadata of the same files.

python tests/benchmarks/bench_checkpoint.py
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file
from whole import verdict

from shardviz.checkpoint.open import open_checkpoint
from shardviz.picture.text.checkpoint import tensors_lines

if TYPE_CHECKING:
    from collections.abc import Callable

FILES, EACH, RUNS = 1000, 10, 9


def make(folder: Path) -> None:
    """Write a Hugging Face folder: an index, and files of ten small tensors."""
    names: dict[str, str] = {}
    for at in range(FILES):
        file = f"model-{at + 1:05}-of-{FILES:05}.safetensors"
        tensors = {f"layers.{at}.part.{one}.weight": np.full((4, 8), at, np.float32) for one in range(EACH)}
        save_file(tensors, folder / file)
        names |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def read_metadata(folder: Path) -> int:
    """Read what says where tensors are, with the standard library: the index and the header of each file."""
    found: dict[str, object] = {}
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"]
    for name in sorted(set(index.values())):
        with (folder / name).open("rb") as file:
            found |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return len(found)


def taken(work: Callable[[], object]) -> float:
    """Return the processor seconds of some work: a busy machine's clock says little of a tenth of a second."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Print the ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        assert read_metadata(folder) == FILES * EACH == len(open_checkpoint(folder).tensors)
        runs = [
            (
                taken(lambda: read_metadata(folder)),
                taken(lambda: open_checkpoint(folder)),
                taken(lambda: tensors_lines(open_checkpoint(folder))),
            )
            for _ in range(RUNS)
        ]
    read, opened, listed = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"read metadata: {read:.3f} s\nopen: {opened:.3f} s\nopen and write a line for each: {listed:.3f} s")
    verdict("open / read metadata", opened / read, 3)
    verdict("open and write a line for each / read metadata", listed / read, 3)


if __name__ == "__main__":
    main()
