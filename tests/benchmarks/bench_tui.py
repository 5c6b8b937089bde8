"""The TUI on 723 tensors of 1,024 ranks, a plan of 16,384, one tensor of 128,256 x 8,192, and 8 ranks as a yardstick.

python tests/benchmarks/bench_tui.py                 first paint, a key to its frame, peak memory
python tests/benchmarks/bench_tui.py FOLDER WALK     the same of any dump, with the keys of one of `WALKS`

The real app, driven by keys; each dump in a process of its own, so that its peak memory is its own. Keys are judged by
processor time, which is the same on a busy machine.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from whole import verdict

WALKS = {
    "llama": [
        "down",
        "down",
        "v",
        "v",
        "f",
        "f",
        "2",
        "right",
        "down",
        "a",
        "1",
        "n",
        "v",
        "enter",
        "tab",
        "3",
        "4",
        "5",
        "6",
    ],
    "one": [
        "enter",
        "v",
        "down",
        "right",
        "shift+down",
        *["+"] * 12,
        "down",
        "right",
        "pagedown",
        "0",
        "2",
        "down",
        "1",
    ],
}
WALKS["wide"] = [
    *["down", "down", "right", "pagedown", "v", "v", "f", "f", "r", "r", "r", "end", "home"],
    *["enter", "+", "+", "pagedown", "shift+down", "0", "escape", "slash", "w", "1", "escape", "u", "u"],
    *["2", "right", "down", "pagedown", "a", "b", "b", "3", "down", "down", "pagedown", "end", "o", "]", "u"],
    *["slash", "w", "escape", "escape", "4", "5", "down", "pagedown", "a", "o", "6", "down", "right", "e", "f"],
    *["tab", "down", "end", "1", "g", "r", "9", "enter", "1", "g", "n", "o", "enter"],
]
"""Nearly all keys, each at its first use and again."""

NOTHING = "f12"
READING = 4.0
"""Seconds in which a user reads the first screen, and the other views are made."""
FIRST_PAINT, KEY_TO_FRAME, SLOWEST_KEY, MEMORY = 0.5, 0.05, 0.1, 500


def make_one(folder: Path) -> None:
    """Write a dump of one large tensor whose axes are in another order than its placements say, on 64 ranks."""
    from shardviz.layout.mesh import parse_mesh
    from tests.dumps import Made, make_dump

    tensor = Made("[128256/fsdp/tp, 8192]", "[128256/tp/fsdp, 8192]")
    make_dump(folder, parse_mesh("fsdp=8,tp=8"), {"output.weight": tensor})


def make_planned(folder: Path) -> None:
    """Write a plan of 405B parameters on 16,384 ranks: 16 stages, and one tensor that all ranks have a part of."""
    from shardviz.layout.mesh import Mesh, parse_mesh
    from tests.plans import make_plan, shifted

    whole, stage = parse_mesh("pp=16,fsdp=128,tp=8"), parse_mesh("fsdp=128,tp=8")
    flat = Mesh(("fsdp", "tp"), (2048, 8))
    rows, cols = "[53248/tp/fsdp, 16384]", "[16384/fsdp, 53248/tp]"
    stages = []
    for at in range(16):
        mesh = shifted(stage, at * stage.size)
        parts = {"attention.wq": rows, "attention.wo": cols, "ffn.w1": rows, "ffn.w2": cols, "norm": "[16384/fsdp]"}
        names = ((f"layers.{layer}", part) for layer in range(at * 8, at * 8 + 8) for part in parts)
        shared = {"tok_embeddings.weight": ("[131072/tp/fsdp, 16384]", flat)}
        stages.append(shared | {f"{layer}.{part}.weight": (parts[part], mesh) for layer, part in names})
    make_plan(folder, whole, stages)


def make_eight(folder: Path) -> None:
    """Write a dump of the same kind on 8 ranks: what a key costs where there is little to show."""
    from shardviz.layout.mesh import parse_mesh
    from tests.dumps import make_dump

    layers = {f"layers.{layer}.{part}.weight": "[16/tp/fsdp, 16]" for layer in range(4) for part in ("up", "down")}
    make_dump(folder, parse_mesh("fsdp=2,tp=4"), {"tok_embeddings.weight": "[64/tp/fsdp, 16]", **layers})


@dataclass(frozen=True)
class Pressed:
    """What a walk took.

    Attributes:
        first: Seconds to the first paint.
        loaded: Seconds until the dump was read and checked.
        worked: Seconds of processor for each key, without those of the pilot that presses it.
    """

    first: float
    loaded: float
    worked: list[float]


def measure(folder: Path, keys: list[str]) -> None:
    """Open a dump and press keys; print the seconds to the first paint, from each key to its frame, and the peak."""
    found = press(folder, keys)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    verdict("first paint in s", found.first, FIRST_PAINT)
    print(f"read and checked after {found.loaded:.2f} s")
    median, slowest = statistics.median(found.worked) * 1000, max(found.worked) * 1000
    verdict("a key to its frame in ms of processor, median", median, KEY_TO_FRAME * 1000)
    verdict("a key to its frame in ms of processor, slowest", slowest, SLOWEST_KEY * 1000)
    verdict("peak memory in MiB", peak, MEMORY)


def press(folder: Path, keys: list[str]) -> Pressed:
    """Open a dump in the viewer and press keys, each after the frame of the one before."""
    from shardviz.tui.app import ShardvizApp

    class Timed(ShardvizApp):
        painted = 0.0

        def on_mount(self) -> None:
            super().on_mount()
            self.call_after_refresh(self.note_paint)

        def note_paint(self) -> None:
            self.painted = time.perf_counter()

    async def run() -> Pressed:
        started = time.perf_counter()
        app = Timed(folder)
        taken = []
        async with app.run_test(size=(200, 60)) as pilot:
            await pilot.pause()
            first = app.painted - started
            await app.workers.wait_for_complete()
            await pilot.pause()
            loaded = time.perf_counter() - started
            await pilot.pause(READING)
            for key in (*[NOTHING] * 5, *keys):
                worked = time.process_time()
                await pilot.press(key)
                await pilot.pause()
                taken.append((key, time.process_time() - worked))
        for key, work in taken:
            print(f"    {key:<12} {work * 1000:5.1f} ms of processor")
        pilots = statistics.median(work for key, work in taken if key == NOTHING)
        print(f"    of which the pilot takes {pilots * 1000:.1f} ms for a key that does nothing")
        return Pressed(first, loaded, [work - pilots for key, work in taken if key != NOTHING])

    return asyncio.run(run())


def main() -> None:
    """Make both dumps and measure each."""
    here = Path(__file__).resolve()
    if len(sys.argv) == 3:
        measure(Path(sys.argv[1]), WALKS[sys.argv[2]])
        return
    sys.path.insert(0, str(here.parents[2]))
    from bench_check import make

    with tempfile.TemporaryDirectory() as parent:
        made = (("eight", make_eight, "wide"), ("llama", make, "llama"), ("llama", None, "wide"))
        for name, write, walk in (*made, ("planned", make_planned, "wide"), ("one", make_one, "one")):
            folder = Path(parent) / f"{name}.shardviz"
            if write is not None:
                write(folder)
            print(f"{name}, {walk} walk:", flush=True)
            subprocess.run([sys.executable, str(here), str(folder), walk], check=True)


if __name__ == "__main__":
    main()
