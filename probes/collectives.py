"""Every collective, once over the world and once along the mesh's last axis: what a rank has before, and after.

Rank r begins with a row of numbers r0 r1 r2 ..., so a number says who sent it and what it was to the sender. Each
collective's result is a module's output here, under its name: `shardviz show DUMP world.all_to_all`; `--comms` has the
bytes. What each of them does is written out in `definition`, and every result is compared with it.

    broadcast       all get the first rank's row                 all_gather      all get all rows
    reduce          the first rank gets the sum of rows          reduce_scatter  rank i gets number i of the sum
    all_reduce      all get the sum of rows                      all_to_all      rank i gets number i of every row
    scatter         rank i gets number i of the first's row      send, recv      each gets the row of the rank before it
    gather          the first rank gets all rows                 barrier         all wait until all have come
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.errors import ProbeError
from shardviz.mesh import Mesh

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


class Result(nn.Identity):
    """What a rank has; a module so that its output is captured."""


class Bench(nn.Module):
    """A place for what every collective gives, over the world and along the inner axis."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.before = Result()
        self.world = nn.ModuleDict({name: Result() for name in OPERATIONS})
        self.inner = nn.ModuleDict({name: Result() for name in OPERATIONS})


def check_mesh(mesh: Mesh) -> None:
    if mesh.size > MAX_RANKS:
        raise ProbeError(f"rows of two-digit numbers tell {MAX_RANKS} ranks apart, the mesh has {mesh.size}")


def build() -> nn.Module:
    return Bench()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave the model as it is: nothing of it is sharded."""


def batch() -> torch.Tensor:
    return 10 * torch.arange(MAX_RANKS).view(-1, 1) + torch.arange(MAX_RANKS) + 0.0


def loss(model: Bench, rows: torch.Tensor) -> torch.Tensor:
    return (model.scale * rows).mean()


def step(model: Bench, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    world = list(range(distributed.get_world_size()))
    model.before(rows[distributed.get_rank(), : len(world)])
    for results, group, ranks in (
        (model.world, distributed.group.WORLD, world),
        (model.inner, mesh.get_group("inner"), distributed.get_process_group_ranks(mesh.get_group("inner"))),
    ):
        before, me = rows[ranks, : len(ranks)], ranks.index(distributed.get_rank())
        for name in OPERATIONS:
            result = results[name](perform(name, before[me].clone(), ranks, me, group))
            assert torch.equal(result, definition(name, before, me)), (
                f"{name} over ranks {ranks} gave {result.tolist()}"
            )
        distributed.barrier(group)
    value = loss(model, rows)
    value.backward()
    return value


def perform(name: str, row: torch.Tensor, ranks: list[int], me: int, group: distributed.ProcessGroup) -> torch.Tensor:
    """Call torch's collective on this rank's row; return what the rank has then."""
    count, first = len(ranks), ranks[0]
    if name == "broadcast":
        distributed.broadcast(row, src=first, group=group)
    elif name == "reduce":
        distributed.reduce(row, dst=first, group=group)
        row = row if me == 0 else row.new_empty(0)  # what the others hold then is not defined
    elif name == "all_reduce":
        distributed.all_reduce(row, group=group)
    elif name == "scatter":
        own = row.new_empty(1)
        distributed.scatter(own, list(row.split(1)) if me == 0 else None, src=first, group=group)
        row = own
    elif name == "gather":
        rows = [torch.empty_like(row) for _ in ranks] if me == 0 else None
        distributed.gather(row, rows, dst=first, group=group)
        row = torch.stack(rows) if rows else row.new_empty(0)
    elif name == "all_gather":
        together = row.new_empty(count * count)
        distributed.all_gather_into_tensor(together, row, group=group)
        row = together.view(count, count)
    elif name == "reduce_scatter":
        own = row.new_empty(1)
        distributed.reduce_scatter_tensor(own, row, group=group)
        row = own
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


def definition(name: str, before: torch.Tensor, me: int) -> torch.Tensor:
    """Say what rank `me` of a group must have, from what all of them had: a row each."""
    of_the_first = me == 0
    return {
        "broadcast": before[0],
        "reduce": before.sum(0) if of_the_first else before.new_empty(0),
        "all_reduce": before.sum(0),
        "scatter": before[0, me : me + 1],
        "gather": before if of_the_first else before.new_empty(0),
        "all_gather": before,
        "reduce_scatter": before.sum(0)[me : me + 1],
        "all_to_all": before[:, me],
        "send_recv": before[me - 1],
    }[name]


if __name__ == "__main__":
    shardviz.run_probe(__file__)
