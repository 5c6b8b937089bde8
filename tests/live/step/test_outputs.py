"""Every tensor that a model returns is compared with the unsharded model's, or not checked by name."""

from types import SimpleNamespace

import pytest
import torch

from shardviz.live.step.return_values import MAX_TENSORS, Returned, named_calls
from tests.lanes import at_night, recorded
from tests.live.probing import checked

MODEL = """
TORCH = (2, 13)  # FSDP2 of 2.6 finds no tensor in a dataclass, and reduces no gradient
from dataclasses import dataclass
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
FAULT = ""
class Cache:
    def __init__(self, keys): self.layers, self.is_full = [{"keys": keys}], True
@dataclass
class Out:
    y: object
    more: object
    cache: object
    none: object = None
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.fault = nn.Linear(6, 8), nn.Linear(8, 6), ""
    def off(self, place): return int(self.fault == place)
    def forward(self, x):
        h = self.up(x)
        y = self.down(h.relu())
        more = [
            y + self.off("rows"),
            h + self.off("features"),
            {"deep": ((y.argmax(-1) + self.off("integers"), None),)},
            (y > 0) ^ bool(self.off("booleans")),
            torch.complex(y, y + self.off("complex")),
            y.square().mean() + self.off("mean"),
            (y > 0).sum(0) + self.off("counts"),
            y.abs().max() + self.off("largest"),
            y.std() + self.off("of rows"),
            len(x) + self.off("number"),
            "text",
            torch.full((4, 4), float("-inf")).triu(1) + self.off("constant"),
            torch.ones(3 if self.off("shape") else 2),
            None if self.off("none") else y * 2,
            *([y] if self.off("extra") else []),
        ]
        return Out(y, more, Cache(h * 2 + self.off("object")))
def build(): return M()
def parallelize(model, mesh):
    model.fault = FAULT
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
def loss(model, batch): return model(batch).y.square().mean()
"""


def faulty(place: str) -> str:
    return MODEL.replace('FAULT = ""', f"FAULT = {place!r}")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("rows", "output.more[0]"),
        *at_night([("integers", "output.more[2].deep[0][0]")], recorded),
        *at_night([("booleans", "output.more[3]"), ("complex", "output.more[4]")]),
    ],
)
def test_a_fault_that_only_one_returned_tensor_has_is_a_finding(place, name, tmp_path):
    report = checked(faulty(place), "dp=2,tp=2", tmp_path)
    assert [(finding.kind, finding.tensor) for finding in report.findings] == [("wrong-value", name)]
    assert report.not_checked == ()


@pytest.mark.parametrize(
    ("place", "why"),
    [
        *at_night(
            [("features", "output.more[1]: no placements give a rank [6, 4] of the unsharded model's [12, 8]")],
            recorded,
        ),
        *at_night([("none", "output.more[13]: the sharded model returns no tensor there on any rank")], recorded),
        *at_night([("extra", "output.more[14]: the unsharded model returns nothing there")], recorded),
        *at_night(
            [
                ("mean", "output.more[5]: the ranks' values are not the unsharded model's"),
                ("object", "output.cache.layers[0].keys: no placements give a rank [6, 4]"),
                ("counts", "output.more[6]: the ranks' values are not the unsharded model's"),
                ("largest", "output.more[7]: the ranks' values are not the unsharded model's"),
                ("of rows", "output.more[8]: the ranks' values are not the unsharded model's"),
                ("number", "output.more[9]: the ranks' values are not the unsharded model's"),
                ("constant", "output.more[11]: the ranks' values are not the unsharded model's"),
                ("shape", "output.more[12]: no placements give a rank [3] of the unsharded model's [2]"),
            ]
        ),
    ],
)
def test_a_returned_tensor_that_no_layout_fits_is_not_checked_by_name(place, why, tmp_path):
    report = checked(faulty(place), "dp=2,tp=2", tmp_path)
    assert report.findings == ()
    (reason,) = [unchecked.why for unchecked in report.not_checked]
    assert reason.startswith(why)


IN_TURN = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.off = nn.Linear(6, 6), 0.0
    def forward(self, x):
        y = self.a(x)
        return (y, y + self.off, y.mean() + 0 * self.off)
def build(): return M()
def parallelize(model, mesh):
    model.off = FAULT
    fully_shard(model, mesh=mesh["dp"])
def loss(model, batch): return model(batch)[0].square().mean()
def step(model, batch, mesh):
    losses = [loss(model, part) / 2 for part in batch.chunk(2)]
    for one in losses: one.backward()
    return sum(losses).detach()
"""


@pytest.mark.parametrize(("fault", "tensors"), [*at_night([(0.0, [])], recorded), (0.5, ["output[1]"])])
def test_micro_batches_of_a_tuple_are_put_together(fault, tensors, tmp_path):
    report = checked(f"FAULT = {fault}\n{IN_TURN}", "dp=2", tmp_path)
    assert ([finding.tensor for finding in report.findings], report.not_checked) == (tensors, ())


TWICE = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.off = nn.Linear(6, 6), 0.0
    def forward(self, x, off=0.0): return self.a(x) + self.off * off
def build(): return M()
def parallelize(model, mesh):
    model.off = FAULT
    fully_shard(model, mesh=mesh["dp"])
def loss(model, batch):
    model(batch * 2, 1.0)
    return model(batch).square().mean()
"""


@pytest.mark.parametrize(("fault", "reasons"), [*at_night([(0.0, 0)], recorded), (0.5, 1)])
@pytest.mark.parametrize("axes", [("dp",), *at_night([((),)])])
def test_a_number_of_each_micro_batch_counts_in_all_of_them(axes, fault, reasons, tmp_path):
    text = f"FAULT = {fault}\n{IN_TURN}\nBATCH_AXES = {axes}\n"
    text = text.replace("(y, y + self.off, y.mean() + 0 * self.off)", "(y, y.mean() + self.off * self.count())")
    text = text.replace(
        "    def forward",
        "    def count(self): self.calls = getattr(self, 'calls', -1) + 1; return self.calls\n    def forward",
    )
    report = checked(text, "dp=2", tmp_path)
    assert (report.findings, len(report.not_checked)) == ((), reasons)


@recorded
@pytest.mark.parametrize(("fault", "tensors"), [(0.0, []), (0.5, ["output of call 1"])])
def test_the_output_of_every_call_is_compared(fault, tensors, tmp_path):
    report = checked(f"FAULT = {fault}\n{TWICE}", "dp=2", tmp_path)
    assert ([finding.tensor for finding in report.findings], report.not_checked) == (tensors, ())


def test_a_step_that_never_calls_the_model_has_no_output_to_compare(tmp_path):
    text = """
def parallelize(model, mesh): pass
BATCH_AXES = ()
def loss(model, batch): return model(batch).square().mean()
def step(model, batch, mesh):
    loss = model[2](model[1](model[0](batch))).square().mean()
    loss.backward()
    return loss
"""
    report = checked(text, "dp=2", tmp_path)
    assert [unchecked.why for unchecked in report.not_checked] == [
        "the output: the sharded step never calls the model as a whole, and the unsharded step does"
    ]


LOSS = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.factor = nn.Linear(6, 6), 1.0
    def forward(self, x): return {returned}
def build(): return M()
def parallelize(model, mesh):
    model.factor = 2.0
    fully_shard(model, mesh=mesh["dp"])
def loss(model, batch):
    found = model(batch)
    return found if torch.is_tensor(found) else found["loss"]
"""


@recorded
@pytest.mark.parametrize(
    ("axes", "returned"),
    [((), "{}"), (("dp",), "{'loss': {}}"), *at_night([(("dp",), "{}"), ((), "{'loss': {}}")])],
)
def test_a_loss_that_the_model_returns_is_compared_once_as_the_loss(axes, returned, tmp_path):
    number = "self.a(x).square().mean() * self.factor"
    text = LOSS.replace("{returned}", returned.replace("{}", number))
    report = checked(f"{text}\nBATCH_AXES = {axes}\n", "dp=2", tmp_path)
    assert [(finding.kind, finding.tensor) for finding in report.findings] == [("wrong-scale", "loss")]
    assert not any("output" in unchecked.why for unchecked in report.not_checked)


DRAWN = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
    def forward(self, x):
        y = self.a(x)
        return y, y + torch.rand_like(y) if self.training else y
def build(): return M()
def parallelize(model, mesh):
    seed = 1 + mesh.get_local_rank("tp")
    if FAULT: model.register_forward_pre_hook(lambda *_: torch.manual_seed(seed) and None)
BATCH_AXES = ()
def loss(model, batch): return model(batch)[0].square().mean()
"""


@pytest.mark.parametrize(("fault", "tensors"), [*at_night([(False, [])], recorded), (True, ["output[1]"])])
def test_copies_of_a_tuple_agree_in_training_mode(fault, tensors, tmp_path):
    report = checked(f"FAULT = {fault}\n{DRAWN}", "tp=2", tmp_path)
    assert [finding.tensor for finding in report.findings] == tensors


def test_containers_are_followed_by_path_and_not_without_end():
    loop: list[object] = [torch.ones(2)]
    loop.append(loop)
    assert list(Returned.of({"a": (1, None), "b": loop}).tensors) == [".a[0]", ".b[0]"]
    many = Returned.of([torch.ones(1)] * (MAX_TENSORS + 3))
    assert (len(many.tensors), many.num_left_out) == (MAX_TENSORS, 3)
    assert Returned.of([object(), (one for one in ())]).unread == {"[0]": "object", "[1]": "generator"}


def test_only_an_array_of_the_last_run_is_left_to_the_output():
    calls = [Returned.of(torch.ones(2)), Returned.of(torch.zeros(2))]
    assert list(named_calls(calls, 2)) == ["output of call 1"]
    assert list(named_calls([Returned.of(torch.ones(()))], 1)) == ["output"]


def test_objects_that_refer_to_each_other_are_looked_through_once():
    nodes = [SimpleNamespace(weight=torch.ones(2)) for _ in range(200)]
    for node in nodes:
        node.others = nodes
    found = Returned.of(nodes)
    assert list(found.tensors)[:2] == ["[0].weight", "[1].weight"]
    assert (len(found.tensors), found.num_left_out) == (MAX_TENSORS, 200 - MAX_TENSORS)


def test_a_number_that_no_float_holds_is_not_compared():
    found = Returned.of((10**400, float("inf"), 3))
    assert (list(found.tensors), found.unread) == (["[1]", "[2]"], {"[0]": "int"})


def test_a_container_that_raises_does_not_raise_in_the_step():
    class Broken(dict):
        def items(self):
            raise RuntimeError("not now")

    assert Returned.safely(Broken(a=1)).unread == {"": "Broken"}


EXITS = """
import torch.distributed as dist
import torch.nn.functional as F
AXES = STAGE_AXES = ("pp",)
BATCH_AXES = ()
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(6, 6), "1": nn.Linear(6, 6)})
        self.last = 1
    def forward(self, x):
        exits = []
        for at, layer in self.layers.items():
            x = layer(x).tanh()
            exits.append(x * 2 + (int(at) == self.last - 1))
        return x, exits
def build(): return M()
def parallelize(model, mesh):
    mine = str(mesh.get_local_rank("pp"))
    model.layers = nn.ModuleDict({mine: model.layers[mine]})
    model.last = LAST
def stages(model, mesh): return {mesh.get_local_rank("pp"): model}
def batch(): return torch.randn(4, 6)
def loss(model, batch): return model(batch)[1][-1].square().mean()
def step(model, batch, mesh):
    stage, value = mesh.get_local_rank("pp"), batch.new_zeros(())
    if stage == 0:
        x, _ = model(batch)
        dist.send(x.detach(), dst=1)
        gradient = torch.empty_like(x)
        dist.recv(gradient, src=1)
        x.backward(gradient)
    else:
        x = batch.new_empty(4, 6)
        dist.recv(x, src=0)
        value = model(x.requires_grad_())[1][0].square().mean()
        value.backward()
        dist.send(x.grad, dst=0)
        value = value.detach()
    dist.all_reduce(value)
    return value
"""


@pytest.mark.parametrize(("last", "is_right"), [(1, True), *at_night([(2, False)])])
def test_a_stage_may_return_a_part_of_the_list_that_the_whole_model_returns(last, is_right, tmp_path):
    report = checked(EXITS.replace("LAST", str(last)), "pp=2", tmp_path)
    assert not report.findings if is_right else report.findings
    why = "output[1][0]: the last stage returns no tensor there, and what other stages return is not compared"
    assert not is_right or why in [note.why for note in report.not_checked]
