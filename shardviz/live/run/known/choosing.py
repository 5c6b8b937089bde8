"""Which of the values that are known of a tensor it is compared with. All ranks choose the same.

What was surely loaded, or held before sharding, is taken, the newest first. A file that the job only opened may be what
its weights were copied from: it is taken where a rank holds just what it claims of it, or where nothing else is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import is_as_claimed
from shardviz.live.run.known.values import NAME, UNSEEN
from shardviz.reference.files import Reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from shardviz.live.capture.locals import Local
    from shardviz.live.run.known.sources import Source
    from shardviz.live.run.known.values import Kept
    from shardviz.reference.files import Entry

NONE = -1


@dataclass(frozen=True, slots=True)
class Candidate:
    """Values that a tensor may have.

    Attributes:
        entry: Where they are.
        path: What they are of, for messages.
        is_snapshot: Whether the job may rightly have changed them since.
        is_guess: Whether it is not known that the tensor has them.
    """

    entry: Entry
    path: Path
    is_snapshot: bool
    is_guess: bool


@dataclass(frozen=True)
class Chosen:
    """What a model's values are compared with.

    Attributes:
        reference: Their places, by the model's names.
        snapshots: Names of tensors that the job may rightly have changed since, each with where its values are.
        before: The names of those whose values are from before sharding.
    """

    reference: Reference
    snapshots: Mapping[str, Path]
    before: frozenset[str]


def chosen(sources: Sequence[Source], model: nn.Module, locals_: Sequence[Local], kept: Mapping[str, Kept]) -> Chosen:
    """Choose what each tensor of a model is compared with. Every rank calls this.

    Args:
        sources: What values may be compared with, the newest last.
        model: The model, without wrappers.
        locals_: Its tensors on this rank.
        kept: What is known of them from before they were sharded.
    """
    mine = candidates(sources, model, [local.name for local in locals_])
    why = {name: kept[name].why or UNSEEN if name in kept else UNSEEN for name in _names(locals_) if name not in mine}
    of_all: dict[str, list[Candidate]] = {}
    reasons: dict[str, str] = {}
    for of_rank, not_here in of_all_ranks((mine, why)):
        for name, some in of_rank.items():
            known = of_all.setdefault(name, [])
            known += [one for one in some if all(one.path != other.path for other in known)]
        reasons = not_here | reasons
    found = fitting(of_all, locals_)
    paths = sorted({one.path for one in found.values()}, key=str)
    path = paths[0] if len(paths) == 1 else Path(" and ".join(one.name for one in paths) or "nothing")
    return Chosen(
        Reference(
            path,
            {name: one.entry for name, one in found.items()},
            {name: text for name, text in reasons.items() if name not in found},
        ),
        {name: one.path for name, one in found.items() if one.is_snapshot},
        frozenset(name for name, one in found.items() if str(one.path) == NAME),
    )


def candidates(sources: Sequence[Source], model: nn.Module, names: Sequence[str]) -> dict[str, list[Candidate]]:
    """Return what this rank knows of each tensor: files that were opened, the newest first, and what is sure."""
    found: dict[str, list[Candidate]] = {}
    sure: dict[str, Candidate] = {}
    for source in sources:
        for name, entry in source.entries(model, names).items():
            one = Candidate(entry, source.path, source.is_snapshot, source.is_guess)
            if source.is_guess:
                found.setdefault(name, []).insert(0, one)
            else:
                sure[name] = one
    for name, one in sure.items():
        found.setdefault(name, []).append(one)
    return found


def fitting(of_all: Mapping[str, list[Candidate]], locals_: Iterable[Local]) -> dict[str, Candidate]:
    """Return each tensor's first candidate that some rank holds its part of, else the last. Every rank calls this.

    Args:
        of_all: What any rank knows of each tensor, the same on all ranks.
        locals_: The tensors of this rank.
    """
    guessed = {name: [one for one in some if one.is_guess] for name, some in of_all.items()}
    mine: dict[str, int] = {}
    for local in locals_:
        guesses = guessed.get(local.name, [])
        if guesses and not local.values.is_meta and local.values.numel():
            mine[local.name] = next((at for at, one in enumerate(guesses) if is_as_claimed(local, one.entry)), NONE)
    first: dict[str, int] = {}
    for of_rank in of_all_ranks(mine):
        for name, at in of_rank.items():
            if at != NONE:
                first[name] = min(at, first.get(name, at))
    sure = {name: next((one for one in some if not one.is_guess), some[0]) for name, some in of_all.items()}
    return {name: guessed[name][first[name]] if name in first else one for name, one in sure.items()}


def _names(locals_: Iterable[Local]) -> list[str]:
    return [local.name for local in locals_]
