"""Plan Llama 3.1 405B on 16,384 ranks, beside the same 16 stages on 16 ranks; then show what was written.

python tests/benchmarks/bench_plan.py             seconds, memory, and what 1,024 times the ranks cost
python tests/benchmarks/bench_plan.py --gpus      the meshes of 1,024 ranks that fit a model of 70B parameters
python tests/benchmarks/bench_plan.py --profile   where one rank spends its time, by function
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import subprocess
import tempfile
import time
from pathlib import Path

from whole import compare, peak_memory_of_children, python, verdict

from shardviz import probe_files
from shardviz.commands.probe import mesh_for
from shardviz.live.plan.planning import PlanJob, load
from shardviz.live.plan.rank import answer
from shardviz.machine import cores

NAME = "plans/llama_405b"
LARGE, SMALL = "pp=16,fsdp=128,tp=8", "pp=16,fsdp=1,tp=1"
TABLE = 180
"""Seconds on two quiet cores for a table of 64 meshes."""

CORES = 2
BUDGET = 60
"""Seconds on two quiet cores: half as many as processor seconds."""

USAGE = """
import time
from pathlib import Path
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.tui.model.document import Document
dump = dump_of(read_files({folder!r}))
begin = time.process_time()
usage = Document(Path({folder!r}), dump).usage
usage.total, usage.by_role
print(time.process_time() - begin)
"""
"""Prints the processor seconds in which the viewer counts memory."""

KEYS = """
import statistics, sys
from pathlib import Path
from bench_tui import WALKS, press
worked = press(Path({folder!r}), WALKS["wide"]).worked
print(statistics.median(worked), max(worked))
"""
"""Prints the processor seconds of a key in the viewer, the median and the slowest, on its last line."""

OF_405B = "layers=126, features=16384, heads=128, kv_heads=8, hidden=53248"
OF_70B = "layers=80, features=8192, heads=64, kv_heads=8, hidden=28672"

VERB = "import sys; from shardviz.cli import main; sys.exit(main({!r}))"


def plan(mesh: str, folder: Path) -> list[str]:
    """Return the command that plans the model on a mesh."""
    return python(VERB.format(["plan", NAME, "--mesh", mesh, "--node", "8", "-o", str(folder), "--force"]))


def processor_seconds() -> float:
    """Return what all children that have ended took of processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print seconds and ratios, or a profile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--gpus", action="store_true")
    args = parser.parse_args()
    if args.profile:
        _profile()
        return
    if args.gpus:
        _meshes()
        return
    with tempfile.TemporaryDirectory() as parent:
        large, small = Path(parent) / "large.shardviz", Path(parent) / "small.shardviz"
        begin = processor_seconds()
        beside = compare(plan(LARGE, large), plan(SMALL, small), runs=1)
        used = (processor_seconds() - begin) / 2  # two runs of each, of which one is not counted
        memory = peak_memory_of_children()
        print(f"16,384 ranks: {beside[0]}\n16 ranks: {beside[1]}\nboth: {used:.1f} processor seconds")
        verdict("plan of 16,384 ranks / of 16", beside[0].median / beside[1].median, 2)
        verdict(f"seconds of both on {CORES} cores", used / CORES, 2 * BUDGET)
        verdict("peak memory of a rank that is asked, in MiB", memory / 2**20, 1024)
        counted = subprocess.run(python(USAGE.format(folder=str(large))), capture_output=True, text=True, check=True)
        verdict("processor seconds in which the viewer counts memory", float(counted.stdout), 0.5)
        keys = [_keys(folder) for folder in (large, small)]
        for what, one, other in zip(("median", "slowest"), *keys, strict=True):
            print(f"a key in the viewer, {what}: {one * 1000:.1f} ms of processor")
            verdict(f"a key on 16,384 ranks / on 16, {what}", one / other, 1.5)
        page = str(Path(parent) / "page.html")
        for verb in (["check"], ["show"], ["show", "--memory"], ["show", "--comms"], ["show", "-o", page]):
            commands = [python(_quietly([verb[0], str(folder), *verb[1:]])) for folder in (large, small)]
            one, other = compare(*commands, runs=3)
            print(f"{' '.join(verb)}: {one}")
            verdict(f"{' '.join(verb)} of 16,384 ranks in seconds", one.median, 10)
            verdict(f"{' '.join(verb)} of 16,384 ranks / of 16", one.median / other.median, 10)


def _meshes() -> None:
    with tempfile.TemporaryDirectory() as parent:
        probe = Path(parent) / "llama_70b.py"
        probe.write_text(probe_files.find(NAME).path.read_text().replace(OF_405B, OF_70B))
        command = python(VERB.format(["plan", str(probe), "--gpus", "1024", "--memory", "80GB", "--node", "8"]))
        begin = time.monotonic()
        subprocess.run(command, check=True)
        wall, used = time.monotonic() - begin, processor_seconds()
        print(f"64 meshes of 1,024 ranks: {wall:.1f} s on {cores()} cores, {used:.1f} processor seconds")
        verdict(f"seconds of the table on {CORES} cores", used / CORES, TABLE)
        verdict("peak memory of a rank that is asked, in MiB", peak_memory_of_children() / 2**20, 1024)


def _keys(folder: Path) -> list[float]:
    """Return the processor seconds of a key in the viewer, the median and the slowest."""
    command = python(KEYS.format(folder=str(folder)))
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    return [float(number) for number in shown.stdout.splitlines()[-1].split()]


def _quietly(arguments: list[str]) -> str:
    """Return code that runs a verb, whose exit code says what a check found."""
    return VERB.format(arguments).replace("sys.exit(main", "(main")


def _profile() -> None:
    probe = probe_files.find(NAME)
    job = PlanJob(probe, mesh_for(probe, LARGE))
    loaded = load(job)
    profile = cProfile.Profile()
    profile.runcall(answer, job, loaded, 0)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
