"""Every call inside of a module is recorded with its line, and the run stays the same."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardviz.live.lines.recorder import recording


class View(torch.autograd.Function):
    """Hands on a view, and twice its gradient."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = View.apply(x)
        h = functional.dropout(functional.linear(seen, self.weight), 0.5)
        self.total += h.detach().sum(0)
        h = h * 2
        h[:, 0] = 1.0
        return h.relu_()


class Outer(nn.Module):
    def __init__(self, *, again: bool = False, reentrant: bool = True) -> None:
        super().__init__()
        self.first, self.inner, self.again, self.reentrant = nn.Linear(4, 4), Inner(), again, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self.again:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def stepped(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    output = model(torch.randn(3, 4))
    output.square().sum().backward()
    return [output, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def made(*, again: bool = False, reentrant: bool = True) -> Outer:
    torch.manual_seed(0)
    return Outer(again=again, reentrant=reentrant)


def test_calls_have_their_lines_and_gradients() -> None:
    model = made()
    with recording(model, "inner") as seen:
        stepped(model)
    start = inspect.getsourcelines(Inner.forward)[1]
    calls = [(event.frames[0][event.frames[1]].line - start, event.function) for event in seen.events]
    assert calls == [
        (1, "view_as"),
        (2, "linear"),
        (2, "dropout"),
        (3, "detach"),
        (3, "sum"),
        (3, "add_"),
        (4, "mul"),
        (5, "setitem"),
        (6, "relu_"),
    ]
    by_name = {event.function: event for event in seen.events}
    linear = seen.values[by_name["linear"].outputs[0]]
    assert linear.gradient is not None
    assert seen.values[by_name["view_as"].outputs[0]].gradient is not None
    given = seen.values[by_name["linear"].inputs[0]]
    assert given.number == by_name["view_as"].outputs[0]
    assert seen.values[by_name["relu_"].inputs[0]].number == by_name["setitem"].outputs[0]
    assert seen.values[by_name["linear"].inputs[1]].origin == "weight weight"
    assert [seen.values[at].number for at in seen.returned[0]] == list(by_name["relu_"].outputs)


def test_recording_changes_no_number() -> None:
    for again in (False, True):
        plain = stepped(made(again=again))
        model = made(again=again)
        with recording(model, "inner"):
            watched = stepped(model)
        assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
        assert "apply" in vars(torch.autograd.Function)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_call_gives_the_first_its_gradients(reentrant: bool) -> None:
    model = made(again=True, reentrant=reentrant)
    with recording(model, "inner") as seen:
        stepped(model)
    linear = next(event for event in seen.events if event.function == "linear")
    assert seen.values[linear.outputs[0]].back is not None
    assert len(seen.returned) == 1


def test_a_compiled_module_is_one_call() -> None:
    for in_place in (True, False):
        model = made()
        if in_place:
            model.inner.compile(backend="eager")
        else:
            model.inner = torch.compile(model.inner, backend="eager")  # type: ignore[assignment]
        with recording(model, "") as seen:
            stepped(model)
        assert [event.function for event in seen.events] == ["linear", "Inner"]
        assert seen.values[seen.events[-1].outputs[0]].gradient is not None
