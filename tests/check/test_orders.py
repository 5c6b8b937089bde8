"""Orders that are regular get the rule they follow: per group, per shard, per copy, per slice, over flattened axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from shardviz.check.order.infer.orders import as_text, name_order, period_of
from shardviz.check.run import check_dump
from shardviz.dump.records.tensors import MeshRecord
from tests.check.checking import arange, by_index, check_made, found_of, kinds, only, shards_of
from tests.check.records import add_values, change_rank, change_run, read_rank
from tests.dumps import Made

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.check.report import Report
    from shardviz.dump.records.base import Role
    from shardviz.explain.finding import Finding


def grouped(order: list[int], groups: int) -> list[int]:
    return [group * len(order) + place for group in range(groups) for place in order]


@pytest.mark.parametrize(
    ("order", "groups", "words"),
    [
        ([2, 0, 3, 1], 6, "within every 4 indices, dim 0 comes in the order [2, 0, 3, 1]"),
        ([2, 3, 0, 1], 4, "within every 4 indices, dim 0's halves are exchanged"),
        ([4, 5, 0, 1, 2, 3], 2, "within every 6 indices, dim 0 is rolled by 2"),
        ([4, 5, 0, 1, 6, 7, 2, 3], 3, "blocks of 2 come in the order [2, 0, 3, 1]"),
    ],
)
def test_the_same_order_in_every_head_is_reported_once(
    tmp_path: Path, order: list[int], groups: int, words: str
) -> None:
    index = grouped(order, groups)
    found = found_of(tmp_path, by_index(index), f"[{len(index)}/tp, 2]", "tp=1")
    assert words in found.summary
    assert "no simple rule" not in found.cause


def test_the_fix_of_an_order_in_groups_undoes_it() -> None:
    index = grouped([2, 0, 3, 1], 3)
    cause, _ = name_order(np.array(index), 0)
    assert "index_select(1, torch.tensor([1, 3, 0, 2]))" in cause.fix
    content = np.array(index).reshape(-1, 4)[:, [1, 3, 0, 2]].ravel()
    assert content.tolist() == list(range(12))


def test_an_order_in_groups_as_long_as_the_shards_says_that_they_are(tmp_path: Path) -> None:
    found = found_of(tmp_path, by_index(grouped([4, 1, 5, 0, 3, 2], 4)), "[24/tp, 2]", "tp=4")
    assert "within every 6 indices (the shard of a rank)" in found.summary


def test_another_order_in_every_shard_is_no_order_of_the_whole(tmp_path: Path) -> None:
    index = [2, 0, 3, 1, 7, 4, 6, 5, 9, 10, 8, 11, 12, 15, 13, 14]
    found = found_of(tmp_path, by_index(index), "[16/tp, 2]", "tp=4")
    assert "within every shard, dim 0 is reordered, by another order on each: 2 0 3 1 in the first" in found.summary
    assert "an index of its own" in found.cause


def test_an_order_that_follows_no_rule_stays_without_one(tmp_path: Path) -> None:
    index = [2, 9, 0, 15, 7, 4, 6, 12, 10, 8, 1, 11, 5, 3, 13, 14]
    assert "no simple rule" in found_of(tmp_path, by_index(index), "[16/tp, 2]", "tp=4").cause


@pytest.mark.parametrize(("count", "block", "start"), [(12, 1, 0), (12, 2, 0), (16, 3, 1), (110, 1, 0)])
def test_numbers_sorted_as_text_are_recognized(count: int, block: int, start: int) -> None:
    blocks = [int(name) - start for name in sorted(map(str, range(start, start + count)))]
    assert as_text(np.array([block * at + inner for at in blocks for inner in range(block)])) == block


def test_no_other_order_is_one_of_text() -> None:
    assert as_text(np.array([0, 1, 3, 2])) is None
    assert as_text(np.array([0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 9, 8])) is None
    assert period_of(np.arange(12)[::-1]) == 12


def test_experts_and_files_sorted_as_text_are_named(tmp_path: Path) -> None:
    index = sorted(range(12), key=str)
    assert "as text" in found_of(tmp_path, by_index(index), "[12/ep, 2]", "ep=4").cause
    assert "as text" in found_of(tmp_path, by_index(index), "[12/tp, 2]", "tp=12").cause


@pytest.mark.parametrize(
    ("torch", "advised"), [("2.4.1", True), ("none", True), ("2.5.0", False), ("2.13.0+cpu", False)]
)
def test_a_newer_torch_is_advised_to_who_has_an_older_one(tmp_path: Path, torch: str, advised: bool) -> None:
    check_made(tmp_path, "fsdp=2,tp=4", {"w": Made("[24/fsdp/tp, 12]", held="[24/tp/fsdp, 12]")})
    change_run(tmp_path / "made.shardviz", torch=torch)
    found = only(check_dump(tmp_path / "made.shardviz"))
    assert ("upgrade torch" in found.fix) == advised
    assert "(_StridedShard(0, split_factor=4), Shard(0))" in found.fix


def flattened(tmp_path: Path, source: list[int]) -> Finding:
    own = shards_of(arange(24, 2), "[24/dp_cp, 2]", "dp_cp=6")
    made = Made("[24/dp_cp, 2]", ids={rank: own[at] for rank, at in enumerate(source)})
    check_made(tmp_path, "dp_cp=6", {"w": made})
    change_run(tmp_path / "made.shardviz", mesh=MeshRecord(("dp", "cp"), (2, 3), tuple(range(6))))
    return only(check_dump(tmp_path / "made.shardviz"))


def test_an_order_of_the_axes_that_were_flattened_names_them(tmp_path: Path) -> None:
    found = flattened(tmp_path, [0, 2, 4, 1, 3, 5])
    assert "dp_cp is dp and cp flattened, and the ranks hold [24/cp/dp, 2]" in found.summary
    assert found.fix.endswith("or by dp * 3 + cp")


def test_another_order_over_a_flattened_axis_is_one_of_ranks(tmp_path: Path) -> None:
    assert "tp=i" not in (found := flattened(tmp_path, [5, 4, 3, 2, 1, 0])).summary
    assert "dp_cp=i holds the shard of dp_cp=5-i" in found.summary


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda part: np.roll(part, 1, 0), "within every 6 indices (the shard of a rank), dim 0 is rolled by 1"),
        (lambda part: part[::-1], "dim 0 is reversed"),
        (lambda part: part[:, ::-1], "dim 1 is reversed"),
    ],
)
def test_copies_along_an_axis_that_are_out_of_order_are_explained_alone(
    tmp_path: Path, change: Callable[[NDArray[np.int64]], NDArray[np.int64]], words: str
) -> None:
    own = shards_of(arange(12, 2), "[12/tp, 2]", "dp=2,tp=2")
    made = Made("[12/tp, 2]", ids={rank: change(part) if rank > 1 else part for rank, part in own.items()})
    found = only(check_made(tmp_path, "dp=2,tp=2", {"w": made}))
    assert found.ranks == (2, 3)
    assert "the copies on dp=0 are in order, but on dp=1" in found.summary
    assert words in found.summary
    assert found.fix.endswith("along dp from dp=0")


def of_slices(content: NDArray[np.int64], slices: list[int]) -> NDArray[np.int64]:
    changed = arange(*content.shape)
    changed[slices] = content[slices]
    return changed


@pytest.mark.parametrize(
    ("content", "slices", "words"),
    [
        (arange(8, 4, 4).swapaxes(1, 2), [1, 3, 5, 7], "slices 1, 3, 5, 7 of dim 0, 4 of 8, each slice is transposed"),
        (arange(8, 4, 4).swapaxes(1, 2), [6], "slices 6 of dim 0, 1 of 8, each slice is transposed"),
        (arange(8, 3, 4).swapaxes(1, 2).reshape(8, 3, 4), [0, 1], "transpose(0, 1).reshape(3, 4)"),
        (arange(8, 3, 4)[:, ::-1], [2, 7], "slices 2, 7 of dim 0, 2 of 8, each slice's dim 0 is reversed"),
    ],
)
def test_slices_that_are_out_of_order_among_others_are_explained_alone(
    tmp_path: Path, content: NDArray[np.int64], slices: list[int], words: str
) -> None:
    rows, columns = content.shape[1:]
    found = found_of(tmp_path, of_slices(content, slices), f"[8/ep, {rows}, {columns}]", "ep=2")
    assert words in found.summary
    assert "These slices (experts, heads or layers)" in found.cause


def buffer_of(tmp_path: Path, copies: dict[int, NDArray[np.int64]], values: list[int], role: Role = "buffer") -> Report:
    folder = tmp_path / "made.shardviz"
    check_made(tmp_path, "dp=3", {"table": Made(None, ids=copies, shape=(4, 2))})
    for rank in range(3):
        record = read_rank(folder, rank)
        change_rank(folder, rank, bodies=tuple(msgspec.structs.replace(body, role=role) for body in record.bodies))
    drawn = np.random.default_rng(0).standard_normal((3, 4, 2))
    add_values(folder, "table", None, {rank: drawn[values[rank]] for rank in range(3)}, role=role)
    return check_dump(folder)


def test_a_buffer_of_zeros_on_some_ranks_is_never_a_term_of_a_sum(tmp_path: Path) -> None:
    found = only(buffer_of(tmp_path, {2: np.zeros((4, 2), np.int64)}, [0, 0, 1]))
    assert (found.kind, found.ranks) == ("unreplicated", (2,))
    assert "rank 2 holds only zeros" in found.summary
    assert found.fix.endswith("from rank 0")


def test_a_weight_of_zeros_on_some_ranks_may_be_a_term_of_a_sum(tmp_path: Path) -> None:
    report = buffer_of(tmp_path, {2: np.zeros((4, 2), np.int64)}, [0, 0, 1], "param")
    assert "misordered" not in kinds(report)
    assert any("terms of a sum" in one.why for one in report.not_checked)


@pytest.mark.parametrize("content", [np.zeros((4, 2), np.int64), np.full((4, 2), -1)])
def test_a_buffer_that_some_ranks_make_again_with_equal_values_is_right(
    tmp_path: Path, content: NDArray[np.int64]
) -> None:
    report = buffer_of(tmp_path, {1: content, 2: content}, [0, 0, 0])
    assert report.findings == ()
    assert "ranks 1, 2 made it again" in report.not_checked[0].why


def test_a_buffer_in_another_order_on_one_rank_is_misordered(tmp_path: Path) -> None:
    found = only(buffer_of(tmp_path, {1: arange(4, 2)[::-1]}, [0, 1, 0]))
    assert (found.kind, found.ranks) == ("misordered", (1,))
    assert "on rank 1 dim 0 is reversed" in found.summary


def test_parts_of_one_shape_are_no_copies(tmp_path: Path) -> None:
    parts = {rank: arange(12, 2)[4 * rank : 4 * rank + 4] for rank in range(3)}
    assert check_made(tmp_path, "dp=3", {"table": Made(None, ids=parts, shape=(12, 2))}).findings == ()
