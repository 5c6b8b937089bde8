"""A plan's ranks have what torchrun sets in the environment, each its own; afterwards it is as it was."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shardviz import probe_files
from shardviz.cli import main
from shardviz.commands.probe import mesh_for
from shardviz.errors import ShardvizError
from shardviz.live.plan.planning import PlanJob, plan
from shardviz.live.plan.reads import variables_read
from shardviz.live.world.torchrun import environment_of, variables
from tests.lanes import at_night, nightly

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.dump.records.files import PlanRecord

HEAD = """
import os
import pathlib
import torch
from torch import nn
AXES, MESH = ("dp",), (8,)
def build(): return nn.Linear(8, 8)
def parallelize(model, mesh): pass
"""


def planned(code: str, folder: Path, node: int = 0) -> PlanRecord:
    file = folder / "mine.py"
    file.write_text(HEAD + code)
    probe = probe_files.find(str(file))
    return plan(PlanJob(probe, mesh_for(probe, None), node))[1]


def rows(record: PlanRecord) -> dict[int, int]:
    """Return how many rows the weight has on each rank."""
    found = {}
    for part in record.parts:
        weight = next(body for body in part.record.bodies if body.role == "param" and len(body.shape) == 2)
        found |= dict.fromkeys(part.at.get("dp", range(8)), weight.shape[0])
    return found


def test_ranks_have_the_numbers_that_torchrun_gives_them_node_by_node() -> None:
    found = [variables(rank, 8, 3) for rank in range(8)]
    assert [int(one["RANK"]) for one in found] == list(range(8))
    assert [int(one["LOCAL_RANK"]) for one in found] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [int(one["GROUP_RANK"]) for one in found] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [int(one["LOCAL_WORLD_SIZE"]) for one in found] == [3, 3, 3, 3, 3, 3, 2, 2]
    assert {(one["WORLD_SIZE"], one["GROUP_WORLD_SIZE"]) for one in found} == {("8", "3")}


@nightly
@pytest.mark.parametrize("node", [3, *at_night([0])])
def test_each_rank_that_is_asked_reads_its_own(node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setenv("RANK", "5")  # of a job in which this is planned
    before = dict(os.environ)
    code = """
def parallelize(model, mesh):
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = " ".join(os.environ[name] for name in names)
    pathlib.Path(__file__).with_name(f"rank {mesh.get_rank()}").write_text(found)
"""
    planned(code, tmp_path, node)
    first, last = ((tmp_path / f"rank {rank}").read_text() for rank in (0, 7))
    assert first == f"0 0 {node or 8} 127.0.0.1 1234"
    assert last == ("7 1 2 127.0.0.1 1234" if node else "7 7 8 127.0.0.1 1234")
    assert dict(os.environ) == before


READ = 'os.environ["RANK"]', 'os.environ.get("RANK", 0)', 'os.getenv("LOCAL_RANK", "0")'


@pytest.mark.parametrize(
    ("where", "read"),
    [
        ("import", READ[0]),
        *at_night([("import", READ[2]), ("build", READ[1])]),
        *at_night(zip(("build", "import", "build"), READ, strict=True)),
    ],
)
def test_what_depends_on_the_environment_is_each_ranks_own(where: str, read: str, tmp_path: Path) -> None:
    at_import, in_build = (f"OWN = int({read})", "OWN") if where == "import" else ("", f"int({read})")
    code = f"{at_import}\ndef build(): return nn.Linear(8, 16 if {in_build} == 7 else 8)"
    assert rows(planned(code, tmp_path)) == {**dict.fromkeys(range(7), 8), 7: 16}


@nightly
@pytest.mark.parametrize(("read", "times"), [('os.environ["RANK"]', 1 + 8), ('os.environ["WORLD_SIZE"]', 1)])
def test_only_a_probe_that_reads_which_rank_it_is_is_imported_on_each(read: str, times: int, tmp_path: Path) -> None:
    code = f"""
{read}
with pathlib.Path(__file__).with_name("imported").open("a") as file: file.write("once ")
"""
    planned(code, tmp_path)
    assert len((tmp_path / "imported").read_text().split()) == times


@pytest.mark.parametrize("read", ["", *at_night(['os.environ.get("RANK")'])])
def test_what_a_probe_sets_while_it_is_imported_is_there_when_it_builds(
    read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OWN_WIDTH", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")  # so that it is taken back
        monkeypatch.delenv(name)
    monkeypatch.delenv("RANK", raising=False)
    code = f"""
{read}
os.environ["OWN_WIDTH"] = "16"
os.environ["MASTER_PORT"] = "24"
def build(): return nn.Linear(8, int(os.environ["OWN_WIDTH"]) + int(os.environ["MASTER_PORT"]))
"""
    assert rows(planned(code, tmp_path)) == dict.fromkeys(range(8), 16 + 24)
    assert "RANK" not in os.environ


ONCE = 'OWN = int(os.environ["LOCAL_RANK"])\nLIBRARY = torch.library.Library("only_once", "DEF")'


@nightly
def test_a_probe_that_cannot_be_imported_twice_is_planned_as_the_first_rank_imports_it(tmp_path: Path) -> None:
    record = planned(f"{ONCE}\ndef build(): return nn.Linear(8, 16 if OWN == 7 else 8)", tmp_path)
    assert rows(record) == dict.fromkeys(range(8), 8)
    assert any("cannot be imported twice, so all ranks have what rank 0 reads" in said for said in record.how)


def test_a_probe_that_one_rank_cannot_import_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardvizError, match="py raised AssertionError"):
        planned('assert os.environ["RANK"] != "7"', tmp_path)


def test_what_torch_reads_is_not_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import distributed

    monkeypatch.setenv("HOME", "/root")

    with environment_of(1, 4, 2), variables_read() as found:
        assert distributed.get_node_local_rank() == 1
        assert not found
        assert os.environ.get("HOME") is not None
        assert not found
        assert os.environ.get("LOCAL_RANK") == "1"
        assert found.keys() == {"LOCAL_RANK"}


def test_a_process_group_at_import_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + 'torch.distributed.init_process_group("gloo")')
    assert main(["plan", "mine.py"]) == 2
    said = capfd.readouterr().err
    assert "init_process_group() is called while the probe is imported" in said
    assert "Hint: the ranks are there before parallelize() is called: leave out init_process_group" in said


def test_a_process_group_in_parallelize_is_not_said_to_be_one_at_import(tmp_path: Path) -> None:
    code = """
from torch.distributed import init_process_group
def parallelize(model, mesh): init_process_group("gloo")
"""
    with pytest.raises(ShardvizError, match="twice") as raised:
        planned(code, tmp_path)
    assert "leave out init_process_group" in raised.value.hint
