"""A lockfile in a fake CI: what is printed when a model changes, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardviz.cli import main
from shardviz.errors import MeshError, ShardvizError
from shardviz.layout.mesh import parse_mesh
from shardviz.plan.lock import layouts_of, read_lock
from shardviz.testing import ShardAssertionError, assert_layout
from tests.dumps import make_dump
from tests.lanes import nightly

JOB = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
AXES = BATCH_AXES = ("dp",)
MESH = (4,)
LAYERS = 3

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x): return self.down(self.up(x))

def build(): return nn.Sequential(*[Block() for _ in range(LAYERS)])

def parallelize(model, mesh): fully_shard(model, mesh=mesh)

def batch(): return torch.zeros(4, 8)
"""


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a job and its lockfile, for copies of it to be changed."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "job.py").write_text(JOB)
    assert main(["plan", str(folder / "job.py"), "--lock", str(folder / "l.lock")]) == 0
    return folder


@pytest.fixture
def job(locked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(locked, tmp_path, dirs_exist_ok=True)
    return tmp_path / "job.py"


def again(capfd: pytest.CaptureFixture[str], code: int, *options: str) -> tuple[list[str], str]:
    """Return the lines and the messages of another plan beside the lockfile."""
    capfd.readouterr()
    assert main(["plan", "job.py", "--lock", "l.lock", *options]) == code
    said = capfd.readouterr()
    return said.out.splitlines(), said.err


def test_a_layer_more_costs_a_layer(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job.write_text(JOB.replace("LAYERS = 3", "LAYERS = 4"))
    lines, _ = again(capfd, 1)
    assert lines[:4] == [
        "- param [0-2].down.weight: float32[8/dp, 16], 384 bytes per rank",
        "+ param [0-3].down.weight: float32[8/dp, 16], 512 bytes per rank  (+128 B per rank)",
        "- param [0-2].up.weight: float32[16/dp, 8], 384 bytes per rank",
        "+ param [0-3].up.weight: float32[16/dp, 8], 512 bytes per rank  (+128 B per rank)",
    ]


def test_a_layer_that_is_split_otherwise_is_taken_out_of_the_others(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB.replace("parallelize(model, mesh): f", "parallelize(model, mesh): model[1].double(); f"))
    lines, _ = again(capfd, 1, "--no-step")
    assert [line for line in lines if ".down" in line] == [
        "+ param 1.down.weight: float64[8/dp, 16], 256 bytes per rank  (+256 B per rank)",
        "+ param [0,2].down.weight: float32[8/dp, 16], 256 bytes per rank  (+256 B per rank)",
        "- param [0-2].down.weight: float32[8/dp, 16], 384 bytes per rank  (-384 B per rank)",
    ]


def test_a_module_of_another_name_costs_what_the_old_one_did(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job.write_text(JOB.replace("self.up", "self.gate"))
    lines, _ = again(capfd, 1)
    assert lines == [
        "+ param [0-2].gate.weight: float32[16/dp, 8], 384 bytes per rank  (+384 B per rank)",
        "- param [0-2].up.weight: float32[16/dp, 8], 384 bytes per rank  (-384 B per rank)",
    ]


EXPERTS = """
class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))
    def forward(self, x): return sum(one(x) for one in self.experts)
def build(): return nn.Sequential(*(Experts(COUNT) for _ in range(LAYERS)))
"""


@nightly
def test_identical_experts_of_identical_layers_are_one_line(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job.write_text(JOB + EXPERTS.replace("COUNT", "12"))
    Path("l.lock").unlink()
    again(capfd, 0, "--no-step")
    assert again(capfd, 0, "--no-step") == (["✓ 1 layout as in l.lock"], "")
    line = "param [0-2].experts.[0-11].weight: float32[8/dp, 8], 2304 bytes per rank"
    assert Path("l.lock").read_text().splitlines()[1:] == [line]
    assert layouts_of(Path("l.lock")) == {
        f"{layer}.experts.{expert}.weight": "float32[8/dp, 8]" for layer in range(3) for expert in range(12)
    }
    of_one = "param [0-2].experts.{}.weight: float32[8/dp, 8], 192 bytes per rank"
    Path("l.lock").write_text("\n".join(["# shardviz layouts 1: mesh (dp=4)", *map(of_one.format, range(12))]))
    assert again(capfd, 0, "--no-step") == (
        ["✓ 12 layouts as in l.lock"],
        "",
    )  # a line for each expert, as lockfiles were before
    job.write_text(JOB + EXPERTS.replace("COUNT", "13"))
    assert again(capfd, 1, "--no-step")[0] == [
        f"- {line}",
        "+ param [0-2].experts.[0-12].weight: float32[8/dp, 8], 2496 bytes per rank  (+192 B per rank)",
    ]


SEQUENTIAL = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
    def forward(self, x): return sum(one(x) for one in self.experts)
def build(): return nn.Sequential(*(Experts() for _ in range(LAYERS)))
"""


def test_experts_of_alike_modules_are_one_line_and_the_same_plan_agrees(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB + SEQUENTIAL)
    again(capfd, 0, "--no-step", "--force")
    assert Path("l.lock").read_text().splitlines()[1:] == [
        "param [0-2].experts.[0-1].[0,2].bias: float32[8/dp], 96 bytes per rank",
        "param [0-2].experts.[0-1].[0,2].weight: float32[8/dp, 8], 768 bytes per rank",
    ]
    assert again(capfd, 0, "--no-step") == (["✓ 2 layouts as in l.lock"], "")
    of_one = "param [0-2].experts.{}.[0,2].{}, {} bytes per rank"
    rows = [of_one.format(expert, *what) for what in (("bias: float32[8/dp]", 48), ("weight: float32[8/dp, 8]", 384))
            for expert in (0, 1)]  # fmt: skip
    Path("l.lock").write_text("\n".join(["# shardviz layouts 1: mesh (dp=4)", *rows]))
    assert again(capfd, 0, "--no-step") == (
        ["✓ 4 layouts as in l.lock"],
        "",
    )  # folded less far, as lockfiles were before


def test_a_plan_without_a_step_says_why_it_has_no_collectives(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines, said = again(capfd, 1, "--no-step")
    assert all(line.startswith("- sent ") for line in lines)
    assert "planned without collectives: --no-step was given" in said
    job.write_text(JOB.replace("torch.zeros(4, 8)", "torch.zeros(4, 9)"))
    assert "planned without collectives: a step run with values raised" in again(capfd, 1)[1]


def test_the_same_plan_is_one_line(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert again(capfd, 0) == (["✓ 2 layouts and 2 collectives as in l.lock"], "")
    text = Path("l.lock").read_text()
    for saved in ("\ufeff" + text, text.replace("\n", "\r\n")):  # as editors on Windows save it
        Path("other.lock").write_text(saved, newline="")
        assert read_lock(Path("other.lock")) == read_lock(Path("l.lock"))


def test_another_mesh_is_what_a_difference_begins_with(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines, said = again(capfd, 1, "--mesh", "2", "--no-step")
    assert lines[:2] == ["- mesh (dp=4)", "+ mesh (dp=2)"]
    assert not any(line.startswith("✓") for line in lines)
    assert "l.lock differs; give --force to overwrite it" in said


def test_a_lockfile_that_cannot_be_written_names_its_own_option(
    job: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    capfd.readouterr()
    assert main(["plan", "job.py", "--lock", "new.lock", "--no-step"]) == 2
    said = capfd.readouterr().err
    assert "cannot write new.lock: Read-only file system\nHint: choose another file with --lock\n" in said


ON_FOUR = {"up.weight": "float32[8/tp, 4]", "up.bias": "float32[8/tp]"}


@pytest.mark.parametrize("mesh", ["tp=4", "tp=2"])
def test_a_lockfile_of_another_size_of_the_same_axes_is_kept(mesh: str, tmp_path: Path) -> None:
    assert_layout(dump_on(mesh, ON_FOUR, tmp_path), lock_of_four(tmp_path))


@pytest.mark.parametrize("mesh", ["tp=4", "tp=2"])
def test_a_layout_that_is_not_that_of_a_lockfile_names_both_meshes_where_they_differ(mesh: str, tmp_path: Path) -> None:
    dump = dump_on(mesh, ON_FOUR | {"up.bias": "float32[8]"}, tmp_path)
    with pytest.raises(ShardAssertionError) as raised:
        assert_layout(dump, lock_of_four(tmp_path))
    assert "not the intended float32[8/tp]" in str(raised.value)
    named = f"{tmp_path / 'l.lock'} was written for mesh (tp=4), and this is mesh (tp=2)"
    assert (named in str(raised.value)) == (mesh == "tp=2")


def test_axes_of_other_names_than_a_lockfiles_are_refused_with_its_mesh(tmp_path: Path) -> None:
    dump = dump_on("dp=4", {name: layout.replace("tp", "dp") for name, layout in ON_FOUR.items()}, tmp_path)
    with pytest.raises(MeshError) as raised:
        assert_layout(dump, lock_of_four(tmp_path))
    assert "l.lock was written for mesh (tp=4): rule 'up.weight': " in raised.value.message
    assert raised.value.message.endswith("does not fit up.weight: mesh (dp=4) has no axis 'tp'")
    assert "name the axes as the lockfile does" in raised.value.hint


def lock_of_four(folder: Path) -> Path:
    """Write the lockfile of a layer on four ranks."""
    file = folder / "l.lock"
    lines = [f"param {name}: {layout}, 32 bytes per rank" for name, layout in ON_FOUR.items()]
    file.write_text("\n".join(["# shardviz layouts 1: mesh (tp=4)", *lines]))
    return file


def dump_on(mesh: str, layouts: dict[str, str], folder: Path) -> Path:
    """Write a dump of tensors with these layouts."""
    return make_dump(folder / "made.shardviz", parse_mesh(mesh), layouts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# shardviz layouts 2: mesh (dp=4)\n", "is a lockfile of version 2, and this shardviz reads version 1"),
        ("# shardviz layouts 1: mesh (dp=4)\n<<<<<<< HEAD\n", "line 2 of l.lock is damaged: '<<<<<<< HEAD'"),
        (
            "# shardviz layouts 1: mesh (dp=4)\n"
            "param a: float32[8], 32 bytes per rank\nparam a: float32[8/dp], 8 bytes per rank\n",
            "l.lock has two lines for param a",
        ),
    ],
)
def test_another_version_and_a_failed_merge_are_refused(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("l.lock").write_text(text)
    with pytest.raises(ShardvizError) as raised:
        read_lock(Path("l.lock"))
    assert expected in raised.value.message
    assert raised.value.hint


GATHERED_WITHIN = """
def parallelize(model, mesh):
    for at, block in enumerate(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=AFTER[at])
    fully_shard(model, mesh=mesh)
MESH = (8,)
def batch(): return torch.zeros(8, 8)
"""


@nightly
def test_groups_of_each_size_within_an_axis_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for after in ("AFTER = 4, 2, 2", "AFTER = 4, 2, 4"):
        Path("job.py").write_text(JOB + GATHERED_WITHIN + after)
        status = main(["plan", "job.py", "--lock", "l.lock"])
    # Of a block's 2 * 8 * 16 numbers of 4 bytes a rank receives 3 of 4 parts, or 1 of 2; nothing else has changed.
    assert status == 1
    assert capfd.readouterr().out.splitlines() == [
        "- sent all_gather within dp, backward: 4 and 2 ranks, 1792 bytes",
        "+ sent all_gather within dp, backward: 4 and 2 ranks, 2048 bytes  (+256 B received)",
    ]
    assert read_lock(Path("l.lock"))[1]["sent all_gather within dp, backward"].bytes == 1792
