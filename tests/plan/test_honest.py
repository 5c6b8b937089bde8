"""What a plan could not do, or does otherwise than a job, is in what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz.check.run import report_on
from shardviz.check.verdicts import verdict_on
from shardviz.cli import main
from shardviz.dump.dump import dump_of
from shardviz.dump.plan import PlannedRanks
from shardviz.dump.read import read_files
from shardviz.dump.records.files import PlanPart, PlanRecord, RankRecord
from shardviz.dump.records.step import CollectiveRecord
from shardviz.layout.mesh import Mesh
from shardviz.plan.counting import nodes_of, sent_collectives
from tests.lanes import at_night, nightly, since_torch

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
AXES = BATCH_AXES = ("fsdp",)
MESH = (4,)
def build(): return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
def batch(): return torch.zeros(4, 64)
"""

BOTH = """
class Both:
    def __init__(self, *own): self.own = own
    def step(self): [one.step() for one in self.own]
def optimizer(model, mesh):
    return Both(torch.optim.SGD(model[0].parameters(), momentum=0.9), torch.optim.SGD(model[1].parameters()))
"""

NARROW = """
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.distributed.tensor import DTensor
class Narrow(torch.Tensor):  # numbers of 8 bits, and a scale for each row
    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
    def __init__(self, codes, scales): self.codes, self.scales = codes, scales
    def __tensor_flatten__(self): return ["codes", "scales"], []
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        same = cls(args[0].codes, args[0].scales)  # of detach and of views
        return return_and_correct_aliasing(func, args, kwargs or {}, same)
def narrow(weight):
    own = weight.to_local()
    inner = Narrow(torch.zeros(own.shape, dtype=torch.uint8), torch.ones(len(own), 1))
    return DTensor.from_local(inner, weight.device_mesh, weight.placements, run_check=False)
"""

CASES = {
    "state in 8 bits": (
        NARROW
        + """
class Adam8(torch.optim.Optimizer):
    def __init__(self, params): super().__init__(params, {})
    def step(self):
        for one in self.param_groups[0]["params"]: self.state[one].update(first=narrow(one), second=narrow(one))
def optimizer(model, mesh): return Adam8(model.parameters())
""",
        ["state of Adam8 4.25 KiB 17 KiB"],  # a byte for each of 2 * 2 * 64 * 64 numbers, and 4 for each of 4 * 64 rows
    ),
    "weights in 8 bits": (
        NARROW
        + """
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)
    model[0].weight = nn.Parameter(narrow(model[0].weight), requires_grad=False)
def batch(): pass
del batch
""",
        # 16 rows of 64 bytes and a scale of 4 bytes for each of them, and 16 rows of 64 numbers of 4 bytes
        ["parameters 5.06 KiB 20.2 KiB gradients 4 KiB 16 KiB state of Adam 8 KiB 32 KiB"],
    ),
    "two optimizers": (BOTH, ["state of SGD 4 KiB 16 KiB"]),
    "no optimizer": (
        "def optimizer(model, mesh): return object.__new__(type('Own', (), {'step': None}))",
        [
            "state is counted as Adam's, and may not be that: optimizer() returned Own, which has no state",
            "state of Adam 16 KiB 64 KiB",
        ],
    ),
    "an optimizer that raises": (
        "def optimizer(model, mesh): raise ValueError('no weights')",
        ["the optimizer's state is counted as Adam's, and may not be that: optimizer() or its step", "no weights"],
    ),
    "an optimizer that reads what it has worked out": (
        "def parallelize(model, mesh): pass\n"
        "def optimizer(model, mesh): return torch.optim.Adafactor(model.parameters())",
        [  # for each of two weights 64 rows and 64 columns of 4 bytes
            "the optimizer reads a value, taken as 1: what it keeps is taken not to depend",
            "state of Adafactor 1 KiB 4 KiB",
        ],
    ),
    "an optimizer that counts its steps and divides by what it has counted": (
        "def parallelize(model, mesh): pass\ndef optimizer(model, mesh): return torch.optim.NAdam(model.parameters())",
        ["2 ranks of 4 asked bytes per rank", "state of NAdam 64 KiB"],  # nothing is noted between the two
    ),
    "an optimizer that raises before it has made all of its state": (
        """
class Half(torch.optim.SGD):
    def step(self):
        self.state[self.param_groups[0]["params"][0]]["kept"] = torch.zeros(3)
        raise ValueError("half")
def optimizer(model, mesh): return Half(model.parameters())
""",
        ["and may not be that: optimizer() or its step raised ValueError: half", "state of Adam 16 KiB"],
    ),
    "compiled": (
        "def parallelize(model, mesh): model[0].compile(backend='eager'); fully_shard(model, mesh=mesh)",
        ["the step is planned without torch.compile"],
    ),
    "compiled by inductor": (
        "def parallelize(model, mesh): model[0].compile(); fully_shard(model, mesh=mesh)",
        ["the step is planned without torch.compile"],
    ),
    "offloaded": (
        "def parallelize(model, mesh): fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())",
        ["all units have parameters, gradients and optimizer state in the CPU's memory", "reduce_scatter along fsdp"],
    ),
}


AT_NIGHT = ("compiled by inductor", "weights in 8 bits", "an optimizer that raises before it has made all of its state")
"""Importing inductor takes seconds in each fork, and another backend is left out in the same way; others have twins."""


@pytest.mark.parametrize("case", [*(case for case in CASES if case not in AT_NIGHT), *at_night(AT_NIGHT)])
def test_what_is_not_as_it_seems_is_said(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    added, expected = CASES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + added)
    assert main(["plan", "mine.py", "--node", "3"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "4 ranks on 2 nodes of 3, the last with 1" in text
    assert [one for one in expected if one not in text] == []


def test_of_what_is_sent_the_rank_that_sends_most_counts() -> None:
    sends = [CollectiveRecord("send", ("pp",), 3, bytes=size) for size in (8, 16, 4)]
    parts = [PlanPart(RankRecord(1, rank, 3, "", collectives=(one,))) for rank, one in enumerate(sends)]
    (found,) = sent_collectives(PlannedRanks(PlanRecord(1, tuple(parts)), Mesh(("pp",), (3,))))
    assert (found.bytes, found.received) == (16, 0)


def test_a_group_crosses_nodes_where_any_of_its_kind_does() -> None:
    mesh = Mesh(("dp", "tp"), (3, 4))
    assert nodes_of(mesh, ("tp",), 6) == 2  # ranks 0 to 3 are on one node, ranks 4 to 7 on two
    assert nodes_of(mesh, ("tp",), 4) == 1
    assert nodes_of(mesh, ("dp",), 4) == 3
    assert nodes_of(mesh, ("dp", "tp"), 6) == 2
    assert nodes_of(mesh, ("tp",), 0) == 0


def test_no_tensor_of_a_plan_is_called_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD)
    assert main(["plan", "mine.py", "-o", "mine.shardviz"]) == 0
    dump = dump_of(read_files(tmp_path / "mine.shardviz"))
    report = report_on(dump)
    assert {verdict_on(dump, tensor, tensor.names, report) for tensor in dump.tensors} == {"unknown"}


UNEVEN = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
AXES = ("fsdp", "tp")
MESH = (1, 3)
def build(): return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
"""


@since_torch(2, 7)  # FSDP2 of 2.6 splits no uneven parts of tensor parallelism
def test_what_differs_from_one_kind_of_rank_to_another_is_uneven_and_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + UNEVEN)
    assert main(["plan", "mine.py"]) == 0
    text = capfd.readouterr().out
    assert "the code tells ranks apart along tp" in text  # each of them has parts of one size
    assert "0.weight [32/tp/fsdp, 64]: 640 to 704 elements" in text
    assert text.count("1.bias [64/fsdp]: split over tp(3) it would save") == 1


LAYERS = """
MESH = (3,)
def build(): return nn.Sequential(*(nn.Sequential(nn.Linear(64, 3), nn.Linear(64, 64)) for _ in range(4)))
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
"""


@nightly
def test_each_layer_counts_as_uneven_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + LAYERS)
    assert main(["plan", "mine.py"]) == 0
    text = capfd.readouterr().out
    assert "8 parameters in uneven parts" in text  # the second layer's weight and bias, four times
    assert "[0-3].1.weight [64/fsdp, 64]: 1,280 to 1,408 elements" in text


EXPERTS = """
MESH = (3,)
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
    def forward(self, x): return sum(one(x) for one in self.experts)
def build(): return nn.Sequential(Experts(), Experts())
def batch(): return torch.zeros(3, 64)
"""


def test_experts_that_are_alike_are_one_line_of_each_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + EXPERTS)
    assert main(["plan", "mine.py"]) == 0
    text = capfd.readouterr().out
    assert "16 parameters in uneven parts\n  [0-1].experts.[0-7].weight [64/fsdp, 64]: 1,280 to 1,408" in text
    # 128 numbers more of 16 weights, their gradients and two states of Adam, of 4 bytes each
    assert "  32 KiB of *.experts.[0-7].weight" in text
    assert "experts.0" not in text


FLAT = """
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
MESH = (2,)
def build(): return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
def parallelize(model, mesh):
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"), auto_wrap_policy=policy)
def batch(): return torch.zeros(2, 256)
"""


def test_what_fsdp1_has_not_reduced_is_no_activation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + FLAT)
    assert main(["plan", "mine.py"]) == 0
    text = capfd.readouterr().out
    rows = {line.split()[0]: line.split()[1:3] for line in text.split("\n\n")[1].splitlines()}
    # a weight is 256 KiB: two are gathered, the gradient of one is there, and that of the one before is being reduced
    assert rows["gathered"] == ["1", "MiB"]
    assert rows["activations"][1] == "KiB"
    assert float(rows["activations"][0]) < 16
    assert "in uneven parts" not in text  # the flat parameters are cut into equal parts


PARTLY = """
MESH = (8,)
def parallelize(model, mesh):
    fully_shard(model[0], mesh=mesh, reshard_after_forward=4)
    fully_shard(model, mesh=mesh)
def batch(): return torch.zeros(8, 64)
"""


@pytest.mark.parametrize(("node", "nodes"), [*at_night([(2, 2)]), (4, 1)])
def test_a_group_within_an_axis_is_named_and_its_nodes_are_counted(
    node: int, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + PARTLY)
    assert main(["plan", "mine.py", "--node", str(node)]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    (within,) = [row for row in rows if row[:3] == ["all_gather", "within", "fsdp"]]
    # gathered again over 4 of 8 ranks: 64 * 64 numbers of 4 bytes
    assert within[3:] == ["backward", "1", "16", "KiB", "12", "KiB", "4", str(nodes)]
