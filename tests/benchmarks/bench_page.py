"""A run's page: 723 tensors on 1,024 ranks, and 2,000 tensors that share no line, many of them wrong."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench_check import make
from whole import compare, verdict

sys.path.insert(0, str(Path(__file__).parents[2]))

from shardviz.layout.mesh import parse_mesh
from tests.dumps import Made, make_dump

TENSORS = 2000
MIB = 1 << 20


def main() -> None:
    """Print sizes, and times beside those of the check that the page begins with."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        make(folder / "llama.shardviz")
        make_dump(folder / "odd.shardviz", parse_mesh("fsdp=4,tp=2"), _odd())
        for name, budget in (("llama", 1.0), ("odd", 6.0)):
            _measure(folder, name, budget)


def _odd() -> dict[str, Made | str]:
    """Return tensors of as many shapes, every tenth of them misordered."""
    shapes = {f"part{at}.weight": f"[{8 * (at + 1)}" for at in range(TENSORS)}
    right, wrong = "/tp/fsdp, 4]", "/fsdp/tp, 4]"
    return {
        name: Made(shape + wrong, shape + right) if at % 10 == 3 else shape + right
        for at, (name, shape) in enumerate(shapes.items())
    }


def _measure(folder: Path, name: str, budget: float) -> None:
    dump, page = f"{name}.shardviz", f"{name}.html"
    shardviz = [sys.executable, "-m", "shardviz"]
    quiet = "import sys; from shardviz.cli import main; main(['check', sys.argv[1]])"
    written, checked = compare(
        [*shardviz, "show", dump, "-o", page], [sys.executable, "-c", quiet, dump], runs=3, cwd=folder
    )
    print(f"{name}: page {written}, check {checked}")
    verdict(f"{name}: page / check", written.median / checked.median, 4)
    verdict(f"{name}: page in MiB", (folder / page).stat().st_size / MIB, budget)


if __name__ == "__main__":
    main()
