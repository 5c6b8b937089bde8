"""Trainer to engine: every fault is named with its tensor, its rank and its rows, and right transfers stay quiet."""

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import Shard, distribute_tensor

from shardviz.errors import ShardvizError
from shardviz.testing import ShardAssertionError, assert_transferred, spmd
from shardviz.text import join_numbers
from tests.lanes import nightly
from tests.testing.trips.transfers import FAULTS, drawn, sync

DAILY, NIGHTLY = 6, 200


def text_of(pair, fault="", seed=0):
    """Return the report of an assertion, empty where it passes; the same on every rank."""
    try:
        options = {"map": pair.map, "layouts": pair.layouts, "mesh": pair.mesh}
        assert_transferred(pair.source, pair.target, sync(pair, fault, seed), **options)
    except ShardAssertionError as error:
        return str(error)
    return ""


def fault_of(pair, seed):
    """Return a fault that this pair can have: another one for each seed."""
    from tests.testing.trips.transfers import _can

    possible = [one for one in FAULTS if any(_can(pair, one, name) for name in pair.made)]
    return possible[seed % len(possible)]


def assert_placed(pair, text, what):
    """The report of every rank names the tensor, the rank and the rows."""
    known = [None] * distributed.get_world_size()
    distributed.all_gather_object(known, pair.wrong)
    wrong = next(filter(None, known))
    assert wrong["rows"], (what, "the fault changed nothing")
    assert text.startswith(wrong["name"]), (what, wrong, text)
    for rows in wrong["rows"].values():
        assert f"rank {wrong['rank']} rows {join_numbers(rows)}" in text, (what, wrong, text)
    assert all(f"rank {rank} rows" not in text for rank in range(len(known)) if rank != wrong["rank"]), (what, text)


def check_faults(count, first):
    for seed in range(first, first + count):
        pair = drawn(seed)
        fault = fault_of(pair, seed)
        assert_placed(pair, text_of(pair, fault, seed), (seed, fault))


def check_healthy(count, first):
    for seed in range(first, first + count):
        assert not (text := text_of(drawn(seed))), (seed, text)


@spmd(mesh={"rank": 4}, timeout=240)
def test_a_fault_in_a_sync_is_named_with_its_tensor_its_rank_and_its_rows(mesh):
    check_faults(DAILY, 1000)


@spmd(mesh={"rank": 4}, timeout=240)
def test_a_right_sync_is_quiet_whatever_the_meshes_names_and_fusions(mesh):
    check_healthy(DAILY // 2, 1000)


@nightly
@spmd(mesh={"rank": 8}, timeout=1800)
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_random_syncs_with_a_fault_are_all_placed(mesh, part):
    check_faults(NIGHTLY // 4, NIGHTLY // 4 * part)


@nightly
@spmd(mesh={"rank": 8}, timeout=1800)
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_random_right_syncs_are_quiet(mesh, part):
    check_healthy(NIGHTLY // 4, NIGHTLY // 4 * part)


@spmd(mesh={"rank": 4}, timeout=240)
def test_without_a_sync_the_target_is_compared_with_what_the_source_has_now(mesh):
    for seed in range(1000, 1002):
        pair = drawn(seed)
        options = {"map": pair.map, "layouts": pair.layouts, "mesh": pair.mesh}
        assert text_now(pair, options), (seed, "the target was never written")
        sync(pair)()
        assert not text_now(pair, options), seed
        fault = next(one for at in range(len(FAULTS)) if "stale" not in (one := fault_of(pair, seed + at)))
        sync(pair, fault, seed)()
        assert_placed(pair, text_now(pair, options), (seed, fault))


def text_now(pair, options):
    try:
        assert_transferred(pair.source, pair.target, **options)
    except ShardAssertionError as error:
        return str(error)
    return ""


@spmd(mesh={"tp": 2})
def test_a_map_may_be_a_file_and_what_is_wrong_in_it_is_one_line(mesh, tmp_path):
    file = tmp_path / f"engine-{distributed.get_rank()}.map"
    file.write_text("# gate and up side by side\n*.gate_up = cat(*.gate, *.up, 0)\n")
    source = {"m.gate": torch.randn(4, 6), "m.up": torch.randn(4, 6)}
    for one in source.values():
        distributed.broadcast(one, src=0)
    target = {"m.gate_up": torch.zeros(8, 6)}

    def send(order=("m.gate", "m.up")):
        target["m.gate_up"].copy_(torch.cat([source[name] for name in order]))

    assert assert_transferred(source, target, send, map=file, layouts={"*": "[*, *]"}).compared
    assert assert_transferred(source, target, map=file, layouts={"*": "[*, *]"}).compared
    with pytest.raises(ShardAssertionError, match=r"m.gate_up"):
        assert_transferred(source, target, lambda: send(("m.up", "m.gate")), map=str(file), layouts={"*": "[*, *]"})
    file.write_text("*.gate_up = cut(*.gate)\n")
    with pytest.raises(ShardvizError, match=r"engine-\d\.map, line 1: unknown function 'cut'"):
        assert_transferred(source, target, send, map=file)
    with pytest.raises(ShardvizError, match=r"absent\.map"):
        assert_transferred(source, target, send, map=tmp_path / "absent.map")


@spmd(mesh={"tp": 4})
def test_padding_is_not_compared_and_one_of_each_rank_is_named(mesh):
    rows, padded, at = 30, 32, mesh.get_local_rank("tp")
    source = {"head": distribute_tensor(torch.randn(rows, 6), mesh, [Shard(0)])}
    target = {"head": torch.zeros(padded // 4, 6)}

    def right():
        whole = torch.full((padded, 6), float("nan"))
        whole[:rows] = source["head"].full_tensor()
        target["head"].copy_(whole.chunk(4)[at])

    def by_rank():
        own = source["head"].full_tensor()[:28].chunk(4)[at]
        target["head"].copy_(torch.cat([own, torch.ones(1, 6)]))

    options = {"layouts": {"*": "[*/tp, *]"}, "mesh": mesh}
    done = assert_transferred(source, target, right, map={"*": f"pad(*, {padded})"}, strict=True, **options)
    assert done.padded == ("head: padded: rows 30 to 31 are not compared",)
    with pytest.raises(
        ShardAssertionError, match="each rank's own rows are padded, 7 and 1 more; the map pads the whole"
    ) as caught:
        assert_transferred(source, target, by_rank, map={"head": "pad(slice(head, 0, 28), 32)"}, **options)
    with pytest.raises(ShardvizError) as refused:
        assert_transferred({"head": torch.ones(30, 6)}, {"head": torch.ones(32, 6)})
    assert 'where the rest is padding, map={"head": "pad(head, 32, 0)"}' in str(refused.value)
    assert "rank 0 rows 7, rank 1 rows 8-15, rank 2 rows 16-23, rank 3 rows 24-27" in str(caught.value)


@spmd(mesh={"rank": 2})
@pytest.mark.parametrize(
    ("left_out", "cause"),
    [
        (("down.bias", "norm.weight", "head.weight"), "end-not-written"),
        (("head.weight",), "skipped-key"),
        (("norm.weight",), "skipped-key"),
        (("up.weight", "head.weight"), "skipped-key"),
    ],
)
def test_the_last_tensors_of_several_modules_were_in_a_bucket_that_was_not_sent(mesh, left_out, cause):
    names = ["up.weight", "down.weight", "down.bias", "norm.weight", "head.weight"]
    source = {name: torch.randn(8, generator=torch.Generator().manual_seed(at)) for at, name in enumerate(names)}
    target = {name: torch.zeros(8) for name in names}

    def send():
        for name in names:
            if name not in left_out:
                target[name].copy_(source[name])

    with pytest.raises(ShardAssertionError, match=f"explain {cause}"):
        assert_transferred(source, target, send)
