"""The unsharded model on the ranks' micro-batches, and its gradients of each and of every term of its loss.

With them a check can say how often each counts. A step that runs the model several times over parts of its batch
accumulates their gradients: micro-batch j is the j-th part of every rank's rows. A loss that is a sum, as of a cross
entropy and a balance term, is split at its additions, in the graph of its backward: the gradient of one term is that of
the loss with nothing sent back to the others. They are kept under the names that `of_micro_batch` and `of_loss_term` of
`dump.records.step` give.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from shardviz.dump.records.step import of_loss_term, of_micro_batch
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.claims.registry import local_tensors, of_tensor
from shardviz.live.compat.worlds import one_process
from shardviz.live.step.batch import in_turns, part_of
from shardviz.live.step.return_values import are_parts_of
from shardviz.live.step.running import tensors_in
from shardviz.live.step.step import gradients, loss_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from shardviz.live.claims.local import Local
    from shardviz.live.step.batch import Batch, Setting
    from shardviz.live.step.step import StepResult
    from shardviz.live.step.unsharded.step import UnshardedStep


MAX_PARTS = 16
"""Of a step with more micro-batches than this, none is looked at alone."""

MAX_ELEMENTS = 1 << 20
"""No more elements than this are kept of all gradients of all micro-batches, nor of all terms."""


def micro_batches(step: StepResult, reference: UnshardedStep, setting: Setting) -> tuple[Batch, int] | None:
    """Return the batch in an order that gives each call the rows of the ranks' calls. Every rank calls this.

    Returns:
        The batch and in how many parts the unsharded model runs on it; None if no order gives it the ranks' rows.
    """
    in_turn = not step.returned or are_parts_of(step.returned, step.sizes[0] if step.sizes else 0)
    of_all = of_all_ranks((len(step.observation.returned), in_turn))
    counts, num_whole = {count for count, _ in of_all}, len(reference.step.returned) // reference.parts
    if counts <= {num_whole, 0}:
        turns, parts = reference.turns, 1
    elif num_whole == len(counts) == 1 and all(in_turn for _, in_turn in of_all):
        turns = parts = counts.pop()
    else:
        return None
    batch = in_turns(setting.batch, setting.parts, turns) if turns == 1 or not setting.dim else None
    return None if batch is None else (batch, parts)


def gradients_of_micro_batches(
    probe: ModuleType, setting: Setting, step: StepResult, reference: UnshardedStep
) -> list[Local]:
    """Return the unsharded model's gradient of each micro-batch. Every rank calls this.

    Args:
        step: The sharded step, whose runs of the model are its micro-batches.

    Returns:
        The gradients; none if the step ran the model once, over parts of unequal size, or with a loss of its own.
    """
    count = max(of_all_ranks(sum(output.ndim > 0 for output in step.observation.outputs)))
    parts, rows = setting.parts, {len(tensor) for tensor in tensors_in(setting.batch) if tensor.ndim}
    size = sum(parameter.numel() for parameter in reference.model.parameters()) * count
    if (
        reference.has_own_loss
        or not 1 < count <= MAX_PARTS
        or size > MAX_ELEMENTS
        or any(number % (parts * count) for number in rows)
    ):
        return []
    grads = []
    for number in range(count):
        with one_process():
            model = reference.mode(setting.build())
            for rank in range(parts):
                torch.manual_seed(2)
                local_batch = part_of(part_of(setting.batch, rank, parts), number, count)
                torch.autograd.backward(loss_of(probe, model, local_batch) / parts)
        grads += [
            replace(gradient, name=of_micro_batch(gradient.name, number), role="activation")
            for gradient in gradients(list(local_tensors(model)))
        ]
    return grads


MAX_TERMS = 8
"""A loss of more terms than this is not split."""


SUMS = ("AddBackward0", "SubBackward0")
SCALED = ("DivBackward0", "MulBackward0", "NegBackward0")


class _Scalars(TorchFunctionMode):
    """Keeps every scalar computed inside this context, by its place in the backward graph."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Any, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if torch.is_tensor(output) and output.ndim == 0 and output.grad_fn is not None:
            self.values[output.grad_fn] = output.detach()
        return output


@one_process()
def gradients_of_loss_terms(probe: ModuleType, setting: Setting, reference: UnshardedStep) -> list[Local]:
    """Return the gradient and value of each loss term of the unsharded model, if several."""
    size = sum(parameter.numel() for parameter in reference.model.parameters())
    if not hasattr(probe, "loss") or reference.has_own_loss or reference.parts > 1 or size * 2 > MAX_ELEMENTS:
        return []
    model = reference.mode(setting.build())
    torch.manual_seed(2)
    with _Scalars() as scalars:
        loss = loss_of(probe, model, setting.batch)
    terms = tuple(dict.fromkeys(_terms(loss.grad_fn)))
    if not 1 < len(terms) <= MAX_TERMS or size * len(terms) > MAX_ELEMENTS:
        return []
    grads = []
    for number, term in enumerate(terms):
        model.zero_grad()
        _backward(loss, [other_term for other_term in terms if other_term is not term])
        grads += [
            replace(
                gradient, name=of_loss_term(gradient.name, number), role="activation", values=gradient.values.clone()
            )
            for gradient in gradients(list(local_tensors(model)))
        ]
        if term in scalars.values:
            grads.append(of_tensor(of_loss_term("loss", number), "activation", scalars.values[term]))
    return grads


def _terms(node: Any) -> Iterator[Any]:
    """Yield the terms of a sum, which is scaled as a whole or not."""
    below = [child for child, _ in node.next_functions if child is not None] if node is not None else []
    name = type(node).__name__
    if name in SUMS:
        for term in below:
            yield from _terms(term)
    elif name in SCALED and len(below) == 1 and type(below[0]).__name__ in SUMS:
        yield from _terms(below[0])
    elif node is not None:
        yield node


def _backward(loss: torch.Tensor, left_out: Sequence[Any]) -> None:
    """Run a loss's backward with nothing sent back to some of its terms."""
    handles = [node.register_prehook(_zeros) for node in left_out]
    try:
        torch.autograd.backward(loss, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()


def _zeros(given: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if tensor is None else torch.zeros_like(tensor) for tensor in given)
