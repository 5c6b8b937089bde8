"""A rank's own part of a weight is what torch makes of it, though a plan makes no other rank's."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from itertools import product
from typing import Any

import pytest
from torch.distributed.tensor import Shard, distribute_tensor

from shardviz.live.compat.fakes import fake_mode
from shardviz.live.compat.worlds import fake_world, split_alike
from shardviz.live.plan.forks import ask
from tests.lanes import at_night

SPLITS = [
    ((12, 4), 0, 4),
    ((12, 4), 1, 4),
    ((7, 5), 0, 4),
    ((7, 5), 1, 3),
    ((3, 2), 0, 8),
    ((0, 2), 0, 2),
    ((5,), -1, 2),
]
"""Shapes, the dim that is split and over how many ranks: even, uneven, with empty parts, with nothing to split."""


@pytest.mark.parametrize(("shape", "dim", "size"), [*SPLITS[1:5:2], SPLITS[4], *at_night([*SPLITS[:4:2], *SPLITS[5:]])])
def test_dtensor_gives_every_rank_the_same_part(shape: tuple[int, ...], dim: int, size: int) -> None:
    def parts(rank: int) -> dict[str, list[object]]:
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        found: dict[str, list[object]] = {"meta": [], "fakes": [], "values": []}
        with fake_world(rank, size):
            mesh = init_device_mesh("cpu", (size,))
            for on, how in product(found, (nullcontext, split_alike)):
                with torch.device("meta" if on == "meta" else "cpu"), fake_mode() if on == "fakes" else nullcontext():
                    whole = torch.ones(shape)
                    with how():
                        local = distribute_tensor(whole, mesh, [Shard(dim)]).to_local()
                about = (local.shape, local.stride(), local.dtype, str(local.device), local.requires_grad)
                found[on].append(about)
        return found

    for rank, found in ask(range(size), parts).items():
        for on, (plain, alike) in found.items():
            assert plain == alike, (rank, on)


def test_only_tensors_without_values_are_split_alike() -> None:
    def sent(_: int) -> tuple[list[float], bool]:
        import torch

        split: Any = Shard(0)
        with fake_world(0, 2), split_alike():
            with_values, _pads = split._split_tensor(torch.arange(4.0), 2, with_padding=True, contiguous=True)
            without, _pads = split._split_tensor(torch.empty(4, device="meta"), 2, with_padding=True, contiguous=True)
        return [float(one[0]) for one in with_values], without[0] is without[1]

    assert ask([0], sent)[0] == ([0.0, 2.0], True)


@pytest.mark.parametrize(("shape", "dim", "size"), [one for one in SPLITS if one[1] >= 0])
def test_fsdp_gets_the_parts_that_it_would_make_of_all(shape: tuple[int, ...], dim: int, size: int) -> None:
    def parts(_: int) -> bool:
        import torch

        params: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
        whole = torch.rand(shape)
        torchs = params._chunk_with_empty(whole, size, dim=dim)
        with fake_world(0, size):
            own = params._chunk_with_empty(whole, size, dim=dim)
            return own is not torchs and all(
                one.shape == part.shape and one.stride() == part.stride() and one.equal(part)
                for one, part in zip([*torchs, torchs[-1]], [*own, own[-1]], strict=True)
            )

    assert ask([0], parts)[0]


def test_fsdp_shards_over_as_many_ranks_as_one_likes() -> None:
    def work(_: int) -> tuple[int, int]:
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with fake_world(99_999, 100_000), torch.device("meta"):
            model = nn.Linear(64, 64)
            fully_shard(model, mesh=init_device_mesh("cpu", (100_000,), mesh_dim_names=("fsdp",)))
            weight: Any = model.weight
            return weight.to_local().numel(), len(weight.shape)

    assert ask([0], work)[0] == (0, 2)
