"""Optimizer state that a job resumes with, looked up in the checkpoint that it opened.

An optimizer steps after the model's first call, so what it has before is what was loaded. A state that nothing was
loaded into is the same number throughout, and is left out. Checkpoints name states by their parameters, or number them
in the optimizer's order: that says whose they are only if it is the model's order, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.optimizer import moment_of
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import bits_of_tensor
from shardviz.live.compat.modules import clean_name
from shardviz.live.run.references.choosing import Candidate, Chosen, fitting
from shardviz.live.run.references.sources import Loaded, Opened, Source
from shardviz.live.run.references.values import living_optimizers
from shardviz.live.step.steppers import parameters_of
from shardviz.reference.names import matched
from shardviz.relate.values import is_alike
from shardviz.text import counted, named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Set
    from pathlib import Path

    from torch import nn

    from shardviz.live.claims.local import Local
    from shardviz.reference.files import Entry, Reference

MOST_RANKS = 4


@dataclass(frozen=True)
class Moments:
    """What optimizers have of a model's parameters.

    Attributes:
        locals: The states on this rank, `up.weight.exp_avg` and so on, each with its parameter's claim.
        orders: The names of the parameters that each optimizer steps, in its order.
        own_order: The names of the model's parameters, in its order.
    """

    locals: tuple[Local, ...]
    orders: tuple[tuple[str, ...], ...]
    own_order: tuple[str, ...]


def with_moments(
    chosen: Chosen, sources: Sequence[Source], model: nn.Module, locals_: Sequence[Local]
) -> tuple[Chosen, tuple[Local, ...]]:
    """Return what to compare with, moments included, and this rank's compared moments.

    Every rank calls this.
    """
    own_moments = _moments(model, locals_)
    if not any(of_all_ranks(bool(own_moments.locals))):
        return chosen, ()
    named, numbered, unclear = _candidates(sources, own_moments)
    notes = [*_notes_on_ranks_without(own_moments, locals_), *_notes_on_numbers(unclear)]
    if not any(of_all_ranks(bool(named or numbered))):  # no value has to be read
        return replace(chosen, notes=(*chosen.notes, *(("", note) for note in notes))), ()
    notes += _notes_on_none_loaded(own_moments, sources, named)
    shared_candidates = _shared_candidates(own_moments, locals_, named | numbered)
    compared = [local for local in own_moments.locals if local.name in shared_candidates]
    by_name, more, _ = fitting({name: shared_candidates[name] for name in sorted(shared_candidates)}, compared)
    entries = dict(chosen.reference.entries) | {name: candidate.entry for name, candidate in by_name.items()}
    reference = replace(chosen.reference, entries=entries)
    snapshots = dict(chosen.snapshots) | {name: candidate.path for name, candidate in by_name.items()}
    all_notes = (*chosen.notes, *more, *(("", note) for note in notes))
    return replace(chosen, reference=reference, snapshots=snapshots, notes=all_notes), tuple(compared)


def _moments(model: nn.Module, locals_: Sequence[Local]) -> Moments:
    """Return the element-wise states that living optimizers have of a model's parameters."""
    from shardviz.live.step.observe import optimizer_states

    parameters = {local.name: local for local in locals_ if local.role == "param"}
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    states: dict[str, Local] = {}
    orders: list[tuple[str, ...]] = []
    for optimizer in _with_states(names.keys()):
        orders.append(tuple(names.get(id(parameter), "") for parameter in parameters_of(optimizer)))
        for state in optimizer_states(optimizer, model, [*parameters.values()]):
            parameter = parameters.get(state.name.rpartition(".")[0])
            if parameter is not None and state.values.shape == parameter.values.shape and not state.values.is_meta:
                states[state.name] = state.placed_as(parameter)
    return Moments(tuple(states.values()), tuple(orders), tuple(name for name in names.values() if name in parameters))


def _with_states(names: Set[int]) -> Iterator[Any]:
    """Yield this process's optimizers that step a model's parameters and have states."""
    for optimizer in living_optimizers():
        if getattr(optimizer, "state", None) and not names.isdisjoint(map(id, parameters_of(optimizer))):
            yield optimizer


def _candidates(
    sources: Sequence[Source], moments: Moments
) -> tuple[dict[str, list[Candidate]], dict[str, list[Candidate]], list[Path]]:
    """Return each state's candidates in opened checkpoints, newest first, by name and by number.

    With them are the checkpoints whose numbers may be those of two orders.
    """
    named: dict[str, list[Candidate]] = defaultdict(list)
    numbered: dict[str, list[Candidate]] = defaultdict(list)
    unclear: list[Path] = []
    for path, reference in _checkpoints(sources).items():
        states: dict[str, dict[str, Entry]] = defaultdict(dict)
        for name, stored in reference.entries.items():
            if (split := moment_of(name)) is not None:
                states[split[0]][split[1]] = stored
        by_number = bool(states) and all(name.isdigit() for name in states)
        position = _names_by_position(states, moments) if by_number else {}
        if position is None:
            unclear.append(path)
        whose = (position or {}) if by_number else matched(moments.own_order, states).names
        for name, state in whose.items():
            for key, stored in states[state].items():
                into = numbered if by_number else named
                into[f"{name}.{key}"].insert(0, Candidate(stored, path, is_snapshot=True, is_guess=True))
    return dict(named), dict(numbered), unclear


def _checkpoints(sources: Sequence[Source]) -> dict[Path, Reference]:
    """Return the checkpoints that the job opened, the newest last."""
    references: dict[Path, Reference] = {}
    for source in sources:
        reference = source.reference if isinstance(source, Loaded) else None
        if isinstance(source, Opened):
            reference = source.opened()
        if reference is not None:
            references.pop(source.path, None)
            references[source.path] = reference
    return references


def _names_by_position(states: Mapping[str, Mapping[str, Entry]], moments: Moments) -> dict[str, str] | None:
    """Return whose numbered states these are, if an optimizer keeps the model's order.

    In another order, as that of groups, a number does not say which parameter it meant when it was saved: None.
    """
    shapes = {local.name.rpartition(".")[0]: local.shape for local in moments.locals}
    is_unclear = False
    for order in moments.orders:
        models = tuple(name for name in moments.own_order if name in order)
        if not set(states) <= {str(number) for number in range(len(order))}:
            continue
        if order == models and _are_shaped(states, models, shapes):
            return {name: str(number) for number, name in enumerate(order) if str(number) in states and name in shapes}
        is_unclear |= any(_are_shaped(states, names, shapes) for names in (order, models))
    return None if is_unclear else {}


def _are_shaped(
    states: Mapping[str, Mapping[str, Entry]], order: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether numbered states have the shapes of the parameters at their places in an order."""
    names = {str(number): name for number, name in enumerate(order) if name in shapes}
    return all(
        entry.shape == shapes[names[number]]
        for number in states
        if number in names
        for entry in states[number].values()
    )


def _shared_candidates(
    moments: Moments, locals_: Sequence[Local], candidates: Mapping[str, list[Candidate]]
) -> dict[str, list[Candidate]]:
    """Return the candidates for states that every rank with elements of the parameter has.

    A state that is the same number throughout on a rank is left out: it was not loaded there, or shows no order.
    Every rank calls this.
    """
    parameters = {local.name: local for local in locals_ if local.role == "param" and local.values.numel()}
    have = {local.name: is_alike(bits_of_tensor(local.values)) for local in moments.locals if local.values.numel()}
    of_all: dict[str, list[Candidate]] = {}
    out: set[str] = set()
    names = set(candidates) | set(have)
    needed = {name for of_rank in of_all_ranks(names) for name in of_rank}
    lacking = {name for name in needed if name.rpartition(".")[0] in parameters and have.get(name, True)}
    for shared, missing in of_all_ranks((dict(candidates), lacking)):
        out |= missing
        for name, some in shared.items():
            of_all.setdefault(name, some)
    return {name: some for name, some in of_all.items() if name not in out}


def _notes_on_none_loaded(
    moments: Moments, sources: Sequence[Source], named: Mapping[str, list[Candidate]]
) -> list[str]:
    """Note checkpoints whose states the job read while its optimizer's states stayed fresh.

    Every rank calls this.
    """
    notes: list[str] = []
    is_fresh = all(of_all_ranks(all(is_alike(bits_of_tensor(local.values)) for local in moments.locals)))
    for path in dict.fromkeys(source.path for source in sources if isinstance(source, Loaded) and source.has_states):
        entries = [candidate.entry for some in named.values() for candidate in some if candidate.path == path]
        if is_fresh and entries and not is_alike(max(entries, key=lambda entry: math.prod(entry.shape)).bits):
            notes.append(
                f"whether the optimizer state of {printable(path.name)} was to be loaded: the job read it, and every "
                "state that its optimizer has is one number throughout, as before any step"
            )
    return of_all_ranks(notes)[0]


def _notes_on_numbers(unclear: Sequence[Path]) -> list[str]:
    """Note checkpoints that number states, if the optimizer's order is not the model's.

    Every rank calls this.
    """
    notes = [
        f"whose the optimizer state of {printable(path.name)} is: it numbers states, and the optimizer steps "
        "parameters in a different order than the model has them, so a number could mean two parameters; save states "
        "by name (torch.distributed.checkpoint.state_dict)"
        for path in unclear
    ]
    return of_all_ranks(notes)[0]


def _notes_on_ranks_without(moments: Moments, locals_: Sequence[Local]) -> list[str]:
    """Note ranks without a parameter's state that others have. Every rank calls this."""
    trained = {local.name for local in locals_ if local.role == "param" and local.values.numel()}
    have = {local.name.rpartition(".")[0] for local in moments.locals if local.values.numel()} & trained
    of_all = of_all_ranks((trained, have))
    without: dict[str, list[int]] = defaultdict(list)
    for rank, (params, stated) in enumerate(of_all):
        for name in params - stated:
            if any(name in names_there for _, names_there in of_all):
                without[name].append(rank)
    ranks = sorted({rank for some in without.values() for rank in some})
    if not ranks:
        return []
    were = "were" if len(ranks) > 1 else "was"
    return [
        f"whether {named_ranks(ranks, MOST_RANKS)} {were} to begin without the optimizer state of "
        f"{counted(len(without), 'parameter')} that other ranks have"
    ]
