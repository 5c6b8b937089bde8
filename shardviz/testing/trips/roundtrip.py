"""`assert_checkpoint_roundtrip`: save on one mesh, load on the next, compare by name.

One trip builds, fills and saves on one mesh; builds, spoils and loads on another; and judges.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal

from torch import distributed, nn
from torch.distributed.checkpoint.api import CheckpointException

from shardviz.errors import ShardvizError
from shardviz.live.capture.agreement import agreed_run_id, of_all_ranks, refuse_without_group, together
from shardviz.live.capture.lookup.by_reference import stored_slice
from shardviz.live.capture.meshes import plain_mesh
from shardviz.testing.assertions.message import ShardAssertionError
from shardviz.testing.assertions.subjects import current_mesh
from shardviz.testing.trips.contents import (
    OLD_FACTOR,
    OLD_NUMBER,
    SAVED_FACTOR,
    SAVED_NUMBER,
    FilledTensor,
    RankContents,
    contents_of,
    fill,
    give_state,
    old_entries,
    salt_of,
    sent_by_all,
    settings_times,
)
from shardviz.testing.trips.judging import TargetTensor, TransferOutcome, findings_of, message_of, parts_of_all
from shardviz.testing.trips.pieces import rename_weights, rules_of
from shardviz.testing.trips.placing import places
from shardviz.testing.trips.state_rules import (
    OtherState,
    check_disk,
    check_states,
    facts_of,
    not_checked_text,
    saved_in,
)
from shardviz.testing.trips.worlds import on_mesh
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from shardviz.explain.finding import Finding
    from shardviz.reference.files import Entry
    from shardviz.testing.trips.worlds import AnyMesh

What = Literal["param", "buffer", "optim", "setting", "disk"]
ALL: tuple[What, ...] = ("param", "buffer", "optim", "setting", "disk")
Transfer = Callable[[Any, Any, Path], Any]
"""Saves or loads: `(model, optimizer, folder)`. A load may return a new model, or a new model and optimizer."""


@dataclass(frozen=True)
class RoundTrip:
    """How many tensors a trip compared, and what it couldn't check.

    Attributes:
        compared: How many tensors were compared, over all trips.
        on_disk: How many were compared on disk too, by name.
        not_checked: What could not be looked at, and why.
        padded: What was left out because a map says that it is padding.
    """

    compared: int = 0
    on_disk: int = 0
    not_checked: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()

    def __add__(self, other: RoundTrip) -> RoundTrip:
        noted = tuple(dict.fromkeys((*self.not_checked, *other.not_checked)))
        return RoundTrip(self.compared + other.compared, self.on_disk + other.on_disk, noted)


@dataclass(frozen=True)
class SavedState:
    """What a trip saved; every rank has all of it.

    Attributes:
        sent: Its tensors by name.
        facts: What was saved besides tensors.
        refused: Tensors that could not be filled, and why.
        mesh: The mesh, in words.
        on_disk: How many tensors were compared there.
        notes: What was not looked at there.
    """

    sent: Mapping[str, FilledTensor]
    facts: OtherState
    refused: Mapping[str, str]
    mesh: str
    findings: list[Finding] = field(default_factory=list)
    on_disk: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trip:
    """One save and one load.

    Attributes:
        save: Saves.
        load: Loads.
        optimizer: The optimizer, its builder, or None.
        of: What to compare.
        names: The checkpoint's names, by pattern over the model's.
        folder: Where to save.
        number: How many were made before.
        run_id: What names this call, so that a file of an earlier one is not taken for its own.
    """

    save: Callable[[Any, Any, Path], Any]
    load: Callable[[Any, Any, Path], Any]
    model: Any
    optimizer: Any
    of: set[What]
    names: dict[str, str]
    folder: Path
    number: int
    run_id: str

    def run(self, here: AnyMesh, there: AnyMesh) -> RoundTrip:
        """Save on one mesh, load on another. Every rank of the job calls this.

        Raises:
            ShardAssertionError: What was loaded is not what was saved.
            ShardvizError: The save or the load raised on another rank, or in torch.distributed.checkpoint.
        """
        __tracebackhide__ = True
        with together():  # a save or a load that raises on one rank would leave the others waiting for it
            with on_mesh(here) as mesh:
                before = self._saved(mesh) if mesh is not None else None
            before = next(one for one in of_all_ranks(before) if one is not None)
            with on_mesh(there) as mesh:
                text, done = self._loaded(mesh, before) if mesh is not None else ("", RoundTrip())
            of_all = of_all_ranks((text, done))
        if text := next((one for one, _ in of_all if one), ""):
            raise ShardAssertionError(text)
        return of_all[0][1]

    @property
    def salt(self) -> str:
        """What makes the values of this trip its own."""
        return salt_of(self.number, self.run_id)

    def _saved(self, mesh: DeviceMesh) -> SavedState:
        """Build, fill and save on this rank of the first mesh, and look at what is on disk."""
        model, optimizer = self._built(mesh)
        give_state(optimizer)
        contents = contents_of(model, optimizer, mesh)
        sent = sent_by_all(contents)
        rank = distributed.get_rank()
        refused = fill(contents, {name: sent[name].entry(self.salt, rank) for name in contents.tensors}, SAVED_NUMBER)
        settings_times(optimizer, SAVED_FACTOR)
        facts = facts_of(contents_of(model, optimizer, mesh))
        refused = {name: why for of_rank in of_all_ranks(refused) for name, why in of_rank.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        of_all_ranks(None)
        _call("save", self.save, model, optimizer, self.folder)
        of_all_ranks(None)
        before = SavedState(sent, facts, refused, str(plain_mesh(mesh)))
        return self._with_disk(before) if "disk" in self.of else before

    def _with_disk(self, before: SavedState) -> SavedState:
        """Compare what is on disk, on the first rank only."""
        if distributed.get_rank() != 0:
            return of_all_ranks(before)[0]
        sent = self._entries(before, 0, per_rank=False)
        stored, refused = saved_in(self.folder)
        called = _renamed_entries(sent, self.names)
        wrong, absent = check_disk(called, stored, f"saved on {before.mesh}")
        notes = tuple(not_checked_text(absent, refused, len(sent)))
        done = len(sent) - len(absent)
        return of_all_ranks(replace(before, findings=wrong, on_disk=done, notes=notes))[0]

    def _entries(self, before: SavedState, rank: int, *, per_rank: bool) -> dict[str, Entry]:
        """Return the saved tensors to compare, by name, including each rank's own if asked."""
        entries = {}
        for name, sent in before.sent.items():
            saved = sent.entry(self.salt, rank)
            is_due = name not in before.refused and sent.role in self.of and (per_rank or not sent.each)
            if is_due and saved is not None:
                entries[name] = saved
        return entries

    def _built(self, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
        model = self.model if isinstance(self.model, nn.Module) else self.model(mesh)
        if not isinstance(model, nn.Module):
            raise ShardvizError(f"model(mesh) returned a {type(model).__name__}", "return the sharded nn.Module")
        is_function = callable(self.optimizer) and not hasattr(self.optimizer, "param_groups")
        return model, self.optimizer(model) if is_function else self.optimizer

    def _loaded(self, mesh: DeviceMesh, before: SavedState) -> tuple[str, RoundTrip]:
        """Build, spoil and load on this rank of the second mesh; return the report and counts."""
        model, optimizer = self._built(mesh)
        old = contents_of(model, optimizer, mesh)
        fill(old, old_entries(old, self.salt), OLD_NUMBER)
        if isinstance(self.model, nn.Module):
            settings_times(optimizer, OLD_FACTOR)
        of_all_ranks(None)
        model, optimizer = _model_and_optimizer(
            _call("load", self.load, model, optimizer, self.folder), model, optimizer
        )
        of_all_ranks(None)
        now = contents_of(model, optimizer, mesh)
        return self._judge(mesh, before, old, now)

    def _judge(
        self, mesh: DeviceMesh, before: SavedState, old: RankContents, now: RankContents
    ) -> tuple[str, RoundTrip]:
        here, rank = str(plain_mesh(mesh)), distributed.get_rank()
        trips = f"saved on {before.mesh}, loaded on {here}"
        entries = self._entries(before, rank, per_rank=here == before.mesh)
        notes = [*before.notes, *_uncompared(before, self.of, same=here == before.mesh)]
        targets = _targets(entries, old, now, self.salt)
        parts = parts_of_all(now.tensors, targets)
        roles = {name: before.sent[name].role for name in parts}
        each = {name for name in parts if before.sent[name].each}
        received = TransferOutcome(parts, roles, each, "load", "what was saved", trips)
        placed = places(now.tensors, targets, received.unplaced, mesh) if received.unplaced else []
        state_findings = check_states(before.facts, old, now, self.of, trips)
        findings = [*before.findings, *findings_of(received, placed), *state_findings]
        return message_of(findings), RoundTrip(len(parts), before.on_disk, tuple(notes))


def _call(what: str, transfer: Callable[[Any, Any, Path], Any], model: Any, optimizer: Any, folder: Path) -> Any:
    """Save or load; torch's exception, which has every rank's traceback, becomes one line.

    Raises:
        ShardvizError: torch.distributed.checkpoint raised.
    """
    try:
        return transfer(model, optimizer, folder)
    except CheckpointException as error:
        first = next((one for one, _ in error.failures.values()), error)
        why = " ".join(str(first).split())
        is_shared = "share memory" in why
        hint = "save only one of the tied weights, or clone them: safetensors refuses both"
        raise ShardvizError(
            f"the {what} raised on {counted(len(error.failures), 'rank')}: {type(first).__name__}: {why}",
            hint if is_shared else f"its traceback above says where: fix the {what}",
        ) from error


def _model_and_optimizer(returned: Any, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    if isinstance(returned, nn.Module):
        return returned, optimizer
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module):
        return returned
    return model, optimizer


def _targets(entries: Mapping[str, Entry], old: RankContents, now: RankContents, salt: str) -> dict[str, TargetTensor]:
    group_of = {name: group for group in now.tied for name in group}
    spoiled = old_entries(old, salt)
    return {
        name: TargetTensor(
            saved,
            partial(stored_slice, old.tensors[name], entry) if (entry := spoiled.get(name)) is not None else None,
            saved.dtype,
            tuple(entries[other] for other in group_of.get(name, ()) if other != name and other in entries),
        )
        for name, saved in entries.items()
    }


def _uncompared(before: SavedState, of: set[What], *, same: bool) -> Iterator[str]:
    """Yield what was not compared."""
    if before.refused:
        name, why = next(iter(before.refused.items()))
        yield f"{counted(len(before.refused), 'tensor')}: {name}: {why}"
    names = [name for name, sent in before.sent.items() if sent.each and sent.role in of]
    if names and not same:
        yield (
            f"{listed(names)}: each rank has different values under this name, and no placements say which part "
            "they are, so they can be compared on the mesh of the save only"
        )


def _renamed_entries(sent: Mapping[str, Entry], names: Mapping[str, str]) -> dict[str, Entry]:
    """Return tensors by their names in the checkpoint; states follow their parameters."""
    if not names:
        return dict(sent)
    weights = [name for name in sent if " " not in name]
    called = rename_weights(weights, rules_of(names))
    return {called.get(name, name): entry for name, entry in sent.items()}


def assert_checkpoint_roundtrip(
    save: Transfer,
    load: Transfer,
    model: nn.Module | Callable[[DeviceMesh], nn.Module],
    optimizer: Optimizer | Callable[[nn.Module], Optimizer] | None = None,
    *,
    meshes: Sequence[AnyMesh] = (),
    of: Collection[What] = ALL,
    names: Mapping[str, str] | None = None,
    folder: Path | str | None = None,
    strict: bool = False,
) -> RoundTrip:
    """Assert that a checkpoint loads on a second mesh as it was saved. Every rank calls this.

    Parameters, persistent buffers, the optimizer's state, its steps and hyperparameters are filled with values that say
    where they belong, and saved. On the next mesh a new model is built and filled with other values, which must be gone
    after the load. What is on disk is compared too: a load that undoes the mistakes of its save hides both. Ties must
    last.

    Args:
        save: Called as `save(model, optimizer, folder)` on every rank of the first mesh, then of each but the last.
        load: Called as `load(model, optimizer, folder)` on every rank of the next mesh, with a model and an optimizer
            that are newly built. It loads in place, or returns the new model, or the new model and optimizer.
        model: Builds the sharded model, or this rank's stage of it, on a mesh. A model itself if one mesh is enough:
            it is saved, overwritten and loaded again.
        optimizer: Makes the optimizer of a model; or the model's own; or None.
        meshes: Two or more, as `{"fsdp": 2, "tp": 4}`, `"fsdp=2,tp=4"` or a `DeviceMesh`: saved on the first, loaded
            on the second, saved there again, loaded on the third. One that is smaller than the job uses its first
            ranks, and in it the world has that size. By default the test's, to which the checkpoint returns.
        of: What to compare: leave out "setting" if a new run sets its own hyperparameters, "disk" if the format is
            meant to differ, "optim" if only weights are loaded.
        names: The checkpoint's names by pattern over the model's, if an export renames: `{"*": "model.*"}`.
        folder: Where to save; the same on every rank and on storage that all reach. By default a new temporary folder.
        strict: Fail, too, if something could not be checked.

    Returns:
        How much was compared, and what could not be.

    Raises:
        ShardAssertionError: Something is not loaded, or not as it was saved; or nothing could be compared.
        MeshError: A mesh has more ranks than the job.
        ShardvizError: No process group is initialized, or several meshes are given with a model that is already built.

    Example:
        def save(model, optimizer, folder):
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)

        def load(model, optimizer, folder):
            weights, states = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optim": states}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

        @spmd(mesh={"fsdp": 2, "tp": 2})
        def test_a_checkpoint_survives_another_mesh(mesh):
            meshes = ["fsdp=2,tp=2", "fsdp=4,tp=1", "fsdp=1,tp=1"]
            assert_checkpoint_roundtrip(save, load, build, lambda m: AdamW(m.parameters()), meshes=meshes)

        A load that forgets `set_state_dict` for the optimizer fails with

            up.weight exp_avg: the optimizer has no such state after the load, on 4 of 4 ranks; ...
    """
    __tracebackhide__ = True
    refuse_without_group("mark the test with @spmd(mesh=...)")
    hops = _hops(meshes, model)
    done, run_id = RoundTrip(), agreed_run_id()
    with _folder(folder) as base:
        for number, (here, there) in enumerate(hops):
            trip = Trip(
                save, load, model, optimizer, set(of), dict(names or {}), base / f"trip-{number}", number, run_id
            )
            done += trip.run(here, there)
    refuse_unchecked(done, strict=strict, what="checkpoint")
    return done


def _hops(meshes: Sequence[AnyMesh], model: Any) -> list[tuple[AnyMesh, AnyMesh]]:
    hops = list(meshes)
    if not hops and (test_mesh := current_mesh.get()) is not None:
        hops = [test_mesh]
    if not hops:
        hops = [f"rank={distributed.get_world_size()}"]
    if len(hops) > 1 and isinstance(model, nn.Module):
        raise ShardvizError(
            f"a model that is already built is on one mesh, and {len(hops)} were given",
            "pass a function that builds it on a mesh: model=lambda mesh: parallelize(build(), mesh)",
        )
    return [(hops[0], hops[0])] if len(hops) == 1 else list(pairwise(hops))


@contextmanager
def _folder(folder: Path | str | None) -> Iterator[Path]:
    """Yield a folder that all ranks share; a temporary one is removed in any case."""
    if folder is not None:
        yield Path(folder)
        return
    temporary = mkdtemp(prefix="shardviz-trip-") if distributed.get_rank() == 0 else ""
    path = Path(of_all_ranks(temporary)[0])
    try:
        yield path
    finally:
        if temporary:
            shutil.rmtree(path, ignore_errors=True)


def refuse_unchecked(done: RoundTrip, *, strict: bool, what: str) -> None:
    """Fail if nothing was compared, or, if everything is asked for, not everything.

    Raises:
        ShardAssertionError: So it is.
    """
    __tracebackhide__ = True
    noted = "\n".join(f"  {one}" for one in done.not_checked)
    if not done.compared:
        raise ShardAssertionError(f"nothing of the {what} could be compared\n{noted}".rstrip())
    if strict and done.not_checked:
        raise ShardAssertionError(
            f"{counted(len(done.not_checked), 'thing')} could not be checked, and strict=True requires all\n{noted}\n"
            "  fix       make these checks possible, or leave out strict=True to allow them"
        )
