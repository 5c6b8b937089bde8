"""The sweep: every case, by an operation of torch that returns the ids which each rank then holds.

Where torch gets sizes wrong, gloo aborts the whole process. So each rank notes which case it is in before it begins;
when a world dies the case it died in is a finding, and the next world goes on after it.

Whatever the placements are, a function of a DTensor returns what it returns of the whole tensor, and so does its
backward. Functions that torch refuses, because it has no rule for them, are none of the audit's business.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from shardviz.errors import RankError
from shardviz.groups import in_groups
from shardviz.layout.placements import Partial, Placement, Shard
from shardviz.live import world as worlds
from shardviz.live.audit.cases import Case, all_cases
from shardviz.live.compat.meshes import flatten_mesh, quiet_redistribution, torch_placement, whole_of
from shardviz.relate.tolerance import EXACT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardviz.layout.mesh import Mesh
    from shardviz.live.world import World


TASK = "shardviz.live.audit.sweep:run_cases"
MAX_DEATHS = 64
"""Worlds that may die before the sweep gives up: each costs a start."""

Seen = dict[int, list[int] | str]
"""A rank's results of the cases that went wrong there: ids in memory order, or the error."""


@dataclass(frozen=True)
class Disagreement:
    """A class of cases in which torch and the oracle differ.

    Attributes:
        case: The smallest of them.
        count: How many cases of the class were tried and went wrong.
        got: What each rank had that had something else than wanted: ids in memory order, or the error.
    """

    case: Case
    count: int
    got: dict[int, list[int] | str]


@dataclass(frozen=True)
class Audit:
    """The result of a sweep.

    Attributes:
        disagreements: One a class, most cases first; functions last.
        not_tried: Cases left out after too many worlds died.
    """

    num_cases: int
    num_wrong: int
    disagreements: list[Disagreement]
    not_tried: int = 0


def audit(mesh: Mesh, max_size: int, *, on_progress: Callable[[int, int], None] | None = None) -> Audit:
    """Try every case on this machine's torch.

    Args:
        max_size: The longest vector.
        on_progress: Called with the number of cases done and the number of all, whenever a world ends.
    """
    cases = all_cases(mesh, max_size)
    wrong: dict[int, dict[int, list[int] | str]] = {}
    start = deaths = 0
    while start < len(cases) and deaths < MAX_DEATHS:
        seen_by_rank, stopped, why = _run_world(mesh, max_size, start, len(cases))
        for rank, of_rank in enumerate(seen_by_rank):
            for index, got in of_rank.items():
                wrong.setdefault(index, {})[rank] = got
        if why:
            wrong[stopped] = {0: why}
            deaths += 1
        start = stopped + 1
        if on_progress:
            on_progress(min(start, len(cases)), len(cases))
    return Audit(min(start, len(cases)), len(wrong), _classes(cases, wrong), max(len(cases) - start, 0))


def _run_world(mesh: Mesh, max_size: int, start: int, end: int) -> tuple[list[Seen], int, str]:
    """Run cases to the end or a death; return ranks' results, the last case begun and the cause."""
    with tempfile.TemporaryDirectory(prefix="shardviz-audit-") as folder:
        try:
            worlds.launch(TASK, (mesh, max_size, start, folder), num_ranks=mesh.size, timeout=600)
        except RankError as error:
            logs = [_read_log(folder, rank) for rank in range(mesh.size)]
            return [seen for seen, _ in logs], max(begun for _, begun in logs), _cause_of_death(error)
        return [_read_log(folder, rank)[0] for rank in range(mesh.size)], end, ""


def _cause_of_death(error: RankError) -> str:
    """Return the line that says why a world died: the one from gloo, or else the first."""
    lines = [line.strip() for line in str(error).splitlines() if "what():" in line]
    return lines[0] if lines else error.message.partition("\n")[0]


def _read_log(folder: str, rank: int) -> tuple[Seen, int]:
    """Read a rank's log: a line for every case begun, and one for each that went wrong."""
    ids_by_case: Seen = {}
    begun = 0
    for line in (Path(folder) / f"{rank}.log").read_text().splitlines():
        begun, *got = json.loads(line)
        if got:
            ids_by_case[begun] = got[0]
    return ids_by_case, begun


def run_cases(world: World, mesh: Mesh, max_size: int, start: int, folder: str) -> None:
    """Try the cases from `start` on, on this rank, and log them."""
    meshes: Meshes = {}
    with (Path(folder) / f"{world.rank}.log").open("w", buffering=1) as log:
        for index, case in enumerate(all_cases(mesh, max_size)[start:], start):
            print(json.dumps([index]), file=log)
            if case.function:
                if text := difference(case, _mesh_of(case, meshes), _as_torch(case.source)):
                    print(json.dumps([index, text]), file=log)
                continue
            try:
                local = perform(case, meshes)
            except Exception as error:
                line = str(error).strip().partition("\n")[0]
                print(json.dumps([index, f"{type(error).__name__}: {line}"]), file=log)
                continue
            ids = [int(value) for value in local.flatten().tolist()]
            if not _is_right(case, world.rank, tuple(local.shape), ids):
                print(json.dumps([index, ids]), file=log)


def _is_right(case: Case, rank: int, shape: tuple[int, ...], ids: list[int]) -> bool:
    """Whether a rank has the right ids; an empty shard only has to be empty."""
    expected = case.wanted(rank)
    if not expected.size:
        return not ids
    return shape == expected.shape and ids == case.ids(expected)


def _classes(cases: list[Case], wrong: dict[int, dict[int, list[int] | str]]) -> list[Disagreement]:
    families = in_groups((cases[index].family, index) for index in sorted(wrong))
    disagreements = [Disagreement(cases[of[0]], len(of), wrong[of[0]]) for of in families.values()]
    return sorted(disagreements, key=lambda disagreement: (bool(disagreement.case.function), -disagreement.count))


Meshes = dict[object, DeviceMesh]


def perform(case: Case, meshes: Meshes) -> torch.Tensor:
    """Run a case and return this rank's part of the result.

    Args:
        meshes: Device meshes made so far, by the mesh they are of: process groups are dear.
    """
    with torch.no_grad(), quiet_redistribution():
        result: torch.Tensor = _OPERATIONS[case.operation](case, _mesh_of(case, meshes))
        return result


def _mesh_of(case: Case, meshes: Meshes) -> DeviceMesh:
    key = case.mesh, case.flattened
    if key not in meshes:
        grid = torch.tensor(case.mesh.ranks).reshape(case.mesh.shape)
        meshes[key] = DeviceMesh("cpu", grid, mesh_dim_names=case.mesh.axes)
        if case.flattened:
            flatten_mesh(meshes[key])
    return meshes[key]


def whole(case: Case) -> torch.Tensor:
    """Return the tensor whose every element is its own id, from 1."""
    return torch.arange(1, torch.Size(case.shape).numel() + 1, dtype=torch.float32).view(case.shape)


def sharded(case: Case, mesh: DeviceMesh, placements: Sequence[Placement], values: torch.Tensor) -> Any:
    """Return a DTensor whose shards the oracle cuts, or a share of them if a sum is pending."""
    region = case.layout(tuple(placements)).region_of_rank(distributed.get_rank())
    local = values.flatten()[torch.from_numpy(region.flat_ids(case.shape))]
    if any(isinstance(placement, Partial) for placement in placements):
        local = local * case.share(distributed.get_rank())
    return DTensor.from_local(
        local, mesh, _as_torch(placements), shape=values.shape, stride=values.stride(), run_check=False
    )


def _as_torch(placements: Sequence[Placement]) -> list[Any]:
    return [torch_placement(placement) for placement in placements]


def _fsdp_tp(case: Case, mesh: DeviceMesh) -> Any:
    rows, columns = case.shape
    linear = nn.Linear(columns, rows, bias=False)
    linear.weight.copy_(whole(case))
    model = nn.Sequential(linear)
    column_wise = case.target[-1] == Shard(0)
    names = mesh.mesh_dim_names
    assert names is not None
    parallelize_module(model, mesh[names[-1]], {"0": ColwiseParallel() if column_wise else RowwiseParallel()})
    fully_shard(model, mesh=mesh[names[:-1]])
    weight: Any = linear.weight
    return weight.to_local()


def _checkpoint(case: Case, mesh: DeviceMesh) -> Any:
    """Save under one layout and load under another."""
    path = [tempfile.mkdtemp(prefix="shardviz-audit-") if distributed.get_rank() == 0 else ""]
    distributed.broadcast_object_list(path)
    try:
        save({"w": sharded(case, mesh, case.source, whole(case))}, checkpoint_id=path[0])
        empty = sharded(case, mesh, case.target, torch.full(case.shape, -1.0))
        load({"w": empty}, checkpoint_id=path[0])
        return empty.to_local()
    finally:
        distributed.barrier()
        if distributed.get_rank() == 0:
            shutil.rmtree(Path(path[0]))


_OPERATIONS: dict[str, Callable[[Case, DeviceMesh], Any]] = {
    "distribute": lambda case, mesh: distribute_tensor(whole(case), mesh, _as_torch(case.target)).to_local(),
    "gather": lambda case, mesh: sharded(case, mesh, case.source, whole(case)).full_tensor(),
    "redistribute": lambda case, mesh: (
        sharded(case, mesh, case.source, whole(case)).redistribute(placements=_as_torch(case.target)).to_local()
    ),
    "fsdp_tp": _fsdp_tp,
    "checkpoint": _checkpoint,
}


def difference(case: Case, mesh: DeviceMesh, placements: Sequence[Any]) -> str:
    """Return how a function's result or gradient differs from that of the whole; empty if neither does."""
    whole = tensor_of(case.shape)
    wanted, upstream, wanted_gradient = _results(case.function, whole, None)
    sharded = distribute_tensor(whole, mesh, placements)
    try:
        result, _, gradient = _results(case.function, sharded, upstream)
    except (RuntimeError, NotImplementedError, AssertionError):
        return ""
    if not _is_equal(result, wanted):
        return "its result is not that of the whole tensor"
    if _is_equal(gradient, wanted_gradient):
        return ""
    is_alike = gradient.shape == wanted_gradient.shape
    times = (gradient.abs().max() / wanted_gradient.abs().max()).item() if is_alike else 0.0
    is_multiple = bool(times) and _is_equal(gradient, times * wanted_gradient)
    return f"its gradient is {f'{times:.5g} times' if is_multiple else 'not'} that of the whole tensor"


def tensor_of(shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor that functions are tried on: numbers between 0 and 1, no two of them equal."""
    return torch.rand(tuple(shape), dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _results(
    function: str, tensor: torch.Tensor, upstream: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a function's result, the gradient that it is given, and that which comes back."""
    with torch.enable_grad():
        given = tensor.detach().requires_grad_()
        made = eval(function, {"torch": torch, "F": functional}, {"x": given})
        if upstream is None:
            upstream = tensor_of(made.shape)
        back = upstream
        if isinstance(made, DTensor):
            back = distribute_tensor(upstream, made.device_mesh, [Replicate()] * made.device_mesh.ndim)
        (gradient,) = torch.autograd.grad(made, given, back)
    return whole_of(made).detach(), upstream, whole_of(gradient).detach()


def _is_equal(tensor: torch.Tensor, wanted: torch.Tensor) -> bool:
    return tensor.shape == wanted.shape and torch.allclose(tensor, wanted, rtol=EXACT, atol=EXACT)
