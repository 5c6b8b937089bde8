"""What a trace keeps of modules of all kinds, in one process: no ranks are needed to look at hooks."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardviz.live.step.module_recorder import MAX_ELEMENTS, MAX_TENSORS, Trace
from shardviz.live.trace_modules import ALL, NONE, Followed
from tests.lanes import nightly

ROWS = torch.arange(12.0).reshape(3, 4) / 7


def traced(model, *inputs, followed=ALL, loss=lambda output: output.square().sum()):
    """Step a model followed, and once more as it is: its gradients must be the same."""
    model.zero_grad()
    trace = Trace()
    handles = list(trace.follow(model, followed))
    loss(model(*inputs)).backward()
    for handle in handles:
        handle.remove()
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    loss(model(*inputs)).backward()
    plain = [one.grad for one in model.parameters() if one.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(gradients, plain, strict=True))
    return trace


def has_all(call):
    sides = [*call.inputs, *call.outputs]
    return bool(sides) and all(one.values is not None and one.gradient is not None for one in sides)


class Wrapped(nn.Module):
    """Runs a linear layer in a way of a test's own."""

    def __init__(self, run, **parts):
        super().__init__()
        self.inner, self.run = nn.Linear(4, 4), run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.run(self, x * 1)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_recomputed_modules_have_one_call_with_the_gradient_of_their_output(reentrant):
    rows = ROWS.clone().requires_grad_()
    trace = traced(Wrapped(lambda self, x: checkpoint(self.inner, x, use_reentrant=reentrant)), rows)
    (call,) = trace.calls["inner"]
    assert call.outputs[0].gradient is not None
    assert torch.equal(call.outputs[0].gradient, 2 * call.outputs[0].values)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_recomputed_module_that_is_called_twice_has_two_calls_each_with_its_own_gradients(reentrant):
    def run(self, x):
        once = checkpoint(self.inner, x, use_reentrant=reentrant)
        return checkpoint(self.inner, once, use_reentrant=reentrant)

    rows = ROWS.clone().requires_grad_()
    model = Wrapped(run)
    first, second = traced(model, rows).calls["inner"]
    back = 2 * second.outputs[0].values
    assert torch.equal(second.outputs[0].gradient, back)
    assert torch.allclose(first.outputs[0].gradient, back @ model.inner.weight)


def test_a_module_called_twice_has_two_calls():
    calls = traced(Wrapped(lambda self, x: self.inner(self.inner(x).tanh())), ROWS.clone().requires_grad_())
    first, second = calls.calls["inner"]
    assert has_all(first)
    assert has_all(second)
    assert torch.equal(second.inputs[0].values, first.outputs[0].values.tanh())


def test_one_module_under_two_names_is_followed_by_one():
    model = nn.ModuleDict({"one": nn.Linear(4, 4)})
    model["other"] = model["one"]
    model.forward = lambda x: model["other"](model["one"](x))
    trace = traced(model, ROWS.clone().requires_grad_())
    assert [len(calls) for name, calls in trace.calls.items() if name] == [2]


def test_values_are_those_before_a_later_in_place_operation():
    def run(self, x):
        y = self.inner(x)
        kept = y.detach().clone()
        y += 1
        self.kept = kept
        return y

    model = Wrapped(run)
    (call,) = traced(model, ROWS.clone().requires_grad_()).calls["inner"]
    assert torch.equal(call.outputs[0].values, model.kept)


def test_a_module_that_changes_its_input_in_place_has_it_as_it_was_given():
    model = Wrapped(lambda self, x: self.act(self.inner(x)), act=nn.ReLU(inplace=True))
    trace = traced(model, ROWS.clone().requires_grad_())
    (linear,), (act,) = trace.calls["inner"], trace.calls["act"]
    assert torch.equal(act.inputs[0].values, linear.outputs[0].values)
    assert torch.equal(act.outputs[0].values, linear.outputs[0].values.relu())


@dataclasses.dataclass
class Result:
    """Several results of a module."""

    x: torch.Tensor
    cache: object = None
    more: tuple = ()


SHAPES = {
    "tuple": (lambda y: (y, None, 3), lambda out: out[0]),
    "dict": (lambda y: {"x": y, "cache": None}, lambda out: out["x"]),
    "nested": (lambda y: [{"x": (y,)}, None], lambda out: out[0]["x"][0]),
    "dataclass": (lambda y: Result(y), lambda out: out.x),
    "dataclass in a tuple": (lambda y: (Result(y, more=(y * 2,)), None), lambda out: out[0].x),
}


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        return self.make(self.linear(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_are_found_in_whatever_a_module_returns(shape):
    make, read = SHAPES[shape]
    model = Wrapped(lambda self, x: read(self.part(x)) + self.inner(x), part=Returning(make))
    (call,) = traced(model, ROWS.clone().requires_grad_()).calls["part"]
    assert call.outputs[0].gradient is not None
    assert torch.equal(call.outputs[0].values, model.part.linear(ROWS))


def test_none_integers_and_numbers_are_left_out_and_arguments_by_name_are_not():
    class Taking(nn.Module):
        def forward(self, x, mask=None, scale=1.0, ids=None, other=None):
            return x * scale + other

    def run(self, x):
        return self.part(self.inner(x), None, 2.0, ids=torch.arange(3), other=x)

    (call,) = traced(Wrapped(run, part=Taking()), ROWS.clone().requires_grad_()).calls["part"]
    assert len(call.inputs) == 2
    assert torch.equal(call.inputs[1].values, ROWS)


def test_a_module_that_returns_nothing_is_followed_without_an_output():
    class Silent(nn.Module):
        def forward(self, x):
            self.seen = x.detach()

    def run(self, x):
        self.part(x)
        return self.inner(x)

    (call,) = traced(Wrapped(run, part=Silent()), ROWS.clone().requires_grad_()).calls["part"]
    assert (len(call.inputs), call.outputs) == (1, [])


def test_of_many_tensors_the_first_are_kept():
    part = Returning(lambda y: [y + at for at in range(MAX_TENSORS + 4)])
    (call,) = traced(Wrapped(lambda self, x: sum(self.part(x)), part=part), ROWS).calls["part"]
    assert len(call.outputs) == MAX_TENSORS


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=nightly)])
def test_a_compiled_module_is_one_region_whose_sides_are_followed(backend):
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = Wrapped(lambda self, x: self.inner(self.part(x)), part=torch.compile(inside, backend=backend))
    trace = traced(model, ROWS.clone().requires_grad_())
    assert [name for name in trace.calls if name.startswith("part.")] == []
    (call,) = trace.calls["part"]
    assert has_all(call)
    assert torch.allclose(call.outputs[0].values, inside(ROWS))


def test_only_modules_that_are_asked_for_are_followed_beside_the_model_itself():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    assert set(traced(model, ROWS, followed=Followed("1.*")).calls) == {"", "1.0", "1.1"}
    assert not traced(model, ROWS, followed=NONE).calls
    assert "none of them is called 'layers.*'" in traced(model, ROWS, followed=Followed("layers.*")).left_out
    assert traced(nn.Linear(4, 4), ROWS).left_out == traced(model, ROWS, followed=NONE).left_out == ""


def test_what_is_beyond_the_bound_is_counted_and_said(monkeypatch):
    from shardviz.live.step import module_recorder

    monkeypatch.setattr(module_recorder, "MAX_ELEMENTS", 30)
    trace = traced(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), ROWS)
    assert trace.num_elements <= 30 + 12
    assert trace.num_left_out > 5
    assert "--trace 'modules=PATTERN'" in trace.left_out


def test_a_tensor_that_a_collective_wrote_into_is_copied_anew():
    trace = Trace()

    class Reduce(nn.Module):
        def forward(self, x):
            x.data.mul_(2)  # as an all_reduce in place does: the tensor keeps its version
            trace.forget([x])
            return x

    model = nn.Sequential(nn.Identity(), Reduce())
    assert len(list(trace.follow(model, ALL))) == 6
    model(ROWS.clone())
    (call,) = trace.calls["1"]
    assert torch.equal(call.inputs[0].values, ROWS)
    assert torch.equal(call.outputs[0].values, 2 * ROWS)


class Times(nn.Module):
    """Multiplies by a mask."""

    def forward(self, x, mask):
        return x * mask


class Masked(nn.Module):
    """Gives two modules the same mask."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Times(), Times()])

    def forward(self, x, mask):
        for inner in self.inner:
            x = inner(x, mask)
        return x


def test_an_argument_of_two_modules_is_copied_once_and_not_when_too_much_is_kept():
    rows, mask = ROWS.clone().requires_grad_(), ROWS > 1
    trace = traced(Masked(), rows, mask)
    first, second = (trace.calls[f"inner.{number}"][0].arguments["mask"] for number in range(2))
    assert first is second
    assert torch.equal(first, mask)
    full = Trace(num_elements=MAX_ELEMENTS)
    assert not [*full._given(Times(), (rows, mask), {})]


class Overwritten(nn.Module):
    """Reads a tensor, after which something may write into it."""

    def forward(self, x):
        return x.float() * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [None, 0.5, float("nan")])
def test_a_tensor_that_is_written_into_without_a_new_version_is_noted(dtype, value):
    rows, trace = torch.full((3, 4), float("nan") if value is None else 2.0).to(dtype).requires_grad_(), Trace()
    model = Overwritten()
    handles = list(trace.follow(model, ALL))
    output = model(rows)
    if value is not None:
        rows.data.copy_(torch.full((3, 4), value).to(dtype))
    output.sum().backward()
    for handle in handles:
        handle.remove()
    assert trace.calls[""][0].inputs[0].is_overwritten is (value is not None)
