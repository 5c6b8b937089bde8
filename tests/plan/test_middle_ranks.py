"""A rank in the middle that does something of its own is asked where the user's code reads which rank it is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import shardviz.probes.fsdp
from shardviz import probe_files
from shardviz.commands.probe import mesh_for
from shardviz.dump.plan import PlannedRanks
from shardviz.layout.mesh import Mesh
from shardviz.live.compat.worlds import fake_world
from shardviz.live.plan import choosing, forks
from shardviz.live.plan.forks import is_own
from shardviz.live.plan.planning import PlanJob, plan
from shardviz.live.plan.reads import places_read
from shardviz.live.world.torchrun import environment_of
from tests.lanes import at_night

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.dump.records.files import PlanRecord

HEAD = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_rank
AXES, MESH, BATCH_AXES = ("dp", "tp"), (2, 4), ("dp",)
def build(): return nn.Linear(64, 64)
def batch(): return torch.randn(8, 64)
"""

ASKED = {
    "dist.get_rank() == 5": [5],
    "int(os.environ['RANK']) == 5": [5],
    "mesh.get_group('tp').rank() == 2": [2, 6],
    "tuple(mesh.get_coordinate()) == (0, 3)": [3],
}
ASKED_AT_NIGHT = {
    "mesh.get_rank() % 4 == 2": [2, 6],
    "mesh['tp'].get_local_rank() == 2": [2, 6],
    "dist.get_rank(mesh.get_group('tp')) == 2": [2, 6],
    "get_rank() in {5, 6}": [5, 6],
    "os.getenv('LOCAL_RANK') == '6'": [6],
    "mesh.get_local_rank('tp') == 2": [2, 6],
}
"""The same by other names; each is read by the same lines as one of `ASKED`."""


def planned(code: str, folder: Path, mesh: str | None = None, *, with_step: bool = False) -> tuple[PlanRecord, Mesh]:
    file = folder / "mine.py"
    file.write_text(HEAD + code)
    probe = probe_files.find(str(file))
    job = PlanJob(probe, mesh_for(probe, mesh), with_step=with_step)
    return plan(job)[1], job.mesh


def special(code: str, folder: Path, mesh: str | None = None) -> list[int]:
    """Return the ranks that have more tensors than some other."""
    ranks = PlannedRanks(*planned(code, folder, mesh))
    numbers = {rank: len(ranks.part_of(rank).part.record.tensors) for rank in ranks.mesh.ranks}
    return [rank for rank, number in numbers.items() if number > min(numbers.values())]


@pytest.mark.parametrize(("asks", "ranks"), [*ASKED.items(), *at_night(ASKED_AT_NIGHT.items())])
def test_the_rank_that_is_special_is_found(asks: str, ranks: list[int], tmp_path: Path) -> None:
    code = f"def parallelize(model, mesh):\n    if {asks}: model.extra = nn.Linear(8, 8)"
    assert special(code, tmp_path) == ranks


@pytest.mark.parametrize("name", ["torch", *at_night(["shardviz", "probes"])])
def test_code_is_the_users_own_whatever_its_folder_is_called(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    code = "def parallelize(model, mesh):\n    if get_rank() == 5: model.extra = nn.Linear(8, 8)"
    assert special(code, tmp_path / name) == [5]


def test_code_of_libraries_is_not_the_users_own() -> None:
    assert not any(map(is_own, (os.__file__, str(torch.nn.__file__), forks.__file__, "<string>")))
    assert all(map(is_own, (str(shardviz.probes.fsdp.__file__), __file__, forks.TORCH.rstrip(os.sep) + "_mine/x.py")))


def test_the_rank_that_is_special_in_its_step_only_is_found(tmp_path: Path) -> None:
    code = """
def parallelize(model, mesh): pass
def loss(model, x): return model(x if dist.get_rank() != 5 else x.repeat(99, 1)).sum()
"""
    parts = planned(code, tmp_path, with_step=True)[0].parts
    peaks = {part.peak.activations for part in parts if part.peak is not None}
    assert len(peaks) == 2
    assert {"dp": (1,), "tp": (1,)} in [part.at for part in parts]


@pytest.mark.parametrize("reads", ["len(os.environ)", "dist.get_world_size()", "mesh['tp'].size()", "dist.barrier()"])
def test_code_that_does_not_ask_for_its_place_is_asked_on_two_ranks(reads: str, tmp_path: Path) -> None:
    record, _ = planned(f"def parallelize(model, mesh): {reads}", tmp_path)
    assert record.how == ("2 ranks of 8 asked",)


def test_a_rank_outside_of_a_mesh_asks_for_its_place_in_it(tmp_path: Path) -> None:
    code = """
from torch.distributed.device_mesh import DeviceMesh
def parallelize(model, mesh):
    if DeviceMesh("cpu", [2, 3]).get_coordinate() is not None: model.extra = nn.Linear(8, 8)
"""
    assert special(code, tmp_path) == [2, 3]


def test_ranks_that_read_their_place_and_are_alike_are_one_part(tmp_path: Path) -> None:
    record, _ = planned("def parallelize(model, mesh): print(get_rank())", tmp_path)
    assert record.how == ("8 ranks of 8 asked",)
    assert len(record.parts) == 1


def test_positions_are_asked_only_along_the_axes_that_are_read(tmp_path: Path) -> None:
    record, _ = planned("def parallelize(model, mesh): mesh.get_local_rank('tp')", tmp_path, "512,4")
    assert record.how == ("4 ranks of 2,048 asked",)


def test_where_the_places_are_too_many_it_says_that_not_all_were_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "MAX_READING", 4)
    code = "def parallelize(model, mesh):\n    if mesh.get_local_rank('dp') == 3: model.extra = nn.Linear(8, 8)"
    assert special(code, tmp_path, "4,2") == [6, 7]
    record, _ = planned(code, tmp_path, "8,2")
    assert len(record.parts) == 1
    assert record.how == (
        "2 ranks of 16 asked",
        "the code reads its place along dp (mine.py, line 11: if mesh.get_local_rank('dp') == 3: model.extra = "
        "nn.Linear(8, 8)): 2 of these 8 places were asked, and one in the middle that does something else is planned "
        "as if it did not",
    )


def test_only_what_own_code_reads_counts() -> None:
    mesh = Mesh(("dp", "tp"), (2, 4))
    with environment_of(5, 8, 8), fake_world(5, 8), places_read(mesh) as found:
        device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)
        distributed.get_node_local_rank() if hasattr(distributed, "get_node_local_rank") else None
        assert os.environ["WORLD_SIZE"] == "8"
        assert not found
        assert device_mesh.get_local_rank("tp") == 1
        assert found.keys() == {"tp"}
        assert distributed.get_rank() == 5
        assert found.keys() == {"dp", "tp"}
        assert "test_middle_ranks.py, line " in found["dp"]
