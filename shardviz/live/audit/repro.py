"""A case as a script of a few lines of plain torch that ends in an assertion. No torch here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.layout.placements import spell

if TYPE_CHECKING:
    from shardviz.live.audit.cases import Case

_FRAME = '''"""{what}.

Run it with: python {name}
"""

import tempfile

import torch
import torch.multiprocessing as mp
from torch import distributed
{imports}

WANTED = {wanted}  # what each rank must hold, in memory order


def main(rank, folder):
    # Ranks meet at a file: a port may be taken by another job on this machine.
    distributed.init_process_group("gloo", init_method=f"file://{{folder}}/ranks", rank=rank, world_size={size})
    mesh = DeviceMesh("cpu", torch.tensor({ranks}).reshape({shape}), mesh_dim_names={axes})
{flatten}    whole = torch.arange(1.0, {end}.0).reshape({global_shape})
{body}
    line = f"rank {{rank}}: wanted {{WANTED[rank]}}, got {{got.flatten().int().tolist()}}\\n"
    print(line, end="", flush=True)  # in one write: ranks share the terminal
    wrong = torch.tensor(got.flatten().tolist() != WANTED[rank], dtype=torch.int)
    distributed.all_reduce(wrong)
    distributed.destroy_process_group()
    assert not wrong, f"{{int(wrong)}} of {size} ranks do not hold what the placements claim"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder,), nprocs={size})
'''

_FUNCTION_FRAME = '''"""{what}.

Run it with: python {name}
"""

import tempfile

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: F401
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def results(x, upstream):
    x = x.detach().requires_grad_()
    made = {function}
    if isinstance(made, DTensor):
        upstream = distribute_tensor(upstream, made.device_mesh, [Replicate()])
    (gradient,) = torch.autograd.grad(made, x, upstream)
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in (made.detach(), gradient)]


def main(rank, folder):
    distributed.init_process_group("gloo", init_method=f"file://{{folder}}/ranks", rank=rank, world_size={size})
    mesh = init_device_mesh("cpu", ({size},))
    torch.manual_seed(0)
    x = torch.rand({shape}, dtype=torch.float64)
    with torch.no_grad():
        upstream = torch.rand_like({function})
    pairs = list(zip(results(x, upstream), results(distribute_tensor(x, mesh, {placements}), upstream)))
    right = [torch.allclose(wanted, got) for wanted, got in pairs]
    print(f"rank {{rank}}: result is right: {{right[0]}}, gradient is right: {{right[1]}}\\n", end="", flush=True)
    distributed.destroy_process_group()
    assert all(right), "a function of a DTensor is not that of the whole tensor"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder,), nprocs={size})
'''

_TENSOR_IMPORTS = """from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: F401
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: F401"""

_FSDP_IMPORTS = """from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: F401"""

_CHECKPOINT_IMPORTS = "from torch.distributed import checkpoint\n" + _TENSOR_IMPORTS

_SHARDED = "DTensor.from_local({local}, mesh, {placements}, shape=whole.shape, stride=whole.stride())"
_OWN = "torch.tensor(HELD[rank], dtype=whole.dtype).reshape(SHAPES[rank])"


def repro(case: Case, name: str) -> str:
    """Return a script that shows a case.

    Args:
        case: What went wrong.
        name: The file's name, for its own docstring.
    """
    if case.function:
        return _FUNCTION_FRAME.format(
            what=str(case),
            name=name,
            function=case.function,
            size=case.mesh.size,
            shape=case.shape,
            placements=spell(case.source),
        )
    imports = {"fsdp_tp": _FSDP_IMPORTS, "checkpoint": _CHECKPOINT_IMPORTS}.get(case.operation, _TENSOR_IMPORTS)
    text = _FRAME.format(
        what=str(case),
        name=name,
        imports=imports,
        wanted=_ids_by_rank(case, case.wanted_layout.placements() or ()),
        size=case.mesh.size,
        ranks=list(case.mesh.ranks),
        shape=case.mesh.shape,
        axes=case.mesh.axes,
        flatten="    mesh._flatten()\n" if case.flattened else "",
        end=math.prod(case.shape) + 1,
        global_shape=case.shape,
        body="\n".join(f"    {line}" for line in _body(case)),
    )
    return text if "HELD[" not in text else text.replace("\n\n\ndef main", f"\n{_source(case)}\n\n\ndef main", 1)


def _ids_by_rank(case: Case, placements: tuple[object, ...]) -> dict[int, list[int]]:
    layout = case.layout(placements)  # type: ignore[arg-type]
    return {rank: case.ids(region) for rank, region in sorted(layout.regions())}


def _source(case: Case) -> str:
    """Spell out what each rank starts with, so that the script relies on no other part of torch."""
    shapes = {rank: region.shape for rank, region in sorted(case.layout(case.source).regions())}
    held = {rank: case.start(rank) for rank in sorted(case.mesh.ranks)}
    return f"HELD = {held}  # what each rank starts with\nSHAPES = {shapes}"


def _body(case: Case) -> list[str]:
    source, target = spell(case.source), spell(case.target)
    sharded = f"tensor = {_SHARDED.format(local=_OWN, placements=source)}"
    if case.operation == "distribute":
        return [f"got = distribute_tensor(whole, mesh, {target}).to_local()"]
    if case.operation == "gather":
        return [sharded, "got = tensor.full_tensor()"]
    if case.operation == "redistribute":
        return [sharded, f"got = tensor.redistribute(placements={target}).to_local()"]
    if case.operation == "checkpoint":
        return _checkpoint_body(sharded, target)
    return _fsdp_body(case)


def _checkpoint_body(sharded: str, target: str) -> list[str]:
    return [
        sharded,
        'checkpoint.save({"w": tensor}, checkpoint_id=f"{folder}/checkpoint")',
        f"loaded = distribute_tensor(torch.full_like(whole, -1), mesh, {target})",
        'checkpoint.load({"w": loaded}, checkpoint_id=f"{folder}/checkpoint")',
        "got = loaded.to_local()",
    ]


def _fsdp_body(case: Case) -> list[str]:
    style = "ColwiseParallel" if str(case.target[-1]) == "Shard(0)" else "RowwiseParallel"
    rows, columns = case.shape
    return [
        f"linear = torch.nn.Linear({columns}, {rows}, bias=False)",
        "linear.weight.data.copy_(whole)",
        "model = torch.nn.Sequential(linear)",
        f'parallelize_module(model, mesh["{case.mesh.axes[-1]}"], {{"0": {style}()}})',
        f"fully_shard(model, mesh=mesh[{case.mesh.axes[:-1]}])",
        "got = linear.weight.to_local().detach()",
    ]
