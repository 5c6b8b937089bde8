"""The audit's cases: every small shape and placement, smallest first, each also as a script. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal, get_args

from shardviz.layout.layout import Layout
from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Partial, Placement, Replicate, Shard, StridedShard, spell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.layout.region import Region


Operation = Literal["distribute", "gather", "redistribute", "fsdp_tp", "checkpoint", "function"]
Placements = tuple[Placement, ...]

FUNCTIONS = (
    *(f"F.{loss}(x, 0.3 * torch.ones_like(x))" for loss in ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss")),
    *(f"F.{loss}(x, 0.3 * torch.ones_like(x))" for loss in ("binary_cross_entropy", "soft_margin_loss", "kl_div")),
    *(f"F.{loss}(x, 0.3 * torch.ones_like(x))" for loss in ("binary_cross_entropy_with_logits", "poisson_nll_loss")),
    *(f"x.{name}()" for name in ("sum", "mean", "var", "std", "norm", "prod", "tril")),
    *(f"x.{name}(-1)" for name in ("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "logcumsumexp")),
    *(f"x.{name}(-1)" for name in ("sum", "mean", "var", "std", "amax", "amin", "prod")),
    *(f"x.{name}(0)" for name in ("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "mean", "var", "amax")),
    *(f"x.{call}" for call in ("sort(-1)[0]", "sort(0)[0]", "topk(2, -1)[0]", "flip(-1)", "flip(0)", "roll(1, -1)")),
    *(f"x.{call}" for call in ("view(-1)", "view(2, -1)", "view(3, -1)", "reshape(2, 3, -1)", "unflatten(1, (2, 3))")),
    *(
        f"x.{call}"
        for call in ("transpose(0, 1)", "permute(2, 0, 1)", "unsqueeze(0)", "repeat(2, 1, 1)", "chunk(2)[1]")
    ),
    *(f"x.{call}" for call in ("select(0, 1)", "narrow(0, 1, 2)", "norm(3)", "norm(1, -1)", "diff()")),
    *(f"x[{index}]" for index in ("1:", ":, 1:", "..., ::2", "..., [0, 2]", "[0, 3]", "None")),
    *(f"F.{call}" for call in ("layer_norm(x, x.shape[-1:])", "rms_norm(x, x.shape[-1:])", "normalize(x, dim=-1)")),
    *(f"F.{call}" for call in ("normalize(x, dim=0)", "pad(x, (1, 2))", "gelu(x)", "silu(x)", "softplus(x)")),
    *("torch.cat([x, x * x])", "torch.cat([x, x * x], -1)", "torch.stack([x, x * x], 1)", "x @ x.transpose(1, 2)"),
    *(
        "F.cosine_similarity(x, x.flip(0), dim=-1)",
        "torch.einsum('abc,adc->bd', x, x)",
        "torch.where(x > 0.5, x, x * x)",
    ),
)
"""Functions of a tensor `x` of three dims, in code, without those in whose backward ranks may hang, as `amax()`."""

SHAPES = ((4, 6, 4), (5, 6, 7))
"""Shapes that functions are tried on: even parts, and uneven ones."""


@dataclass(frozen=True)
class Case:
    """One operation to try, and its right result.

    Attributes:
        operation: What torch is asked to do.
        mesh: On which mesh; its ranks may be permuted.
        shape: The global shape.
        source: How the tensor lies before.
        target: How it must lie after.
        flattened: The mesh's axes are also flattened into one, over which torch may then merge collectives.
        function: A function of the tensor, in code.
    """

    operation: Operation
    mesh: Mesh
    shape: tuple[int, ...]
    source: Placements
    target: Placements
    flattened: bool = False
    function: str = ""

    def layout(self, placements: Placements) -> Layout:
        """Return the oracle's reading of placements on this case's mesh and shape."""
        return Layout.from_placements(self.mesh, self.shape, placements)

    def wanted(self, rank: int) -> Region:
        """Return the region that a rank must hold after the operation."""
        return self.wanted_layout.region_of_rank(rank)

    def wanted_ids(self, rank: int) -> list[int]:
        """Return the ids that a rank must hold after the operation, in memory order."""
        return self.ids(self.wanted(rank))

    def ids(self, region: Region) -> list[int]:
        """Return the ids of a region; they count from 1, so that padding is none of them."""
        ids: list[int] = (region.flat_ids(self.shape) + 1).ravel().tolist()
        return ids

    def start(self, rank: int) -> list[int]:
        """Return a rank's first values in memory order: ids, or its share of a pending sum."""
        share = self.share(rank)
        return [share * number for number in self.ids(self.layout(self.source).region_of_rank(rank))]

    def share(self, rank: int) -> int:
        """Return the factor of a rank's ids if a sum is pending: a different one on every rank.

        The shares of ranks that are summed give 1, so that a rank left out, counted twice or taken for another shows.
        """
        coord, index, count = self.mesh.coord_of(rank), 0, 1
        for at, placement in enumerate(self.source):
            if isinstance(placement, Partial):
                index, count = index * self.mesh.shape[at] + coord[at], count * self.mesh.shape[at]
        return index + 1 if index else 1 - sum(range(2, count + 1))

    @property
    def wanted_layout(self) -> Layout:
        """The layout that must come of it."""
        if self.operation == "gather":
            return Layout.replicated(self.mesh, self.shape)
        return self.layout(self.target)

    @property
    def family(self) -> tuple[object, ...]:
        """What one kind of disagreement shares: all but sizes; on a permuted mesh, the operation; else the function."""
        if self.function:
            return self.operation, self.function
        if is_permuted(self.mesh):
            return self.operation, "permuted"
        return self.operation, self.flattened, spell(self.source), spell(self.target)

    @property
    def weight(self) -> tuple[int, int, tuple[int, ...]]:
        """Sorts smaller and plainer cases first."""
        return math.prod(self.shape), sum(self.shape), self.shape

    def __str__(self) -> str:
        before, after = spell(self.source), spell(self.target)
        if self.function:
            return f"{self.function} with x {list(self.shape)} on {self.mesh}: {before}"
        arrow = f"{before} -> {after}" if self.operation in ("redistribute", "checkpoint") else after
        flat = " with its axes flattened" if self.flattened else ""
        ranks = f" of ranks {list(self.mesh.ranks)}" if is_permuted(self.mesh) else ""
        return f"{self.operation} {list(self.shape)} on {self.mesh}{ranks}{flat}: {arrow}"


def all_cases(mesh: Mesh, max_size: int) -> list[Case]:
    """Return every case, the smallest of each operation first."""
    reversed_mesh = Mesh(mesh.axes, mesh.shape, tuple(reversed(mesh.ranks)))
    cases: list[Case] = []
    for shape in shapes(max_size):
        for on in (mesh, reversed_mesh) if mesh.size > 1 else (mesh,):
            cases += _cases_of_shape(on, shape)
    cases += cases_of_functions(mesh)
    return sorted(cases, key=lambda case: (get_args(Operation).index(case.operation), case.weight))


def cases_of_functions(mesh: Mesh) -> list[Case]:
    """Return every function of a tensor that one axis of all ranks splits."""
    line = Mesh(mesh.axes[-1:], (mesh.size,))
    return [
        Case("function", line, shape, (Shard(dim),), (Shard(dim),), function=function)
        for shape, dim, function in product(SHAPES, range(3), FUNCTIONS)
    ]


def shapes(max_size: int) -> Iterator[tuple[int, ...]]:
    """Yield vectors of up to `max_size` elements, and matrices of up to half as many a side."""
    for size in range(1, max_size + 1):
        yield (size,)
    side = max(2, max_size // 2)
    yield from product(range(1, side + 1), repeat=2)


def is_permuted(mesh: Mesh) -> bool:
    """Whether the mesh's ranks do not rise."""
    return mesh.ranks != tuple(sorted(mesh.ranks))


def _cases_of_shape(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[Case]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    plain: list[Placements] = list(product(kinds, repeat=mesh.ndim))
    strided = list(_strided(mesh, len(shape)))
    summed = [placements for placements in product([*kinds, Partial()], repeat=mesh.ndim) if Partial() in placements]
    is_flattened = [False, True] if mesh.ndim > 1 and not is_permuted(mesh) else [False]
    for placements in plain:
        yield Case("distribute", mesh, shape, placements, placements)
    for placements, flat in product([*plain, *strided, *summed], is_flattened):
        yield Case("gather", mesh, shape, placements, placements, flattened=flat)
    for source, target, flat in product([*plain, *strided, *summed], plain, is_flattened):
        if source != target:
            yield Case("redistribute", mesh, shape, source, target, flattened=flat)
    if is_permuted(mesh):
        return
    if mesh.ndim >= 2 and len(shape) == 2:
        for placements in _fsdp_tp(mesh):
            yield Case("fsdp_tp", mesh, shape, placements, placements)
    if len(shape) == 1:
        for source, target in product([*plain, *strided], [*plain, *strided]):
            yield Case("checkpoint", mesh, shape, source, target)


def _strided(mesh: Mesh, ndim: int) -> Iterator[Placements]:
    """Yield FSDP2's placements over one later axis: a dim split by an inner axis first."""
    for dim in range(ndim):
        for outer in range(mesh.ndim - 1):
            for inner in range(outer + 1, mesh.ndim):
                placements: list[Placement] = [Replicate()] * mesh.ndim
                placements[outer] = StridedShard(dim, mesh.shape[inner])
                placements[inner] = Shard(dim)
                if mesh.shape[inner] > 1:
                    yield tuple(placements)


def _fsdp_tp(mesh: Mesh) -> Iterator[Placements]:
    """Yield the placements of `fully_shard` over column- and row-wise tensor parallel."""
    tp = mesh.shape[-1]
    copies = (Replicate(),) * (mesh.ndim - 2)
    column: Placement = StridedShard(0, tp) if tp > 1 else Shard(0)
    yield (*copies, column, Shard(0))
    yield (*copies, Shard(0), Shard(1))


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
    """Return a script that shows a case."""
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
        wanted={rank: case.ids(region) for rank, region in sorted(case.wanted_layout.regions())},
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
        return [
            sharded,
            'checkpoint.save({"w": tensor}, checkpoint_id=f"{folder}/checkpoint")',
            f"loaded = distribute_tensor(torch.full_like(whole, -1), mesh, {target})",
            'checkpoint.load({"w": loaded}, checkpoint_id=f"{folder}/checkpoint")',
            "got = loaded.to_local()",
        ]
    return _fsdp_body(case)


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
