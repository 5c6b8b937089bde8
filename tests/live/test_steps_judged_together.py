"""Bugs of a step that only several of its results together prove, on real ranks, each beside its right twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.run import report_on
from tests.lanes import nightly, recorded
from tests.live.probing import run_probe

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.check.report import Report

TIED_STAGES = """
import torch
from torch import distributed, nn
AXES = STAGE_AXES = ("pp",)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x):
        x = self.embed(x) if hasattr(self, "embed") else x
        return self.head(x) if hasattr(self, "head") else x
def build(): return Model()
def parallelize(model, mesh):
    if mesh.get_local_rank(): del model.embed
    else: del model.head
def stages(model, mesh): return {mesh.get_local_rank(): model}
def batch(): return torch.randint(10, (12,))
def step(model, tokens, mesh):
    (weight,), loss = model.parameters(), torch.zeros((), dtype=torch.float64)
    between = torch.empty(12, 4, dtype=weight.dtype)
    if mesh.get_local_rank() == 0:
        output = model(tokens)
        distributed.send(output.detach(), dst=1)
        distributed.recv(between, src=1)
        output.backward(between)
    else:
        distributed.recv(between, src=0)
        loss = model(between.requires_grad_()).square().mean()
        loss.backward()
        distributed.send(between.grad, dst=0)
    if RIGHT: distributed.all_reduce(weight.grad)
    loss = loss.detach().clone()
    distributed.broadcast(loss, src=1)
    return loss
"""

SWAPPED_STAGES = """
from shardviz.probes._pipeline import keep, layers_of
from shardviz.probes.pp_naive import STAGE_AXES, batch, build, stages, step
AXES = ("pp",)
def parallelize(model, mesh):
    rank = mesh.get_local_rank()
    keep(model, layers_of(rank if RIGHT else (0, 2, 1)[rank], 3))
"""

CHUNKS_AS_THEY_CAME = """
import torch
from torch import distributed, nn
AXES = ("tp",)
class Whole(nn.Module):
    def forward(self, x): return x
class Gathered(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
    def forward(self, x):
        mine = x.chunk(self.ranks)[self.rank].contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        distributed.all_gather(parts, mine)
        return torch.cat(parts if RIGHT else parts[self.rank:] + parts[:self.rank])
def build(): return nn.Sequential(Whole(), nn.Linear(6, 6))
def parallelize(model, mesh): model[0] = Gathered(mesh)
def batch(): return torch.randn(12, 6)
"""


def checked(text: str, mesh: str, folder: Path, *, right: bool) -> Report:
    probe = folder / "mine.py"
    probe.write_text(text.replace("RIGHT", str(right)))
    return report_on(run_probe(str(probe), mesh, folder / "dump"))


def test_a_tied_weight_whose_gradient_no_stage_sums_is_named(tmp_path: Path) -> None:
    report = checked(TIED_STAGES, "pp=2", tmp_path, right=False)
    assert {found.kind for found in report.findings} == {"unreduced-gradient"}
    assert all("the sum of their gradients is the unsharded model's" in found.summary for found in report.findings)


@nightly
def test_stages_with_their_own_layers_have_no_findings(tmp_path: Path) -> None:
    assert checked(SWAPPED_STAGES, "pp=3", tmp_path, right=True).findings == ()


def test_stages_with_each_others_layers_are_looked_for_in_the_first_layer_that_got_another_input(
    tmp_path: Path,
) -> None:
    (found,) = checked(SWAPPED_STAGES, "pp=3", tmp_path, right=False).findings
    assert found.kind == "misordered"
    assert found.fix.startswith("give the 3 stages consecutive layers")


def test_one_number_that_a_loop_logs_needs_no_name(tmp_path: Path) -> None:
    counted = CHUNKS_AS_THEY_CAME + "def log(model, rows, loss): return loss * getattr(model[0], 'ranks', 1)"
    (found,) = checked(counted, "tp=2", tmp_path, right=True).findings
    assert (found.kind, found.tensor) == ("wrong-scale", "log")


SUMMED_BY_HAND = """
import torch
from torch import nn
from torch.distributed import _functional_collectives as funcol
AXES = ("tp",)
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, terms, group): return funcol.all_reduce(terms, "sum", group)
    @staticmethod
    def backward(ctx, gradient): return gradient, None
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return rows
    @staticmethod
    def backward(ctx, gradient): return funcol.all_reduce(gradient, "sum", ctx.group), None
class Mlp(nn.Module):
    group = None
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
    def forward(self, rows):
        if self.group is None: return self.down(self.up(rows).relu())
        terms = self.down(self.up(Copy.apply(rows, self.group)).relu())
        return Sum.apply(terms, self.group) if RIGHT else terms
def build(): return nn.Sequential(Mlp(), nn.LayerNorm(6), nn.Linear(6, 4))
def parallelize(model, mesh):
    mlp, rank = model[0], mesh.get_local_rank("tp")
    mlp.up.weight = nn.Parameter(mlp.up.weight.chunk(2)[rank])
    mlp.down.weight = nn.Parameter(mlp.down.weight.chunk(2, 1)[rank])
    mlp.group = mesh.get_group("tp")
def batch(): return torch.randn(4, 6)
"""


def test_terms_of_a_sum_that_nothing_adds_up_are_reported_by_the_module_that_puts_them_out(tmp_path: Path) -> None:
    (found,) = checked(SUMMED_BY_HAND, "tp=2", tmp_path, right=False).findings
    assert (found.kind, found.tensor) == ("unreduced-output", "output")
    assert found.fix.startswith("all_reduce the output of module 0 over tp before module 1 reads it")


@recorded
def test_terms_of_a_sum_that_are_added_up_between_modules_are_right(tmp_path: Path) -> None:
    report = checked(SUMMED_BY_HAND, "tp=2", tmp_path, right=True)
    assert (report.findings, report.not_checked) == ((), ())
