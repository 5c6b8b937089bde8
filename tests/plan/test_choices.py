"""A router sends tokens where its values say: a plan spreads them evenly, says so, and guesses nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from shardviz import probe_files
from shardviz.cli import main
from shardviz.commands.probe import mesh_for
from shardviz.dump.read import read_files
from shardviz.dump.write import prepare_folder, write_plan, write_run
from shardviz.live.compat.fakes import fake_mode
from shardviz.live.compat.worlds import fake_world
from shardviz.live.job import ProbeJob
from shardviz.live.plan.choices import Choices, received
from shardviz.live.plan.forks import ask
from shardviz.live.plan.memory import Watched
from shardviz.live.plan.planning import PlanJob, plan
from shardviz.live.step.observe import observed
from tests.lanes import at_night, nightly
from tests.plan.agreeing import differences

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUTED = """
import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_to_all_single
AXES = BATCH_AXES = ("ep",)
MESH = (2,)
EXPERTS, FEATURES, CHOSEN = 8, 16, 2

class Experts(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, FEATURES, FEATURES) * 0.1)

    def scores(self, x):
        turn = (torch.arange(len(x)).unsqueeze(1) * CHOSEN - torch.arange(EXPERTS)) % EXPERTS
        return self.gate(x).softmax(-1) * 0.01 + turn.to(x.dtype)

    def forward(self, x):
        _, chosen = self.scores(x).topk(CHOSEN, largest=LARGEST)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)
        tokens, counts = x.repeat_interleave(CHOSEN, 0)[order], torch.bincount(chosen, minlength=EXPERTS)
        ranks = 1 if self.group is None else self.group.size()
        numbers = counts.tolist()
        if ranks > 1:
            arrived = torch.empty_like(counts)
            distributed.all_to_all_single(arrived, counts, group=self.group)
            here, there = (one.view(ranks, -1).sum(1).tolist() for one in (arrived, counts))
            tokens = all_to_all_single(tokens.new_empty(sum(here), FEATURES), tokens, here, there, group=self.group)
            owner = torch.arange(EXPERTS // ranks).repeat(ranks).repeat_interleave(arrived)
            by_expert = owner.argsort(stable=True)
            tokens, numbers = tokens[by_expert], arrived.view(ranks, -1).sum(0).tolist()
        parts = [part @ weight for part, weight in zip(tokens.split(numbers), self.weight)]
        done = torch.cat(parts)
        if ranks > 1:
            back = done[by_expert.argsort()]
            done = all_to_all_single(back.new_empty(len(order), FEATURES), back, there, here, group=self.group)
        return done[order.argsort()].view(-1, CHOSEN, FEATURES).sum(1)

def build(): return Experts()

def parallelize(model, mesh):
    rank, ranks = mesh["ep"].get_local_rank(), mesh["ep"].size()
    model.weight = nn.Parameter(model.weight.detach().chunk(ranks)[rank].clone())
    model.group = mesh["ep"].get_group()

def batch(): return torch.randn(32, FEATURES)
"""


@nightly
@pytest.mark.parametrize("mesh", ["2", *at_night(["4"])])
def test_tokens_that_go_round_evenly_send_what_a_plan_says(mesh: str, tmp_path: Path) -> None:
    file = tmp_path / "routed.py"
    file.write_text(ROUTED.replace("largest=LARGEST", "largest=False"))
    probe = probe_files.find(str(file))
    run, record = plan(PlanJob(probe, mesh_for(probe, mesh), double=True))
    prepare_folder(tmp_path / "plan")
    write_run(tmp_path / "plan", run)
    write_plan(tmp_path / "plan", record)
    ProbeJob(probe, mesh_for(probe, mesh), prepare_folder(tmp_path / "real")).launch()
    real = read_files(tmp_path / "real")
    assert sum(one.op == "all_to_all" for one in real.ranks[0].collectives) == 2  # forward and backward
    assert list(differences(real, read_files(tmp_path / "plan"), with_step=True)) == []


@nightly
def test_a_plan_says_what_it_spread_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "routed.py").write_text(ROUTED.replace("largest=LARGEST", "largest=False"))
    assert main(["plan", "routed.py", "--mesh", "2"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "the step reads what topk() (routed.py, line 22: _, chosen = " in text
    assert "the plan counts every choice equally often" in text
    # 16 rows choose 2 experts each: 32 rows of 16 features of 4 bytes go each way, and 8 counts of 8 bytes
    assert "all_to_all along ep forward 3 4.06 KiB" in text


def outcome(work: Callable[[], object]) -> object:
    """Return what code returns, or the type of what it raises, on the first of two ranks without values."""

    def alone(_: int) -> object:
        none, choices = nn.Identity(), Choices()
        with (
            fake_world(0, 2),
            fake_mode(),
            observed(none, values=False) as seen,
            Watched(none, [none], seen.comms, (), choices),
        ):
            try:
                return work(), bool(choices.read)
            except Exception as error:
                return type(error).__name__

    return ask([0], alone)[0]


def chosen() -> torch.Tensor:
    return torch.randn(6, 4).topk(2).indices


def overwritten() -> object:
    indices = chosen()
    indices.copy_(torch.randn(6, 2))
    return indices.sum().item()


def overwritten_through_a_view() -> object:
    indices = chosen()
    indices[1:].copy_(torch.randn(5, 2))
    return indices.sum().item()


def counted() -> object:
    tokens = torch.zeros(4, dtype=torch.int64)
    return tokens.scatter_add_(0, chosen().flatten(), torch.ones(12, dtype=torch.int64)).tolist()


CASES: list[tuple[Callable[[], object], object]] = [
    (lambda: torch.bincount(chosen().flatten(), minlength=4).tolist(), ([3, 3, 3, 3], True)),
    (counted, ([3, 3, 3, 3], True)),
    (lambda: torch.nn.functional.one_hot(chosen(), 4).sum((0, 1)).tolist(), ([3, 3, 3, 3], True)),
    (lambda: [len(torch.where(chosen() == expert)[0]) for expert in range(4)], ([3, 3, 3, 3], True)),
    (lambda: tuple(torch.randn(6, 3)[(chosen() == 1).any(1)].shape), ((3, 3), True)),
    (lambda: torch.randn(6, 4).argmax(-1).tolist(), ([0, 1, 2, 3, 0, 1], True)),
    (lambda: tuple(torch.histc(chosen().float(), 4, 0, 3).shape), ((4,), False)),
    (lambda: torch.arange(3).sum().item(), (3, False)),
    (lambda: torch.randn(4).sum().item(), "DataDependentOutputException"),
    (lambda: (torch.randn(6, 2) > 0).nonzero(), "DynamicOutputShapeException"),
    (lambda: torch.randn(6, 4).gather(1, chosen()).sum().item(), "DataDependentOutputException"),
    (overwritten, "DataDependentOutputException"),
    (overwritten_through_a_view, "DataDependentOutputException"),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_follows_from_a_choice_alone_is_known_and_nothing_else(case: int) -> None:
    work, expected = CASES[case]
    assert outcome(work) == expected


def test_an_exchange_gives_what_it_would_if_all_ranks_sent_the_same() -> None:
    ours = torch.arange(6)
    c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
    to_all = functional.all_to_all_single.default
    assert received(to_all, ours, (ours, [3, 3], [3, 3]), 2, 1).tolist() == [3, 4, 5, 3, 4, 5]  # type: ignore[union-attr]
    assert received(to_all, ours, (ours, [2, 2], [2, 4]), 2, 0).tolist() == [0, 1, 0, 1]  # type: ignore[union-attr]
    gathered = received(functional.all_gather_into_tensor.default, ours[:2], (ours[:2], 3), 3, 1)
    assert gathered is not None
    assert gathered.tolist() == [0, 1, 0, 1, 0, 1]
    summed = received(functional.all_reduce.default, ours, (ours, "sum"), 2, 0)
    assert summed is not None
    assert summed.tolist() == [0, 2, 4, 6, 8, 10]
    assert received(c10d.allreduce_.default, ours, ([ours],), 2, 0) is None


GROUPED = """
import torch
from torch import nn
AXES = BATCH_AXES = ("dp",)
MESH = (2,)

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 1024, 2048))

    def forward(self, x):
        ends = torch.histc(x[:, :64].topk(1).indices.float(), 64, 0, 63).cumsum(0).int()
        return torch._grouped_mm(x, self.weight, offs=ends)

def build(): return Experts()
def parallelize(model, mesh): pass
def batch(): return torch.zeros(128, 1024)
"""


@nightly
def test_a_grouped_product_in_float32_is_planned_without_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grouped.py").write_text(GROUPED)
    assert main(["plan", "grouped.py"]) == 0
    said = capfd.readouterr()
    assert "activations" in said.out
    assert "planned as if" not in said.out  # nothing has read where tokens go
    assert "grouped_mm" not in said.err


@nightly
def test_a_step_that_fails_without_values_prints_no_traceback_of_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grouped.py").write_text(GROUPED.replace("offs=ends", "offs=ends, bias=ends"))
    assert main(["plan", "grouped.py"]) == 0
    said = capfd.readouterr()
    said = said._replace(out=" ".join(said.out.split()))
    assert "planned without activations and collectives: a step run without values raised RuntimeError" in said.out
    assert "Traceback" not in said.err
