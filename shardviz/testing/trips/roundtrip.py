"""`assert_checkpoint_roundtrip`: saves on one mesh, loads on the next, and compares every element by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from shardviz.errors import ShardvizError
from shardviz.live.capture.agreement import agreed_run_id, of_all_ranks, refuse_without_group
from shardviz.testing.assertions import current
from shardviz.testing.assertions.message import ShardAssertionError
from shardviz.testing.trips.trip import ALL, RoundTrip, Trip, What
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from shardviz.testing.trips.worlds import AnyMesh

Transfer = Callable[[Any, Any, Path], Any]
"""Saves or loads: `(model, optimizer, folder)`. A load may return a new model, or a new model and optimizer."""


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
    """Assert that what is saved on one mesh is what is loaded on another, element by element. Every rank calls this.

    Parameters, persistent buffers, the optimizer's state, its steps and hyperparameters are filled with values that say
    where they belong, and saved. On the next mesh a new model is built and filled with other values, which must be gone
    after the load. What is on disk is compared too: a load that undoes the mistakes of its save hides both. Ties must
    last.

    Args:
        save: Called as `save(model, optimizer, folder)` on every rank of the first mesh, then of each but the last.
        load: Called as `load(model, optimizer, folder)` on every rank of the next mesh, with a model and an optimizer
            that are newly built. It loads in place, or returns the new model, or the new model and optimizer.
        model: Builds the sharded model, or this rank's stage of it, on a mesh. A model itself where one mesh is enough:
            it is saved, overwritten and loaded again.
        optimizer: Makes the optimizer of a model; or the model's own; or None.
        meshes: Two or more, as `{"fsdp": 2, "tp": 4}`, `"fsdp=2,tp=4"` or a `DeviceMesh`: saved on the first, loaded
            on the second, saved there again, loaded on the third. One that is smaller than the job uses its first
            ranks, and in it the world has that size. By default the test's, to which the checkpoint returns.
        of: What to compare: leave out "setting" if a new run sets its own hyperparameters, "disk" if the format is
            meant to differ, "optim" if only weights are loaded.
        names: The checkpoint's names by pattern over the model's, where an export renames: `{"*": "model.*"}`.
        folder: Where to save; the same on every rank and on storage that all reach. By default a new temporary folder.
        strict: Fail, too, where something could not be checked.

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
    known = list(meshes)
    if not known and (own := current.device_mesh.get()) is not None:
        known = [own]
    if not known:
        known = [f"rank={distributed.get_world_size()}"]
    if len(known) > 1 and isinstance(model, nn.Module):
        raise ShardvizError(
            f"a model that is already built is on one mesh, and {len(known)} were given",
            "pass a function that builds it on a mesh: model=lambda mesh: parallelize(build(), mesh)",
        )
    return [(known[0], known[0])] if len(known) == 1 else list(pairwise(known))


@contextmanager
def _folder(given: Path | str | None) -> Iterator[Path]:
    """Yield a folder that is the same on every rank; a temporary one is removed afterwards, whatever happened."""
    if given is not None:
        yield Path(given)
        return
    made = mkdtemp(prefix="shardviz-trip-") if distributed.get_rank() == 0 else ""
    path = Path(of_all_ranks(made)[0])
    try:
        yield path
    finally:
        if made:
            shutil.rmtree(path, ignore_errors=True)


def refuse_unchecked(done: RoundTrip, *, strict: bool, what: str) -> None:
    """Fail where nothing was compared, or, if everything is asked for, not everything.

    Raises:
        ShardAssertionError: So it is.
    """
    __tracebackhide__ = True
    noted = "\n".join(f"  {one}" for one in done.not_checked)
    if not done.compared:
        raise ShardAssertionError(f"nothing of the {what} could be compared\n{noted}".rstrip())
    if strict and done.not_checked:
        raise ShardAssertionError(
            f"{counted(len(done.not_checked), 'thing')} could not be checked, and strict=True asks for all\n{noted}\n"
            "  fix       make these checks possible, or leave out strict=True to allow them"
        )
