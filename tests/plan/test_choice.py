"""The table of `plan --gpus`: each row is what a plan of that mesh alone says."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from shardviz import probe_files
from shardviz.cli import main
from shardviz.commands.plan import PlanProgress
from shardviz.dump.plan import PlannedRanks
from shardviz.layout.mesh import Mesh
from shardviz.live.plan.planning import PlanJob, plan, rows
from shardviz.picture.text.plans import choice_lines
from shardviz.plan.alternatives import Row, fitting_meshes, meshes
from shardviz.plan.counting import PlanBytes
from shardviz.text import bytes_text
from tests.lanes import at_night, nightly, since_torch

MINE = """
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
AXES = ("fsdp", "tp")
MESH = (2, 4)
BATCH_AXES = ("fsdp",)
def build(): return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 64, bias=False))
def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model[2], mesh=mesh["fsdp"], offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=mesh["fsdp"])
def batch(): return torch.randn(64, 64)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def printed(capfd: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    """Return what a command prints; no line is wider than the screen."""
    assert main(["plan", *args]) == code
    out, err = capfd.readouterr()
    assert not [line for line in out.splitlines() if cell_len(line) > 80]
    assert "Traceback" not in err
    return out


def cells(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return re.split(" {2,}", line.strip())


@pytest.mark.parametrize(("gpus", "count"), [(2, 2), *at_night([(8, 4)])])
def test_each_row_is_what_a_plan_of_its_mesh_says(
    gpus: int, count: int, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = str(gpus // 2)
    head, *rows = printed(capfd, mine.name, "--gpus", str(gpus), "--node", node).splitlines()
    assert cells(head) == ["mesh", "fullest rank", "in the CPU's memory", "crosses nodes"]
    assert len(rows) == count
    for mesh, fullest, offloaded, crossing in map(cells, rows):
        alone = printed(capfd, mine.name, "--mesh", mesh.strip("()"), "--node", node, "--force", "-o", "one.shardviz")
        said = {line[:21].strip(): cells(line[21:])[0] for line in alone.splitlines()}
        assert (fullest, offloaded) == (said["on the GPU"], said["in the CPU's memory"])
        assert f"a rank receives at most {crossing} in a step" in " ".join(alone.split())


@nightly
def test_what_is_in_the_memory_of_a_cpu_need_not_fit_into_the_gpus(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fits(memory: str, code: int = 0) -> list[list[str]]:
        text = printed(capfd, mine.name, "--gpus", "2", "--no-step", "--memory", memory, code=code)
        return [row for row in map(cells, text.splitlines()) if row[0] == "(fsdp=1, tp=2)"]

    # of model[2] 64 x 64 numbers of 4 bytes, as many of its gradient, twice as many of Adam; the others are split by tp
    assert fits("1GB") == [["(fsdp=1, tp=2)", "at least 340 KiB", "64 KiB"]]
    assert fits("350KiB")
    mine.write_text(MINE.replace("offload_policy=CPUOffloadPolicy()", "reshard_after_forward=True"))
    assert fits("1GB") == [["(fsdp=1, tp=2)", "at least 404 KiB"]]
    assert not fits("350KiB", code=1)


@nightly
@since_torch(2, 7)  # FSDP2 of 2.6 splits no uneven parts of tensor parallelism
def test_a_mesh_on_which_the_step_fails_is_not_among_those_that_fit_and_says_why(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = printed(capfd, mine.name, "--gpus", "3", "--memory", "80GB")
    _, first, *why = text.splitlines()
    assert cells(first)[0] == "(fsdp=3, tp=1)"
    reason = "a step run without values raised RuntimeError: a and b must have same reduction dim"
    assert " ".join(" ".join(why).split()).startswith(f"the step fails on (fsdp=1, tp=3): {reason}")


@nightly
def test_where_the_step_fails_on_all_meshes_that_would_fit_none_does(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(MINE.replace("offload_policy=CPUOffloadPolicy()", "reshard_after_forward=True"))
    text = " ".join(printed(capfd, mine.name, "--gpus", "3", "--batch", "2,64", "--memory", "1GB", code=1).split())
    of_rows = "the step fails on (fsdp=3, tp=1): the batch has 2 rows for 3 ranks: return at least 3 rows"
    assert text.startswith(f"{of_rows} the step fails on (fsdp=1, tp=3): a step run with values raised RuntimeError: ")


@nightly
@pytest.mark.parametrize("probe", ["def batch(): return None", *at_night(["def loss(model, x): return 1 / 0"])])
def test_a_step_that_fails_on_any_mesh_is_no_step_that_fits(
    probe: str, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(MINE.replace("offload_policy=CPUOffloadPolicy()", "reshard_after_forward=True") + probe)
    text = printed(capfd, mine.name, "--gpus", "2", code=1)
    assert text.startswith("the step fails on (fsdp=2, tp=1), (fsdp=1, tp=2): ")


@nightly
@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ("del batch", "no step was planned: the probe has no batch(), and no --batch is given"),
        *at_night(
            [
                ("def loss(model, x): return model(x).cuda().sum()", "a plan has no GPU"),
                ("def loss(model, x): return model(x if x.sum() > 0 else model(x)).sum()", "the step reads a value"),
            ]
        ),
    ],
)
def test_where_no_step_can_be_planned_meshes_are_listed_and_why_is_said_once(
    probe: str, said: str, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(MINE + probe)
    text = printed(capfd, mine.name, "--gpus", "2")
    assert re.findall(r"^\(fsdp=., tp=.\) +at least ", text, re.MULTILINE) == [
        "(fsdp=1, tp=2)  at least ",
        "(fsdp=2, tp=1)  at least ",
    ]
    assert "fails" not in text
    assert "crosses nodes" not in text, "no --node is given"
    assert " ".join(text.split()).count(said) == 1


def test_a_step_that_fails_only_without_values_fails_where_other_meshes_have_one() -> None:
    meshes_ = [Mesh(("dp", "tp"), shape) for shape in ((4, 2), (2, 4), (1, 8))]
    one, other, last = (Row(mesh, 9, without_step="raised", step_fails="perhaps") for mesh in meshes_)
    assert fitting_meshes([one, other, last], 10) == [one, other, last]  # the plan may be at fault
    planned = replace(one, without_step="", step_fails="no")
    too_large = replace(planned, bytes=11)
    assert fitting_meshes([planned, other, last], 10) == [planned]
    assert fitting_meshes([too_large, other, last], 10) == []
    assert fitting_meshes([replace(too_large, failed="not planned"), other, last], 10) == [other, last]
    text = "\n".join(line.plain for line in choice_lines([too_large, other, last], 10, 80))
    assert "the step fails on (dp=2, tp=4), (dp=1, tp=8): raised\n1 mesh needs more than 10 B" in text


def test_reasons_that_differ_in_numbers_are_one_line() -> None:
    four, two = (Mesh(("dp",), (size,)) for size in (4, 2))
    rows = [Row(mesh, without_step=f"3 rows for {mesh.size} ranks", step_fails="yes") for mesh in (four, two)]
    (said,) = choice_lines(rows, 0, 80)
    assert said.plain == "the step fails on (dp=4): 3 rows for 4 ranks; with other numbers on (dp=2)"
    rows = [Row(four, failed="no rows"), Row(two, failed="no columns")]
    assert [text.plain for text in choice_lines(rows, 0, 80)] == [
        "not planned: (dp=4): no rows",
        "not planned: (dp=2): no columns",
    ]


@nightly
def test_where_nothing_fits_it_says_what_the_smallest_needs(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = printed(capfd, mine.name, "--gpus", "1", "--memory", "1KB", code=1)
    assert re.fullmatch(r"1 mesh needs more than 1000 B, at least \d+ KiB on \(fsdp=1, tp=1\)\n", text)


def test_texts_below_the_table_fit_the_screen_and_are_said_once() -> None:
    one, other = (Mesh(("dp", "tp"), shape) for shape in ((4, 2), (2, 4)))
    note = "the optimizer's state is that of Adam: optimizer() returned Own, which has no state that could be seen"
    why = "the sequence of 63 tokens is split over tp(4), and " + "63 is not a multiple of it " * 4
    rows = [
        Row(one, 1 << 30, notes=(note,)),
        Row(other, 1 << 20, notes=(note,), without_step=why),
        *(Row(mesh, failed="[red]no[/]\x1b[31m") for mesh in meshes(("dp", "tp"), 3)),
    ]
    lines = [text.plain for text in choice_lines(rows, 0, 60)]
    assert max(map(len, lines)) <= 60
    text = " ".join(" ".join(lines).split())
    assert text.count(note) == 1
    assert f"{other}: without activations and collectives: {' '.join(why.split())}" in text
    assert "not planned: (dp=3, tp=1), (dp=1, tp=3): [red]no[/]" in text
    assert "\x1b" not in text


def test_every_way_to_share_out_a_number_of_gpus_is_tried_once() -> None:
    assert [mesh.shape for mesh in meshes(("dp", "tp"), 1)] == [(1, 1)]
    assert sorted(mesh.shape for mesh in meshes(("dp", "tp"), 7)) == [(1, 7), (7, 1)]
    thousand = meshes(("dp", "tp"), 1000)
    assert len(thousand) == len({mesh.shape for mesh in thousand}) == 16
    assert all(mesh.size == 1000 for mesh in thousand)


def test_what_is_planned_by_ctrl_c_is_printed(
    mine: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardviz.live.plan.forks.cores", lambda: 1)
    stop = "    if mesh.shape[1] == 2: os.kill(os.getppid(), signal.SIGINT)\n"
    mine.write_text(f"import os, signal\n{MINE}def check_mesh(mesh):\n{stop}")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores it
    try:
        assert main(["plan", str(mine), "--gpus", "2", "--no-step"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capfd.readouterr()
    assert "planned 1 of 2 meshes" in err
    assert [cells(line)[0] for line in out.splitlines()[:2]] == ["mesh", "(fsdp=2, tp=1)"]


FAILS_ON_TWO = """
def step(model, x, mesh):
    if mesh["tp"].size() == 2:
        open(f"stepped{mesh.get_rank()}", "w").close()
        raise ValueError("no")
    model(x).sum().backward()
"""


def test_of_a_mesh_on_which_the_step_fails_no_other_rank_is_asked(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(MINE + FAILS_ON_TWO)
    text = printed(capfd, mine.name, "--gpus", "2")
    assert "the step fails on (fsdp=1, tp=2): a step run without values raised ValueError: no" in " ".join(text.split())
    assert [path.name for path in Path().glob("stepped*")] == ["stepped0"]


KILLED_ONCE = """
import os
shard = parallelize
def parallelize(model, mesh):
    if not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), 9)
    shard(model, mesh)
"""


@nightly
def test_a_mesh_whose_rank_the_system_kills_next_to_others_is_planned_alone(
    mine: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardviz.live.plan.forks.cores", lambda: 2)
    mine.write_text(MINE + KILLED_ONCE)
    out = printed(capfd, mine.name, "--gpus", "2", "--no-step")
    assert {cells(line)[0] for line in out.splitlines()[1:3]} == {"(fsdp=2, tp=1)", "(fsdp=1, tp=2)"}
    assert Path("killed").exists()


@nightly
def test_a_mesh_on_which_what_lasts_does_not_fit_is_planned_without_a_step(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(MINE.replace("def batch(): ", "def batch():\n    open('stepped', 'w').close()\n    "))
    out = printed(capfd, str(mine), "--gpus", "2", "--memory", "1KB", code=1)
    assert "2 meshes need more than 1000 B" in out
    assert not Path("stepped").exists()
    printed(capfd, str(mine), "--gpus", "2", "--memory", "1GB")
    assert Path("stepped").exists()


def test_a_mesh_that_is_too_large_counts_as_done_once_it_was_looked_at(mine: Path) -> None:
    job = PlanJob(probe_files.find(str(mine)), Mesh(("fsdp", "tp"), (1, 2)))
    doing = PlanProgress(2)
    planned = rows(job, meshes(("fsdp", "tp"), 2), 1000, doing.ended)
    assert next(planned).bytes > 1000
    assert str(doing) == "2 of 2 meshes done"
    assert len(list(planned)) == 1


STAGED = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
AXES = ("pp", "fsdp", "tp")
MESH = (2, 2, 2)
STAGE_AXES = ("pp",)
BATCH_AXES = ()
def build(): return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
def parallelize(model, mesh):
    per_stage = -(-4 // mesh["pp"].size())
    first = mesh.get_local_rank("pp") * per_stage
    kept = model[first:first + per_stage]
    for layer in kept: parallelize_module(layer, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    for layer in kept: fully_shard(layer, mesh=mesh["fsdp"])
    return fully_shard(kept, mesh=mesh["fsdp"])
def batch(): return torch.randn(8, 64)
"""


@pytest.fixture
def staged(mine: Path) -> Path:
    mine.write_text(STAGED)
    return mine


EMPTY_FIRST = """
from torch import nn
AXES = STAGE_AXES = ("pp",)
MESH = (2,)
def build(): return nn.Linear(64, 64)
def parallelize(model, mesh): return model if mesh.get_local_rank("pp") else nn.Sequential()
"""


@nightly
def test_a_first_rank_without_parameters_is_planned_where_no_axis_has_idle_stages(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(EMPTY_FIRST)
    text = printed(capfd, mine.name, "--gpus", "2", "--memory", "80GB")
    assert "(pp=2)" in text
    assert "would have no parameters" not in text


def test_how_far_it_is_is_whole_before_the_probe_is_loaded() -> None:
    assert str(PlanProgress(12)) == "0 of 12 meshes done"


@pytest.mark.parametrize(
    ("passed", "done", "said"),
    [
        (5, 1, "1 of 12 meshes done"),
        (60, 0, "0 of 12 meshes done"),
        (60, 3, "3 of 12 meshes done, about 3 min left"),
        (110, 11, "11 of 12 meshes done, less than 1 min left"),
        (110, 12, "12 of 12 meshes done"),
    ],
)
def test_how_long_it_takes_yet_is_said_once_it_is_known(passed: float, done: int, said: str) -> None:
    assert str(PlanProgress(12, done, begun=time.monotonic() - passed)) == said


def test_a_mesh_with_idle_stages_is_not_planned(staged: Path, capfd: pytest.CaptureFixture[str]) -> None:
    staged.write_text(STAGED.replace("range(4)", "range(2)").replace("-(-4 //", "-(-2 //"))
    text = printed(capfd, staged.name, "--gpus", "4", "--no-step")
    assert "not planned: (pp=4, fsdp=1, tp=1): stages of pp would have no parameters" in " ".join(text.split())
    assert {cells(line)[0].partition(",")[0] for line in text.splitlines() if line.startswith("(pp")} == {
        "(pp=1",
        "(pp=2",
    }


@nightly
def test_axes_of_one_rank_are_told_apart_by_name(staged: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = printed(capfd, staged.name, "--mesh", "1,2,1", "-o", "one.shardviz")
    assert "all_gather along fsdp" in text


@nightly
def test_of_meshes_that_do_not_fit_the_smallest_is_known_to_the_byte(
    staged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(printed(capfd, staged.name, "--gpus", "2", "--memory", "1KB", code=1).split())
    said = re.search(r"3 meshes need more than 1000 B, at least ([\d.]+ \w+) on \((.*?)\)", text)
    assert said is not None
    by_mesh = {str(mesh): lasting(staged, mesh) for mesh in meshes(("pp", "fsdp", "tp"), 2)}
    assert by_mesh[f"({said[2]})"] == min(by_mesh.values())
    assert said[1] == bytes_text(min(by_mesh.values()))


def lasting(path: Path, mesh: Mesh) -> int:
    """Return the bytes of parameters and optimizer state on the fullest rank of a mesh."""
    _, record = plan(PlanJob(probe_files.find(str(path)), mesh, with_step=False))
    return int(PlanBytes(PlannedRanks(record, mesh)).lasting.max())


@nightly
def test_where_a_step_fails_on_the_first_rank_it_is_not_tried_on_all(
    staged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = "def step(model, x, mesh):\n    open(f'stepped{mesh.get_rank()}', 'w')\n    raise ValueError('no')\n"
    staged.write_text(STAGED + stop)
    text = printed(capfd, staged.name, "--mesh", "4,2,1", "-o", "one.shardviz")
    assert "a step run with values raised ValueError: no" in " ".join(text.split())
    assert sorted(path.name for path in Path().glob("stepped*")) == ["stepped0", "stepped7"]


def test_how_many_meshes_are_left_out_is_said(
    mine: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardviz.plan.alternatives.MOST_MESHES", 1)
    assert main(["plan", mine.name, "--gpus", "2", "--no-step"]) == 0
    out, err = capfd.readouterr()
    assert "trying the 1 likeliest of 2 meshes" in err
    assert [cells(line)[0] for line in out.splitlines()[:2]] == ["mesh", "(fsdp=2, tp=1)"]
    assert "tp=2" not in out
