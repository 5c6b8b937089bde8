"""The model's own values after sharding: copies that differ, shards that repeat each other."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.run import check_dump
from shardviz.dump.write import rank_file
from shardviz.layout.mesh import Mesh
from tests.check.checking import check_made, kinds, only
from tests.check.records import add_values
from tests.dumps import Made, make_dump

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.check.report import Report
    from shardviz.dump.records.base import Role

RANDOM = np.random.default_rng(0).standard_normal((8, 8, 3)).astype(np.float32)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    check_made(tmp_path, "dp=2,tp=2", {"other": "[4/tp]"})
    return tmp_path / "made.shardviz"


def test_replicas_with_different_weights_are_found_with_the_axis_and_the_numbers(files: Path) -> None:
    add_values(files, "w", "[16/tp, 3]", {rank: RANDOM[rank] for rank in range(4)})
    found = only(check_dump(files))
    assert (found.kind, found.claimed, found.ranks) == ("unreplicated", "[16/tp, 3] =dp", (2, 3))
    assert "copies differ along dp" in found.summary
    assert f"at [0, 0] of the shard rank 0 has {RANDOM[0, 0, 0]:.6g}, rank 2 {RANDOM[2, 0, 0]:.6g}" in found.summary
    assert "OLMo-core#319" in found.refs


@pytest.mark.parametrize(("change", "words"), [(0.5, "differs by +0.5"), (None, "is 3 times theirs"), (0.0, "")])
def test_one_odd_copy_is_not_blamed_on_seeds(files: Path, change: float | None, words: str) -> None:
    odd = RANDOM[0] * 3 if change is None else RANDOM[0] + change if change else RANDOM[1]
    add_values(files, "w", "[8, 3]", {rank: odd if rank == 3 else RANDOM[0] for rank in range(4)})
    found = only(check_dump(files))
    assert (found.kind, found.ranks) == ("unreplicated", (3,))
    assert "rank 3 (dp=1, tp=1) has other values than the other copies" in found.summary
    assert f"every element {words}" in found.summary if words else "every element" not in found.summary
    assert "Only rank 3 (dp=1, tp=1) loaded" in found.cause
    assert "seed" not in found.fix


@pytest.mark.parametrize("role", ["buffer", "param"])
@pytest.mark.parametrize("claimed", [None, "[8, 3]"])
def test_one_odd_copy_of_a_plain_tensor_or_buffer_is_not_either(files: Path, role: Role, claimed: str | None) -> None:
    add_values(files, "sharded", "[16/tp, 3]", {rank: RANDOM[rank % 2] for rank in range(4)})
    add_values(files, "w", claimed, {rank: RANDOM[int(rank == 3)] for rank in range(4)}, role=role)
    found = only(check_dump(files))
    assert "Only rank 3 (dp=1, tp=1) loaded" in found.cause
    assert "seed" not in found.fix
    assert "each rank" not in found.cause


@pytest.mark.parametrize("role", ["buffer", "param"])
def test_copies_that_differ_along_two_axes_are_broadcast_along_both(files: Path, role: Role) -> None:
    add_values(files, "w", "[8, 3]", {rank: RANDOM[rank] for rank in range(4)}, role=role)
    assert "along dp and tp" in only(check_dump(files)).fix


def test_odd_copies_of_several_parts_are_compared_with_those_of_their_parts(tmp_path: Path) -> None:
    check_made(tmp_path, "dp=8,tp=4", {"other": "[4]"})
    odd = {rank: RANDOM[rank % 4] + (rank in (3, 17)) for rank in range(32)}
    add_values(tmp_path / "made.shardviz", "w", "[32/tp, 3]", odd)
    found = only(check_dump(tmp_path / "made.shardviz"))
    assert "ranks 3, 17 have other values than the other copies" in found.summary
    assert "all other copies agree" in found.cause
    assert "random state that only ranks 3, 17 use" in found.fix


@pytest.mark.parametrize(("odd", "is_first"), [((0,), True), ((0, 1), True), ((1,), False), ((0, 5), False)])
def test_only_first_ranks_may_have_read_a_file_and_not_sent_it_on(
    tmp_path: Path, odd: tuple[int, ...], is_first: bool
) -> None:
    check_made(tmp_path, "dp=8,tp=2", {"other": "[4]"})
    values = {rank: RANDOM[rank % 2] + (rank in odd) for rank in range(16)}
    add_values(tmp_path / "made.shardviz", "w", "[16/tp, 3]", values)
    assert ("reads a checkpoint" in only(check_dump(tmp_path / "made.shardviz")).cause) == is_first


def test_the_lowest_rank_that_left_a_file_is_not_the_first(tmp_path: Path) -> None:
    check_made(tmp_path, "dp=8", {"other": "[4]"})
    add_values(tmp_path / "made.shardviz", "w", "[8, 3]", {rank: RANDOM[int(rank == 1)] for rank in range(8)})
    (tmp_path / "made.shardviz" / rank_file(0)).unlink()
    found = next(one for one in check_dump(tmp_path / "made.shardviz").findings if one.kind == "unreplicated")
    assert "Only rank 1 loaded" in found.cause


def test_a_tensor_that_some_ranks_did_not_shard_has_that_for_its_cause(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=4", {"other": "[4]"})
    folder = tmp_path / "made.shardviz"
    add_values(folder, "w", "[16/tp, 3]", {rank: RANDOM[rank] for rank in (0, 1)})
    add_values(folder, "w", None, {rank: RANDOM[rank] for rank in (2, 3)})
    found = only(check_dump(folder))
    assert (found.claimed, found.ranks) == ("", (3,))
    assert "2 different copies on 2 ranks" in found.summary
    assert "a DTensor on ranks 0-1 and a plain tensor on ranks 2-3" in found.cause
    assert "seed" not in found.fix


@pytest.mark.parametrize("other", [0, 1])
def test_a_copy_without_placements_is_compared_with_those_that_have_some(tmp_path: Path, other: int) -> None:
    check_made(tmp_path, "tp=4", {"other": "[4]"})
    folder = tmp_path / "made.shardviz"
    add_values(folder, "w", "[8, 3]", dict.fromkeys((0, 1), RANDOM[0]))
    add_values(folder, "w", None, dict.fromkeys((2, 3), RANDOM[other]))
    assert kinds(check_dump(folder)) == ["unreplicated"] * other


def test_the_first_rank_alone_may_have_loaded_a_file(files: Path) -> None:
    add_values(files, "w", "[8, 3]", {rank: RANDOM[1 if rank == 0 else 0] for rank in range(4)})
    assert "reads a checkpoint" in only(check_dump(files)).cause


def test_what_one_odd_copy_differs_by_is_not_said_of_several(files: Path) -> None:
    check_made(files.parent, "dp=8", {"other": "[4]"})
    add_values(files, "w", "[8, 3]", {rank: RANDOM[0] + {1: 1, 3: 2}.get(rank, 0) for rank in range(8)})
    found = only(check_dump(files))
    assert "ranks 1, 3 have other values than the other copies" in found.summary
    assert "every element" not in found.summary
    assert "loaded, drew or changed the tensor" in found.cause


def test_a_copy_that_is_infinite_differs_by_no_number(files: Path) -> None:
    add_values(files, "w", "[8, 3]", {rank: RANDOM[0] + (np.inf if rank == 3 else 0) for rank in range(4)})
    assert "every element" not in only(check_dump(files)).summary


def test_two_copies_against_two_are_no_odd_ones(files: Path) -> None:
    add_values(files, "w", "[8, 3]", {rank: RANDOM[rank // 2] for rank in range(4)})
    found = only(check_dump(files))
    assert "copies differ along dp from the start: 2 different copies on 4 ranks" in found.summary
    assert "seed" in found.fix


def test_equal_replicas_of_different_shards_are_right(files: Path) -> None:
    add_values(files, "w", "[16/tp, 3]", {rank: RANDOM[rank % 2] for rank in range(4)})
    assert check_dump(files).findings == ()


def test_a_buffer_that_each_rank_made_is_found(files: Path) -> None:
    add_values(files, "positions", None, {rank: RANDOM[rank] for rank in range(4)}, role="buffer")
    found = only(check_dump(files))
    assert (found.kind, found.ranks) == ("unreplicated", (1, 2, 3))
    assert "synchronize buffers" in found.cause


def test_a_pending_sum_may_differ_along_its_axis_and_no_other(files: Path) -> None:
    add_values(files, "along", "[8, 3] +tp", {rank: RANDOM[rank % 2] for rank in range(4)})
    add_values(files, "across", "[8, 3] +tp", {rank: RANDOM[rank] for rank in range(4)})
    assert [(finding.kind, finding.tensor) for finding in check_dump(files).findings] == [("unreplicated", "across")]


def test_plain_tensors_that_hold_other_ids_are_no_copies(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=2", {"w": Made(None, held="[16/tp, 3]", shape=(16, 3))})
    add_values(tmp_path / "made.shardviz", "w", None, {rank: RANDOM[rank] for rank in range(2)})
    assert check_dump(tmp_path / "made.shardviz").findings == ()


def test_plain_tensors_that_hold_the_same_ids_are_copies(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=2", {"w": Made(None, held="[8, 3]", shape=(8, 3))})
    add_values(tmp_path / "made.shardviz", "w", None, {rank: RANDOM[rank] for rank in range(2)})
    assert kinds(check_dump(tmp_path / "made.shardviz")) == ["unreplicated"]


def test_a_replica_that_loaded_weights_of_its_own_after_stamping_is_unreplicated_and_nothing_else(
    tmp_path: Path,
) -> None:
    lost = {rank: np.full((8, 3), -1) for rank in (2, 3)}
    check_made(tmp_path, "dp=2,tp=2", {"w": Made("[16/tp, 3]", ids=lost)})
    add_values(tmp_path / "made.shardviz", "w", "[16/tp, 3]", {rank: RANDOM[rank] for rank in range(4)})
    found = only(check_dump(tmp_path / "made.shardviz"))
    assert (found.kind, found.ranks) == ("unreplicated", (2, 3))


def drawn(folder: Path, values: dict[int, np.ndarray]) -> Report:
    lost = {rank: np.full((8, 3), -1) for rank in range(4)}
    check_made(folder, "dp=2,tp=2", {"w": Made("[16/tp, 3]", ids=lost)})
    add_values(folder / "made.shardviz", "w", "[16/tp, 3]", values)
    return check_dump(folder / "made.shardviz")


def test_weights_drawn_on_every_rank_once_they_are_sharded_have_no_order_to_check(tmp_path: Path) -> None:
    report = drawn(tmp_path, {rank: RANDOM[rank % 2] for rank in range(4)})
    assert report.findings == ()
    assert "drawn, loaded or computed once the model was filled" in report.not_checked[0].why


def test_weights_drawn_after_sharding_are_still_compared_by_value(tmp_path: Path) -> None:
    assert kinds(drawn(tmp_path, {rank: RANDOM[rank] for rank in range(4)})) == ["unreplicated"]
    assert kinds(drawn(tmp_path, dict.fromkeys(range(4), RANDOM[0]))) == ["identical-shards"]


def test_memory_that_is_not_finite_was_not_drawn(tmp_path: Path) -> None:
    drawn(tmp_path, {rank: RANDOM[rank % 2] for rank in range(4)})
    file = tmp_path / "made.shardviz" / rank_file(1)
    file.write_text(re.sub(r'"values":\[\[[^,]+', '"values":[["nan"', file.read_text(), count=1))
    found = only(check_dump(tmp_path / "made.shardviz"))
    assert found.kind == "foreign"
    assert "never written" in found.cause


@pytest.mark.parametrize(("number", "others", "expected"), [(0, -1, []), (1, -1, []), (0, None, ["foreign"])])
def test_a_weight_filled_with_one_number_is_right_where_the_others_were_drawn(
    tmp_path: Path, number: int, others: int | None, expected: list[str]
) -> None:
    filled = {rank: np.full((2, 3), number) for rank in range(2)}
    lost = {} if others is None else {rank: np.full((2, 3), others) for rank in range(2)}
    check_made(tmp_path, "tp=2", {"w": Made("[4/tp, 3]", ids=lost), "bias": Made("[4/tp, 3]", ids=filled)})
    folder = tmp_path / "made.shardviz"
    add_values(folder, "w", "[4/tp, 3]", {rank: RANDOM[rank, :2] for rank in range(2)})
    add_values(folder, "bias", "[4/tp, 3]", {rank: np.full((2, 3), float(number)) for rank in range(2)})
    assert kinds(check_dump(folder)) == expected


def test_copies_of_another_element_type_are_one_finding(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=2", {"other": "[4/tp]"})
    add_values(tmp_path / "made.shardviz", "w", None, {0: RANDOM[0], 1: RANDOM[0].astype(np.float64)})
    assert kinds(check_dump(tmp_path / "made.shardviz")) == ["wrong-shape"]


def test_empty_shards_of_one_region_are_no_copies(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=4", {"other": "[4/tp]"})
    folder = tmp_path / "made.shardviz"
    add_values(folder, "w", "[2/tp, 3]", {0: RANDOM[0, :1], 1: RANDOM[1, :1], 2: RANDOM[0, :0], 3: np.zeros((0, 2))})
    assert check_dump(folder).findings == ()


def seeded_alike(files: Path, local: np.ndarray, **options: bool) -> Report:
    add_values(files, "w", "[16/tp, 3]", dict.fromkeys(range(4), local), **options)
    return check_dump(files)


def test_one_seed_on_every_shard_is_found(files: Path) -> None:
    found = only(seeded_alike(files, RANDOM[0]))
    assert found.kind == "identical-shards"
    assert "along tp" in found.summary
    assert "torchtitan#3106" in found.refs
    assert found.fix.startswith("draw the weights before you shard them")  # on CPUs DTensors share one stream


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_constant_weight_is_alike_everywhere(files: Path, value: float) -> None:
    assert seeded_alike(files, np.full((8, 3), value)).findings == ()


def test_a_large_constant_weight_is_known_by_its_flag(files: Path) -> None:
    assert seeded_alike(files, np.ones((8, 3)), constant=True, written=False).findings == ()


@pytest.mark.parametrize(("dtype", "first"), [("float32", 0), ("float16", 0), ("float32", 1)])
def test_a_weight_that_became_nan_was_not_drawn_from_one_seed(files: Path, dtype: str, first: int) -> None:
    local = RANDOM[0].astype(dtype)
    local[first:] = math.nan
    assert bool(seeded_alike(files, local, written=False).findings) == (first > 0)


def test_whole_numbers_may_repeat(files: Path) -> None:
    assert seeded_alike(files, np.tile([1, 2, 3], (8, 1))).findings == ()


def test_one_seed_along_one_of_two_axes_names_that_axis(tmp_path: Path) -> None:
    check_made(tmp_path, "fsdp=2,tp=2", {"other": "[4/tp]"})
    folder = tmp_path / "made.shardviz"
    add_values(folder, "w", "[32/tp/fsdp, 3]", {rank: RANDOM[rank % 2] for rank in range(4)})
    found = only(check_dump(folder))
    assert "along fsdp hold" in found.summary


@pytest.mark.parametrize(("kind", "said"), [("complex64", "no stamp is complex"), ("float32", "or stamp the model")])
def test_complex_numbers_are_not_advised_to_be_stamped(tmp_path: Path, kind: str, said: str) -> None:
    dump = make_dump(tmp_path / "d", Mesh(("tp",), (2,)), {})
    add_values(dump, "rope.cache", None, {rank: np.arange(4).astype(kind) for rank in range(2)}, written=False)
    (note,) = check_dump(dump).not_checked
    assert note.tensor == "rope.cache"
    assert said in note.why


def test_a_plain_weight_beside_sharded_ones_is_reported_to_be_reduced_by_nothing(files: Path) -> None:
    add_values(files, "sharded", "[16/tp, 3]", {rank: RANDOM[rank % 2] for rank in range(4)})
    add_values(files, "own", None, {rank: RANDOM[rank] for rank in range(4)})
    found = only(check_dump(files))
    assert (found.kind, found.tensor) == ("unreplicated", "own")
    assert "ignored_params" in found.cause
    assert "averaged" not in found.cause
    assert "broadcast it along dp and tp" in found.fix
    assert "split DTensor over dp and tp" in found.fix
