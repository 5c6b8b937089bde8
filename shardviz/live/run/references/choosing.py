"""The choice of known values that a tensor is compared with, the same on all ranks.

What was surely loaded, or held before sharding, is taken, the newest first. A file that the job only opened may be what
its weights were copied from: it is taken if a rank holds just what it claims of it, if a weight of another kind
of it is held instead (`misfits`), or if nothing else is known. One that was read into tensors which are gone, so
that no living tensor has its values, was meant to be loaded all the same.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardviz.errors import DumpError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import cast_bits, is_as_claimed, stored_slice
from shardviz.live.capture.stamp import bits_of_tensor
from shardviz.live.compat.tensors import tensor_behind
from shardviz.live.run.references.changes import all_rounded, notes_on_rounding, rounded_files
from shardviz.live.run.references.misfits import is_given, is_mixed_up, lost, misfits, notes_on, notes_on_mixtures
from shardviz.live.run.references.sources import Loaded, Source
from shardviz.live.run.references.values import NAME, UNSEEN, Kept
from shardviz.reference.files import Entry, Reference
from shardviz.reference.names import matched
from shardviz.relate.values import is_alike

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from shardviz.live.claims.local import Local


@dataclass(frozen=True, slots=True)
class Candidate:
    """Values that a tensor may have.

    Attributes:
        path: What they are of, for messages.
        is_snapshot: Whether the job may rightly have changed them since.
        is_guess: Whether it is not known that the tensor has them.
        session: The folder of the rank that says so, where its entry may be; empty if every rank reaches it.
    """

    entry: Entry
    path: Path
    is_snapshot: bool
    is_guess: bool
    session: str = ""


@dataclass(frozen=True)
class Chosen:
    """What a model's values are compared with.

    Attributes:
        snapshots: Names of tensors that the job may rightly have changed since, each with where its values are.
        before: The names of those whose values are from before sharding.
        elsewhere: The names of those of which this rank does not reach the first rank's values, but another's.
        notes: What a reader should know of files that the job opened, each with its tensor; none if of the whole run.
        lost: The names of those that the job read into copies which are gone.
    """

    reference: Reference
    snapshots: Mapping[str, Path]
    before: frozenset[str]
    elsewhere: frozenset[str] = frozenset()
    notes: tuple[tuple[str, str], ...] = ()
    lost: frozenset[str] = frozenset()


def chosen(
    session: str,
    sources: Sequence[Source],
    model: nn.Module,
    locals_: Sequence[Local],
    kept_values: Mapping[str, Kept],
    skipped: Collection[str] = (),
) -> Chosen:
    """Choose what each tensor of a model is compared with. Every rank calls this.

    Args:
        sources: What values may be compared with, the newest last.
        skipped: Those that a load on this rank missed, though it was given their values under another prefix.
    """
    own_candidates = candidates(session, sources, model, [local.name for local in locals_])
    why = {
        name: kept_values[name].why or UNSEEN if name in kept_values else UNSEEN
        for name in (local.name for local in locals_)
        if name not in own_candidates
    }
    of_ranks = of_all_ranks((own_candidates, why))
    reasons = {name: text for _, not_here in reversed(of_ranks) for name, text in not_here.items()}
    of_all, elsewhere = _join_candidates([of_rank for of_rank, _ in of_ranks])
    discarded = discarded_on_all_ranks(sources, locals_, of_all)
    by_name, notes, without = fitting(of_all, locals_, skipped, discarded)
    paths = sorted({candidate.path for candidate in by_name.values()}, key=str)
    path = paths[0] if len(paths) == 1 else Path(" or ".join(candidate.name for candidate in paths) or "nothing")
    return Chosen(
        Reference(
            path,
            {name: candidate.entry for name, candidate in by_name.items()},
            {name: text for name, text in reasons.items() if name not in by_name},
        ),
        {name: candidate.path for name, candidate in by_name.items() if candidate.is_snapshot},
        frozenset(name for name, candidate in by_name.items() if str(candidate.path) == NAME),
        elsewhere,
        tuple(notes),
        frozenset(without),
    )


def _join_candidates(
    of_ranks: Iterable[Mapping[str, list[Candidate]]],
) -> tuple[dict[str, list[Candidate]], frozenset[str]]:
    """Join all ranks' candidates by tensor; return also the names that this rank cannot read.

    The paths are the same on all ranks, in one order; of each the first entry counts that is in reach.
    """
    of_all: dict[str, list[Candidate]] = {}
    elsewhere: set[str] = set()
    reached: dict[str, bool] = {}
    for of_rank in of_ranks:
        for name, some in of_rank.items():
            candidates_so_far = of_all.setdefault(name, [])
            for candidate in some:
                at = next((at for at, known in enumerate(candidates_so_far) if known.path == candidate.path), None)
                for session in {candidate.session} - reached.keys():
                    reached[session] = not session or Path(session).is_dir()
                if at is None:
                    candidates_so_far.append(candidate)
                elif reached[candidate.session] and not reached[candidates_so_far[at].session]:
                    candidates_so_far[at] = candidate
                    elsewhere.add(name)
    return of_all, frozenset(elsewhere)


def candidates(
    session: str, sources: Sequence[Source], model: nn.Module, names: Sequence[str]
) -> dict[str, list[Candidate]]:
    """Return this rank's candidates for each tensor: opened files, newest first, then sure ones."""
    by_name: dict[str, list[Candidate]] = {}
    sure: dict[str, Candidate] = {}
    for source in sources:
        for name, stored in source.entries(model, names).items():
            candidate = Candidate(stored, source.path, source.is_snapshot, source.is_guess, session)
            if source.is_guess:
                by_name.setdefault(name, []).insert(0, candidate)
            else:
                sure[name] = candidate
    for name, candidate in sure.items():
        by_name[name] = [guess for guess in by_name.get(name, []) if guess.path != candidate.path] + [candidate]
    return by_name


def fitting(
    of_all: Mapping[str, list[Candidate]],
    locals_: Sequence[Local],
    skipped: Collection[str] = (),
    discarded: Mapping[Path, Collection[str]] = MappingProxyType({}),
) -> tuple[dict[str, Candidate], list[tuple[str, str]], set[str]]:
    """Choose each tensor's candidate, with notes on opened files and unset tensors.

    Every rank calls this.

    A tensor is compared with the first candidate that some rank holds its part of, else with the one that is sure.

    Args:
        of_all: What any rank knows of each tensor, the same on all ranks.
        skipped: Those that a load on this rank missed, though it was given their values under another prefix.
        discarded: What was read from each file into tensors that are gone, the same on all ranks.
    """
    fits = _fits(of_all, locals_)
    unknown = {
        name: some
        for name, some in of_all.items()
        if name not in fits and all(candidate.is_guess or is_given(candidate) for candidate in some)
    }
    narrow = rounded_files(unknown, locals_)
    of_all = all_rounded(of_all, unknown, narrow)
    fits |= {name: (frozenset({at}), True) for name, (at, _) in narrow.items()}
    held = {name: min(places) for name, (places, _) in fits.items()}
    used = Counter(of_all[name][held[name]].path for name, (_, tells) in fits.items() if tells)
    misfit = misfits(of_all, held, used, locals_)
    left_out = {name for name, misfit_here in misfit.items() if misfit_here.state in ("unlike", "similar", "partial")}
    without = lost(misfit, of_all, used, discarded)
    missed = without | left_out & {name for of_rank in of_all_ranks(set(skipped)) for name in of_rank}
    mixed_up = {
        name: misfit_here.at for name, misfit_here in misfit.items() if name in missed or is_mixed_up(misfit_here)
    }
    guessed = mixed_up | held
    sure = {
        name: next((candidate for candidate in some if not candidate.is_guess), some[0])
        for name, some in of_all.items()
    }
    by_name = {name: of_all[name][guessed[name]] if name in guessed else candidate for name, candidate in sure.items()}
    by_name |= {name: replace(by_name[name], is_snapshot=False) for name in missed}  # the job meant to load them
    meant = {name: misfit_here for name, misfit_here in misfit.items() if name not in guessed}
    of_tensors = notes_on(meant, of_all, used)
    of_run = notes_on_mixtures(of_all, {name: places for name, (places, _) in fits.items()}, used)
    of_run += notes_on_rounding(of_all, narrow)
    own_notes = [(local.name, of_tensors[local.name]) for local in locals_ if local.name in of_tensors]
    return by_name, [*own_notes, *(("", note) for note in of_run)], without


def _fits(of_all: Mapping[str, list[Candidate]], locals_: Iterable[Local]) -> dict[str, tuple[frozenset[int], bool]]:
    """Return which opened files some rank holds each tensor of, by candidate index.

    Every rank calls this. With each is whether that says anything: a tensor of one value throughout may be of any file.
    """
    fits_here: dict[str, tuple[frozenset[int], bool]] = {}
    for local in locals_:
        guesses = [(at, candidate) for at, candidate in enumerate(of_all.get(local.name, [])) if candidate.is_guess]
        if guesses and not local.values.is_meta and local.values.numel():
            places = frozenset(at for at, candidate in guesses if is_as_claimed(local, candidate.entry))
            fits_here[local.name] = places, bool(places) and not is_alike(bits_of_tensor(local.values))
    fits: dict[str, tuple[frozenset[int], bool]] = {}
    without: set[str] = set()
    for of_rank in of_all_ranks(fits_here):
        for name, (places, tells) in of_rank.items():
            places_so_far, told_before = fits.get(name, (frozenset(), False))
            fits[name] = places_so_far | places, told_before or tells
            without |= set() if places else {name}
    changed = _changed_before(of_all, locals_, {name for name in without if fits[name][0]})
    return {name: fit for name, fit in fits.items() if fit[0] and name not in changed}


def _changed_before(
    of_all: Mapping[str, list[Candidate]], locals_: Iterable[Local], names: Collection[str]
) -> frozenset[str]:
    """Return tensors that some ranks hold of a file, and all ranks of what rank 0 gave to torch: a part was changed.

    Every rank calls this, with the same names.
    """
    if not names:
        return frozenset()
    not_given = {
        local.name
        for local in locals_
        if local.name in names and local.values.numel()
        if not any(is_given(candidate) and is_as_claimed(local, candidate.entry) for candidate in of_all[local.name])
    }
    return frozenset(names).difference(*of_all_ranks(not_given))


def discarded_on_all_ranks(
    sources: Sequence[Source], locals_: Sequence[Local], of_all: Mapping[str, list[Candidate]]
) -> dict[Path, set[str]]:
    """Return which of a model's tensors every rank read into tensors that are gone.

    A tensor that lives may be an average of weights or a second model, and so may one that has the same values. Every
    rank calls this.

    Args:
        of_all: What any rank knows of each of them, the same on all ranks.
    """
    mine: dict[Path, set[str]] = {}
    for source in sources:
        copies = source.copies if isinstance(source, Loaded) else {}
        names = matched([local.name for local in locals_], copies).names
        if names and all(tensor_behind(copies[name]) is None for name in names.values()):
            largest = max((local for local in locals_ if local.name in names), key=lambda local: local.values.numel())
            if not _is_alive(
                largest, [candidate for candidate in of_all.get(largest.name, []) if candidate.path == source.path]
            ):
                mine[source.path] = set(names)
    first, *of_more_ranks = of_all_ranks(mine)
    return {path: names for path, names in first.items() if all(path in of_rank for of_rank in of_more_ranks)}


def _is_alive(local: Local, stored: Sequence[Candidate]) -> bool:
    """Whether a tensor of this process has a checkpoint's values of a tensor or its shard."""
    try:
        stored_bits = [
            (bits, candidate.entry.dtype)
            for candidate in stored
            if (bits := stored_slice(local, candidate.entry)) is not None
        ]
        stored_bits += [(candidate.entry.bits, candidate.entry.dtype) for candidate in stored]
    except (DumpError, OSError):  # not readable here, so that nothing is known of it
        return True
    plain = [
        tensor for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, nn.Parameter, DTensor)
    ]  # others run code
    tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in plain]
    return any(
        np.array_equal(cast_bits(bits, dtype, tensor.dtype), bits_of_tensor(tensor))
        for tensor in tensors
        for bits, dtype in stored_bits
        if not tensor.is_meta and tensor.is_floating_point() and tuple(tensor.shape) == bits.shape
    )
