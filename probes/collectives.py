"""Every collective, once over the world and once along the mesh's last axis: what each rank has before it and after.

Rank r begins with a row of numbers r0 r1 r2 ..., as many as its group has ranks, so each number shows which rank sent
it and its place in that rank's row. In a group of n ranks, rank i ends up with:

    broadcast       the first rank's row                    all_gather      all n rows
    reduce          the sum of the rows, if it is the first reduce_scatter  number i of the sum of the rows
    all_reduce      the sum of the rows                     all_to_all      number i of every row
    scatter         number i of the first rank's row        send_recv       the row of rank i - 1, as in a ring
    gather          all n rows, if it is the first          barrier         the row it had, once all ranks have arrived

The first rank is the root here, but any rank may be. Each collective runs in a module of its own, and the numbers after
it are checked against the numbers before it. `shardviz view DUMP` shows the two side by side among the step's
collectives; `shardviz show DUMP --comms` shows the bytes.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.errors import ProbeError
from shardviz.layout.mesh import Mesh

AXES = ("outer", "inner")
MESH = (2, 2)

MAX_RANKS = 10

OPERATIONS = (
    "broadcast",
    "reduce",
    "all_reduce",
    "scatter",
    "gather",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
)

Group = distributed.ProcessGroup | None


class Collective(nn.Module):
    """One collective, in a module so that its input and output are captured."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.before = nn.Identity()

    def forward(self, row: torch.Tensor, group: Group) -> torch.Tensor:
        return perform(self.name, self.before(row), group)


class Bench(nn.Module):
    """Every collective, over the world and along the inner axis."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.world = nn.ModuleDict({name: Collective(name) for name in OPERATIONS})
        self.inner = nn.ModuleDict({name: Collective(name) for name in OPERATIONS})

    def forward(self, row: torch.Tensor, groups: dict[str, Group]) -> None:
        for place, group in groups.items():
            numbers = row[: distributed.get_world_size(group)]
            for collective in self.get_submodule(place).values():
                collective(numbers.clone(), group)
            distributed.barrier(group)


def check_mesh(mesh: Mesh) -> None:
    if mesh.size > MAX_RANKS:
        raise ProbeError(
            f"rows of two-digit numbers distinguish {MAX_RANKS} ranks, but the mesh has {mesh.size}",
            f"use at most {MAX_RANKS} ranks",
        )


def build() -> nn.Module:
    return Bench()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave the model as it is: nothing in it is sharded."""


def batch() -> torch.Tensor:
    """Return a row of numbers for every possible rank; each rank has all the rows and begins with its own."""
    return 10 * torch.arange(MAX_RANKS).view(-1, 1) + torch.arange(MAX_RANKS) + 0.0


def loss(model: Bench, rows: torch.Tensor) -> torch.Tensor:
    return (model.scale * rows).mean()


def groups_of(mesh: DeviceMesh) -> dict[str, Group]:
    return {"world": distributed.group.WORLD, "inner": mesh.get_group("inner")}


def step(model: Bench, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    model(rows[distributed.get_rank()], groups_of(mesh))
    value = loss(model, rows)
    value.backward()
    return value


def collective_calls(model: Bench, mesh: DeviceMesh) -> dict[str, tuple[str, list[int]]]:
    """Name the collective and the ranks of every module, so that shardviz can check each result."""
    ranks = {place: distributed.get_process_group_ranks(group) for place, group in groups_of(mesh).items()}
    return {f"{place}.{name}": (name, ranks[place]) for place in ranks for name in OPERATIONS}


def perform(name: str, row: torch.Tensor, group: Group) -> torch.Tensor:
    """Call torch's collective on this rank's row and return its result."""
    ranks = distributed.get_process_group_ranks(group)
    count, first, me = len(ranks), ranks[0], distributed.get_rank(group)
    if name == "broadcast":
        distributed.broadcast(row, src=first, group=group)
    elif name == "reduce":
        distributed.reduce(row, dst=first, group=group)
        row = row if me == 0 else row.new_empty(0)  # the result on the other ranks is not defined
    elif name == "all_reduce":
        distributed.all_reduce(row, group=group)
    elif name == "scatter":
        result_row = row.new_empty(1)
        distributed.scatter(result_row, list(row.split(1)) if me == 0 else None, src=first, group=group)
        row = result_row
    elif name == "gather":
        rows = [torch.empty_like(row) for _ in ranks] if me == 0 else None
        distributed.gather(row, rows, dst=first, group=group)
        row = torch.stack(rows) if rows else row.new_empty(0)
    elif name == "all_gather":
        together = row.new_empty(count * count)
        distributed.all_gather_into_tensor(together, row, group=group)
        row = together.view(count, count)
    elif name == "reduce_scatter":
        result_row = row.new_empty(1)
        distributed.reduce_scatter_tensor(result_row, row, group=group)
        row = result_row
    elif name == "all_to_all":
        column = torch.empty_like(row)
        distributed.all_to_all_single(column, row, group=group)
        row = column
    elif count > 1:
        received = torch.empty_like(row)
        sending = distributed.isend(row, ranks[(me + 1) % count], group=group)
        distributed.recv(received, ranks[me - 1], group=group)
        if sending is not None:
            sending.wait()
        row = received
    return row


if __name__ == "__main__":
    shardviz.run_probe(__file__)
