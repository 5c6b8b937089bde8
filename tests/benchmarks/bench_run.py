"""A small real job under torchrun with `shardviz run` in front of it, against the same job alone.

Seconds of the processor are compared too: on a machine that does other things they say more than those of the clock.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from whole import verdict

JOB = """
import torch
from torch import nn, distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(30):
    model(torch.randn(64, 1024)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "job.py"]
RUN = [sys.executable, "-m", "shardviz", "run", "-o", "job.shardviz", "--force", "--"]
PAIRS = 5


def spent(command: list[str], folder: Path) -> tuple[float, float]:
    """Return a command's seconds by the clock and on the processor, those of all of its processes together."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=False, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, ended = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    return ended - begun, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print both ratios, each of the medians of alternated runs."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        taken = [(spent(TORCHRUN, folder), spent([*RUN, *TORCHRUN], folder)) for _ in range(pairs + 1)][1:]
    for which, what in enumerate(("by the clock", "on the processor")):
        plain, watched = (statistics.median(pair[one][which] for pair in taken) for one in (0, 1))
        print(f"{what}: the job {plain:.2f} s, under shardviz run {watched:.2f} s ({pairs} pairs)")
        verdict(f"shardviz run / plain job, {what}", watched / plain, 1.1)


if __name__ == "__main__":
    main()
