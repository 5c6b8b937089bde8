"""A plan beside real gloo ranks: the same layouts, the same bytes, the same collectives, to the byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz import probe_files
from shardviz.commands.probe import mesh_for
from shardviz.dump.read import read_files
from shardviz.dump.write import prepare_folder, write_plan, write_run
from shardviz.errors import ShardvizError
from shardviz.live.job import ProbeJob
from shardviz.live.plan.planning import PlanJob, plan
from tests.lanes import TORCH, at_night
from tests.live import standing
from tests.plan.agreeing import differences

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.dump.read import DumpFiles

DAILY = {"tp_fsdp": "2,2", "fsdp1_full_shard": "2", "pp_gpipe": "2"}
"""One of each kind on a small mesh: DTensors, flat parameters, ranks that differ. The nightly lane has all."""

NEEDS_GPUS = ("dataparallel",)

USES_RANKS = ("checkpoint_dcp", "checkpoint_hf", "checkpoint_optimizer")
"""Probes whose `parallelize` saves and loads a checkpoint, for which other ranks have to be there."""

READS_VALUES = ("ep", "ep_fsdp")
"""Probes whose tokens go where their values say: a plan spreads them evenly, and says so."""

OTHER_MESHES = {"fsdp": "7", "tp_fsdp": "2,5", "tp_sequence": "5", "hsdp": "2,3", "pp_interleaved": "3"}


def planned(name: str, mesh_text: str | None, folder: Path) -> DumpFiles:
    """Return what a plan of a probe says, in float64 as the probe runs."""
    probe = probe_files.find(name)
    run, record = plan(PlanJob(probe, mesh_for(probe, mesh_text), double=True))
    assert record.without_step == ""
    assert any("planned as if" in line for line in record.how) == (name in READS_VALUES), record.how
    prepare_folder(folder)
    write_run(folder, run)
    write_plan(folder, record)
    return read_files(folder)


def ran(name: str, mesh_text: str | None, folder: Path) -> DumpFiles:
    """Return what real ranks wrote."""
    probe = probe_files.find(name)
    standing.run(ProbeJob(probe, mesh_for(probe, mesh_text), prepare_folder(folder)))
    return read_files(folder)


IN_FIRST_STEP = "('pp',), 2, '', 'outside',"
"""From torch 2.14 on stages vote on how shapes are known, and connect, in a first step that is not of a fake world."""


def _names() -> list[object]:
    shipped = [one.name for one in probe_files.shipped() if not one.name.startswith("plans/")]
    own = [(name, None) for name in shipped if name not in (*NEEDS_GPUS, *USES_RANKS)]
    return [*DAILY.items(), *at_night(own)]


@pytest.mark.parametrize(("name", "mesh"), _names())
def test_layouts_bytes_and_collectives_are_those_of_real_ranks(name: str, mesh: str | None, tmp_path: Path) -> None:
    real, other = ran(name, mesh, tmp_path / "real"), planned(name, mesh, tmp_path / "plan")
    lines = list(differences(real, other, with_step=name not in READS_VALUES))
    assert [line for line in lines if TORCH < (2, 14) or IN_FIRST_STEP not in line] == []


@pytest.mark.parametrize("name", at_night(USES_RANKS))
def test_what_needs_other_ranks_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ShardvizError, match=r"parallelize\(\) calls broadcast_object_list .*a plan sends nothing"):
        planned(name, None, tmp_path / "plan")


@pytest.mark.parametrize(("name", "mesh"), at_night(OTHER_MESHES.items()))
def test_so_they_are_where_parts_are_uneven(name: str, mesh: str, tmp_path: Path) -> None:
    real, other = ran(name, mesh, tmp_path / "real"), planned(name, mesh, tmp_path / "plan")
    assert list(differences(real, other, with_step=True)) == []
