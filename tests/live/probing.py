"""Run a probe on real ranks that stand ready, and lay its dump side by side, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from shardviz import probe_files
from shardviz.check.run import report_on
from shardviz.dump.dump import Dump, dump_of
from shardviz.dump.read import read_files
from shardviz.dump.write import prepare_folder
from shardviz.errors import ProbeError
from shardviz.layout.mesh import parse_mesh
from shardviz.live.job import VALUES_LIMIT, ProbeJob
from tests.contract import recording
from tests.live import standing

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.check.report import Report

HEAD = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.fsdp import fully_shard
BATCH_AXES = ("dp",)
def build(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
def parallelize(model, mesh): fully_shard(model, mesh=mesh["dp"])
def batch(): return torch.randn(12, 6)
"""


def run_probe(
    probe: str,
    mesh_text: str,
    folder: Path,
    *,
    values_limit: int = VALUES_LIMIT,
    alone: bool = False,
    question: str = "",
) -> Dump:
    """Return what the probe's ranks wrote; if it raises, `alone` saves the try on ranks that stand ready.

    A probe that this torch is too old for is skipped. `question` is what is asked of the ranks after the step, as
    `shardviz probe` does.
    """
    found = probe_files.find(probe)
    try:
        probe_files.check_torch(found)
    except ProbeError as error:
        pytest.skip(error.message)
    mesh = parse_mesh(mesh_text, found.axes)
    job = ProbeJob(found, mesh, prepare_folder(folder), values_limit=values_limit)
    job = replace(job, keeps_evidence=recording.is_on(), question=question)
    job.launch() if alone else standing.run(job)
    return dump_of(read_files(folder))


def checked(text: str, mesh: str, folder: Path, *, alone: bool = False) -> Report:
    """Run a probe of which only what differs from `HEAD` is written, and check what its ranks wrote."""
    folder.mkdir(exist_ok=True)
    probe = folder / "mine.py"
    probe.write_text(HEAD + text)
    return report_on(run_probe(str(probe), mesh, folder / "dump", alone=alone))
