"""`shardviz plan` as its users meet it: the report, the dump that other verbs open, the lockfile, bad input."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from shardviz.cli import main
from shardviz.dump.costs import memory_table
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.live.plan.forks import one_line
from shardviz.testing import ShardAssertionError, assert_layout
from shardviz.tui.model.document import Document
from shardviz.tui.model.usage import usage_of
from tests.lanes import nightly

HEAD = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
AXES = ("dp",)
MESH = (4,)
BATCH_AXES = ("dp",)
def build(): return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
def batch(): return torch.randn(8, 8)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(HEAD)
    return path


def printed(capfd: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    """Return what a command prints."""
    assert main(args) == code
    out, err = capfd.readouterr()
    return out if code < 2 else err


def test_a_plan_says_what_ranks_hold_and_what_crosses_nodes(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = printed(capfd, "plan", str(mine), "--mesh", "16", "--node", "8", "--batch", "16,8")
    assert "16 ranks on 2 nodes of 8" in text
    assert "parameters" in text
    assert "all_gather along dp" in text
    assert "groups that cross nodes of 8" in text
    assert "2 parameters in uneven parts" in text  # 8 rows for 16 ranks
    assert "1.bias [8/dp]: 0 to 1 elements, 8 of 16 ranks have none" in text


def test_ranks_that_hold_as_much_are_counted_as_one(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed(capfd, "plan", str(mine), "--mesh", "16", "--batch", "16,8", "-o", "p.shardviz")
    dump = dump_of(read_files("p.shardviz"))
    assert dump.files.equally_full == (tuple(range(8)), tuple(range(8, 16)))  # 8 rows for 16 ranks
    usage = usage_of(Document(Path("p.shardviz"), dump))
    assert [*usage.total.values()] == [4 * 4 * (8 + 1 + 16 + 1)] * 8 + [4 * 4 * (8 + 1)] * 8
    for tensor in dump.tensors:
        sizes = {rank: math.prod(shard.body.local_shape) for rank, shard in tensor.shards.items()}
        assert sizes == {rank: sizes[group[0]] for group in dump.files.equally_full for rank in group}
    assert usage.spread().imbalance == pytest.approx(26 / 17.5)


TIED = """
def build():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model
"""


def test_what_tied_weights_need_is_counted_once(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine.write_text(HEAD + TIED)
    text = printed(capfd, "plan", str(mine), "-o", "p.shardviz")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["parameters"] == rows["gradients"] == ["80", "B", "320", "B"]  # 8 * 8 + 8 + 8 numbers on 4 ranks
    assert rows["state"] == ["of", "Adam", "160", "B", "640", "B"]
    assert memory_table(dump_of(read_files("p.shardviz"))).by_rank[0] == (80, 80, 160)


def test_every_verb_opens_a_plan(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed(capfd, "plan", str(mine), "-o", "p.shardviz")
    assert sorted(path.name for path in Path("p.shardviz").iterdir()) == ["plan.json", "run.json"]
    assert "float32[16/dp, 8]" in printed(capfd, "show", "p.shardviz")
    assert "[12:16, 0:8]" in printed(capfd, "show", "p.shardviz", "0.weight")
    assert "rank 3" in printed(capfd, "show", "p.shardviz", "--memory")
    assert "all_gather" in printed(capfd, "show", "p.shardviz", "--comms")
    assert printed(capfd, "diff", "p.shardviz", "p.shardviz")
    printed(capfd, "show", "p.shardviz", "-o", "p.html")
    page = Path("p.html").read_text()
    assert "<svg" in page
    assert "state of Adam" in page
    assert "collectives of a step" in page
    assert "nothing was checked" in printed(capfd, "check", "p.shardviz", code=2)


@nightly
def test_two_plans_are_compared_by_what_ranks_hold_and_receive_too(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for ranks in ("2", "4"):
        printed(capfd, "plan", str(mine), "--mesh", ranks, "--node", "2", "-o", ranks)
    rows = [re.split("  +", line.strip()) for line in printed(capfd, "diff", "2", "4", code=1).splitlines()]
    assert ["parameters", "560 B", "280 B", "-280 B"] in rows  # of 280 numbers of 4 bytes
    # Gathered and reduced once, of which a rank receives what the others have: three quarters of both on 4 ranks.
    assert ["along dp", "1.09 KiB", "1.64 KiB", "+560 B"] in rows
    assert ["crossing nodes of 2", "0 B", "1.64 KiB", "+1.64 KiB"] in rows
    assert ["along dp", "1.09 KiB", "1.09 KiB", "="] in [
        re.split("  +", line.strip()) for line in printed(capfd, "diff", "2", "2").splitlines()
    ]


def compared(capfd: pytest.CaptureFixture[str], *args: str, code: int = 0) -> tuple[dict[str, list[str]], str]:
    """Return the rows of the bytes of two plans, before, after and the change, and the last line."""
    lines = printed(capfd, "diff", *args, code=code).splitlines()
    rows = [re.split("  +", line.strip()) for line in lines if line]
    return {row[0]: row[1:] for row in rows}, lines[-1]


def test_plans_of_one_layout_whose_bytes_differ_are_different(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, batch in (("few", "8,8"), ("many", "64,8")):
        printed(capfd, "plan", str(mine), "--batch", batch, "-o", name)
    rows, verdict = compared(capfd, "few", "many", code=1)
    assert rows["activations"][2].startswith("+")
    assert rows["parameters"][2] == "="
    changed = [name for name, row in rows.items() if row and row[-1][0] in "+-"]
    assert verdict == f"≠ {len(changed)} sizes changed"
    found = json.loads(printed(capfd, "diff", "few", "many", "--format", "json", code=1))
    assert [size["name"] for size in found["sizes"] if size["before"] != size["after"]] == changed


def test_a_plan_without_a_step_saves_nothing(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed(capfd, "plan", str(mine), "--node", "2", "-o", "step")
    for name in ("none", "neither"):
        printed(capfd, "plan", str(mine), "--node", "2", "--no-step", "-o", name)
    for pair, at in ((("step", "none"), 1), (("none", "step"), 0)):
        rows, verdict = compared(capfd, *pair)
        for name in ("activations", "gathered", "along dp", "crossing nodes of 2"):
            assert rows[name][at] == "not planned", name
            assert rows[name][1 - at][0].isdigit()
            assert rows[name][2:] == [], name
        assert rows["together, no step"][2] == "="
        assert verdict == "? no changes found; 1 comparison not made"
        assert f"the {('first', 'second')[at]} plan has none: --no-step was given" in " ".join(
            printed(capfd, "diff", *pair, "--strict", code=1).split()
        )
    rows, verdict = compared(capfd, "none", "neither", "--strict")
    assert (rows["together"][2], verdict) == ("=", "✓ nothing changed")
    printed(capfd, "plan", str(mine), "--mesh", "2", "--no-step", "-o", "two")
    rows, _ = compared(capfd, "step", "two", code=1)
    assert rows["parameters"] == ["280 B", "560 B", "+280 B"]  # what both tell is compared all the same
    assert rows["crossing nodes of 2"][1:] == ["not planned"]


STAGES = """
import torch
from torch import nn
AXES = ("pp",)
MESH = (2,)
def build(): return nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8))
def parallelize(model, mesh): del model[1 - mesh.get_local_rank()]
def batch(): return torch.randn(4, 64)
def step(model, x, mesh):
    last = mesh.get_local_rank() == 1
    out = model(torch.randn(ROWS, 8) if last else x).sum()
    out.backward()
    return out
"""


def test_plans_that_differ_on_another_rank_than_the_fullest_are_different(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rows in ("4", "12"):
        mine.write_text(STAGES.replace("ROWS", rows))
        printed(capfd, "plan", str(mine), "-o", rows)
    text = printed(capfd, "diff", "4", "12", code=1)
    assert "bytes of rank 1; the fullest ranks are equal" in text
    assert "bytes of the fullest rank" in printed(capfd, "diff", "4", "4")


def test_a_plan_is_compared_with_what_its_author_expects(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine.write_text(HEAD + 'expect = {"*.weight": "[*, */dp]"}\n')
    printed(capfd, "plan", str(mine), "--no-step", "-o", "p.shardviz")
    text = " ".join(printed(capfd, "check", "p.shardviz", code=1).split())
    assert "0.weight ranks 0-3 its planned layout is [16/dp, 8], not the intended [*, */dp]" in text
    mine.write_text(HEAD + 'expect = {"*.weight": "[*/dp, *]"}\n')
    printed(capfd, "plan", str(mine), "--no-step", "-o", "p.shardviz", "--force")
    assert "its layout is the intended one" in printed(capfd, "check", "p.shardviz")


def test_a_lockfile_shows_what_changed_and_what_it_costs(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed(capfd, "plan", str(mine), "--lock", "layouts.lock")
    assert "param 0.weight: float32[16/dp, 8], 128 bytes per rank" in Path("layouts.lock").read_text()
    mine.write_text(HEAD.replace("fully_shard(model, mesh=mesh)", "fully_shard(model[0], mesh=mesh)"))
    text = printed(capfd, "plan", str(mine), "--lock", "layouts.lock", code=1)
    assert "+ param 1.weight: float32[8, 16] plain, 512 bytes per rank  (+384 B per rank)" in text
    assert "0.weight" not in text


BAD_LOCKS = {
    "": "is not a lockfile: it begins with ''",
    "# shardviz layouts 1: mesh (dp=4)\nparam 0.bias: float32[16/dp], 16 bites\n": "line 2 of layouts.lock is damaged",
    "# shardviz layouts 1: mesh (dp=4)\n\n0.bias: float32[16/dp], 16 bytes a rank\n": "line 3 of layouts.lock is dam",
}


@pytest.mark.parametrize("text", BAD_LOCKS)
def test_a_damaged_lockfile_is_said_before_anything_is_planned(
    text: str, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("layouts.lock").write_text(text)
    mine.write_text(HEAD.replace("nn.Linear(8, 16)", "surely_not_built"))
    assert BAD_LOCKS[text] in printed(capfd, "plan", str(mine), "--lock", "layouts.lock", code=2)


def test_a_lockfile_that_cannot_be_written_is_said_before_anything_is_planned(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(HEAD.replace("nn.Linear(8, 16)", "surely_not_built"))
    for path in (".", "gone/layouts.lock"):
        assert "Hint:" in printed(capfd, "plan", str(mine), "--force", f"--lock={path}", code=2)


def test_a_plan_replaces_its_own_default_folder(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed(capfd, "plan", str(mine), "--no-step")
    printed(capfd, "plan", str(mine), "--no-step")
    assert Path("mine-4-plan.shardviz").is_dir()
    printed(capfd, "plan", str(mine), "--no-step", "-o", "mine-4-plan.shardviz", code=2)


@nightly
def test_code_that_reads_values_is_planned_without_a_step(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine.write_text(HEAD + "def loss(model, x): return model(x[: int(x.sum().item())]).sum()\n")
    text = " ".join(printed(capfd, "plan", str(mine)).split())
    assert "the step reads a value, and a plan has none (mine.py" in text
    assert "(mine.py, line 12: def loss(model, x)" in text
    assert "parameters" in text


@nightly
def test_a_batch_of_another_shape_has_the_element_type_of_the_probes_own(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = HEAD.replace("nn.Sequential(nn.Linear(8, 16)", "nn.Sequential(nn.Embedding(8, 16)")
    mine.write_text(words.replace("torch.randn(8, 8)", "torch.zeros(8, 8, dtype=torch.int64)"))
    assert "activations" in printed(capfd, "plan", str(mine), "--batch", "16,8")
    assert "planned without activations" in printed(capfd, "plan", str(mine), "--batch", "16,8:float32", "--force")


@nightly
def test_a_batch_of_too_few_rows_is_reported_and_the_rest_is_planned(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = printed(capfd, "plan", str(mine), "--mesh", "16")
    assert "planned without activations and collectives: the batch has 8 rows for 16 ranks" in text
    assert "parameters" in text


def test_what_raised_an_exception_that_ends_in_a_colon_is_said_too() -> None:
    try:
        try:
            raise ValueError("no gradient\nat all")
        except ValueError as error:
            raise RuntimeError("\n  Failed to run stage backward:\n  Stage output: ...") from error
    except RuntimeError as error:
        said = one_line(error)
    assert said.startswith("RuntimeError: Failed to run stage backward: no gradient (test_command.py")


def test_code_that_raises_is_named_in_one_line(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine.write_text(HEAD.replace("fully_shard(model, mesh=mesh)", "raise KeyError('gone')"))
    text = printed(capfd, "plan", str(mine), code=2)
    assert "parallelize() raised KeyError: 'gone'" in text
    assert "Traceback" not in text


BAD_LINES = {
    "needs values": ("def build(): return needing(nn.Linear(8, 16))", "build() on the meta device raised RuntimeError"),
    "needs CUDA": (
        "def build(): return nn.Linear(8, 16).cuda()",
        "build() with values raised",
    ),
    "is not a module": ("def build(): return 3", "build() returned int"),
    "uses what it communicates": (
        """
def parallelize(model, mesh):
    seen = torch.ones(1)
    torch.distributed.all_reduce(seen)
    assert seen > 2
""",
        "parallelize() calls all_reduce (mine.py, line 19: torch.distributed.all_reduce(seen)): a plan sends nothing",
    ),
    "is larger than its values may be": (
        "def build(): return needing(nn.Linear(16384, 8192))",
        "more than the 256 MiB that a plan may use",
    ),
}
"""Code that cannot be planned as it is, and what the plan says of it."""

NEEDING = """
def needing(model):
    assert float(model.weight.detach().abs().sum()) > 0
    return nn.Sequential(model, nn.Linear(16, 8))
"""


@pytest.mark.parametrize("what", BAD_LINES)
def test_what_cannot_be_planned_as_it_is_names_the_call(
    what: str, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = BAD_LINES[what]
    mine.write_text(HEAD + NEEDING + code)
    status = main(["plan", str(mine)])
    out, err = capfd.readouterr()
    text = " ".join((out + err).split())
    assert said in text
    assert "Traceback" not in text
    assert "Warning" not in text
    assert (status, "parameters" in text, "Hint:" in text) in ((0, True, False), (2, False, True))
    assert status == (0 if what == "needs values" else 2)


@nightly
def test_a_result_of_a_collective_is_not_taken_for_true(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call = "torch.distributed.all_reduce(torch.ones(1)); fully_shard(model, mesh=mesh)"
    mine.write_text(HEAD.replace("fully_shard(model, mesh=mesh)", call))
    text = " ".join(printed(capfd, "plan", str(mine)).split())
    assert "parallelize() calls all_reduce (mine.py, line 10:" in text
    assert "calls all_gather" not in text  # FSDP's own, in a step


@nightly
def test_seconds_are_talk_and_not_data(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(mine), "--no-step", "-o", "p.shardviz"])
    out, err = capfd.readouterr()
    assert "planned in" in err
    assert main(["plan", str(mine), "--no-step", "-o", "p.shardviz", "--force"]) == 0
    assert capfd.readouterr().out == out


@nightly
def test_ranks_that_the_code_tells_apart_are_all_asked(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine.write_text(
        HEAD + "import torch.distributed as dist\ndef parallelize(model, mesh): return model[dist.get_rank() % 2]\n"
    )
    printed(capfd, "plan", str(mine), "--no-step", "-o", "p.shardviz")
    dump = dump_of(read_files("p.shardviz"))
    shapes = {rank: shard.body.local_shape for rank, shard in dump.by_name("initial", "param")["weight"].shards.items()}
    assert shapes == {0: (16, 8), 1: (8, 16), 2: (16, 8), 3: (8, 16)}


@pytest.mark.parametrize("text", ["64x", "a", "-1"])
def test_a_batch_that_is_not_a_shape_is_refused(text: str, mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "is not a shape" in printed(capfd, "plan", str(mine), f"--batch={text}", code=2)


@nightly
def test_an_optimizers_state_counts_in_the_element_type_asked(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = HEAD.replace("nn.Linear(16, 8))", "nn.Linear(16, 8)).bfloat16()")
    mine.write_text(text.replace("torch.randn(8, 8)", "torch.randn(8, 8).bfloat16()"))
    whole = 2 * 128 + 16 + 8
    for options, width in (((), 4), (("--state", "float32"), 8), (("--state", "float32", "--master"), 12)):
        printed(capfd, "plan", str(mine), "-o", "p.shardviz", "--force", *options)
        dump = dump_of(read_files("p.shardviz"))
        shards = [shard.body for one in dump.at("step") if one.role == "optim" for shard in one.shards.values()]
        sizes = {"bfloat16": 2, "float32": 4}
        held = sum(body.local_shape[0] * (body.local_shape[1:] or (1,))[0] * sizes[body.dtype] for body in shards)
        assert held == whole * width


@pytest.mark.parametrize(
    "options",
    [("--memory", "80GB"), ("--gpus", "4", "--memory", "much"), ("--gpus", "4", "--memory", "80"), ("--gpus", "0")],
)
def test_a_choice_that_cannot_be_made_is_refused(
    options: tuple[str, ...], mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "Hint:" in printed(capfd, "plan", str(mine), *options, code=2)


def test_a_lockfile_is_what_assert_layout_compares_with(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed(capfd, "plan", str(mine), "--lock", "layouts.lock")
    printed(capfd, "plan", str(mine), "--no-step", "-o", "same.shardviz")
    assert_layout("same.shardviz", "layouts.lock")
    mine.write_text(HEAD.replace("fully_shard(model, mesh=mesh)", "fully_shard(model[0], mesh=mesh)"))
    printed(capfd, "plan", str(mine), "--no-step", "-o", "other.shardviz")
    with pytest.raises(ShardAssertionError, match=r"1\.weight"):
        assert_layout("other.shardviz", "layouts.lock")
