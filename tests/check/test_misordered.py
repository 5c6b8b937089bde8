"""A tensor that is out of order is found, and what happened to it gets its name."""

from __future__ import annotations

import math
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.layout.mesh import Mesh
from tests.check.checking import arange, by_rank, check_made, kinds, only, reordered, shards_of
from tests.dumps import Made

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MESH = "fsdp=2,tp=4"


def test_the_fsdp_over_tp_bug_reads_as_an_order_of_axes_with_the_right_label(tmp_path: Path) -> None:
    found = only(check_made(tmp_path, MESH, {"w": Made("[12/fsdp/tp, 12]", held="[12/tp/fsdp, 12]")}))
    assert found.kind == "misordered"
    assert (found.claimed, found.held) == ("[12/fsdp/tp, 12]", "[12/tp/fsdp, 12]")
    assert "(_StridedShard(0, split_factor=4), Shard(0))" in found.fix
    assert "pytorch#129229" in found.refs
    assert found.severity == "error"


def test_parts_in_the_order_of_ranks_under_fsdp_over_tps_label_are_no_fault_of_torch(tmp_path: Path) -> None:
    found = only(check_made(tmp_path, MESH, {"w": Made("[12/tp/fsdp, 12]", held="[12/fsdp/tp, 12]")}))
    assert found.kind == "misordered"
    assert "the axes split the dim in the order of the mesh" in found.summary
    assert found.cause.startswith("The loader cuts over the mesh's first axis first")
    assert found.fix.endswith("label the local tensors by (Shard(0), Shard(0))")
    assert "upgrade" not in found.fix


@pytest.mark.parametrize(
    "text",
    [
        "[12/tp/fsdp, 12]",
        "[12/fsdp, 12/tp]",
        "[24/3/tp, 8]",
        "[12, 12]",
        "[5/fsdp]",
        "[1/tp, 3]",
        "[0/tp, 3]",
        "[]",
        "[6, 4] +tp",
        "[flat(10, 10)/fsdp]",
        "[7/tp/fsdp, 3]",
    ],
)
def test_what_holds_what_it_claims_gives_no_finding(tmp_path: Path, text: str) -> None:
    report = check_made(tmp_path, MESH, {"w": text})
    assert (report.findings, report.not_checked) == ((), ())


def test_a_finding_of_many_layers_is_one_with_all_their_names(tmp_path: Path) -> None:
    made = Made("[12/fsdp/tp, 12]", held="[12/tp/fsdp, 12]")
    report = check_made(tmp_path, MESH, {f"layers.{index}.w": made for index in range(12)})
    (found,) = report.findings
    assert found.tensors == tuple(f"layers.{index}.w" for index in range(12))
    assert found.summary.startswith("12 tensors alike: ")
    assert all(len(report.findings_of[name]) == 1 for name in found.tensors)


@pytest.mark.parametrize(
    ("claimed", "held", "sentence"),
    [
        ("[24/tp, 8]", "[24/3/tp, 8]", "segment by segment"),
        ("[24/3/tp, 8]", "[24/tp, 8]", "across its segments"),
        ("[24/fsdp, 8]", "[24/2/fsdp, 8]", "segment by segment"),
        ("[24/fsdp, 8/tp]", "[24/fsdp, 8/2/tp]", "segment by segment"),
    ],
)
def test_segments_are_named(tmp_path: Path, claimed: str, held: str, sentence: str) -> None:
    found = only(check_made(tmp_path, MESH, {"w": Made(claimed, held=held)}))
    assert (found.kind, found.held) == ("misordered", held)
    assert sentence in found.summary


def test_a_square_tensor_split_on_the_other_dim_is_told_by_its_shape(tmp_path: Path) -> None:
    found = only(check_made(tmp_path, MESH, {"w": Made("[12/tp, 12]", held="[12, 12/tp]")}))
    assert (found.kind, found.held) == ("wrong-shape", "[12, 12/tp]")
    assert "(Replicate(), Shard(1))" in found.fix


def test_axes_exchanged_between_dims_are_another_dim(tmp_path: Path) -> None:
    found = only(check_made(tmp_path, "a=2,b=2", {"w": Made("[4/a, 4/b]", held="[4/b, 4/a]")}))
    assert (found.kind, found.held) == ("misordered", "[4/b, 4/a]")
    assert "another dim" in found.summary


def test_replicate_that_is_different_is_a_wrong_label(tmp_path: Path) -> None:
    found = only(check_made(tmp_path, "dp=2,tp=2", {"w": Made("[4/dp, 4]", held="[4/tp, 4]")}))
    assert found.kind == "wrong-placement"
    assert "(Replicate(), Shard(0))" in found.fix


def test_replicate_with_shards_is_a_wrong_label(tmp_path: Path) -> None:
    found = only(check_made(tmp_path, "tp=2", {"w": Made("[4, 4]", held="[4/tp, 4]")}))
    assert found.kind == "wrong-placement"
    assert "(Shard(0),)" in found.fix


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([3, 2, 1, 0], "tp=i holds the shard of tp=3-i"),
        ([1, 2, 3, 0], "tp=i holds the shard of tp=(i+1)%4"),
        ([2, 0, 3, 1], "the order [2, 0, 3, 1]"),
    ],
)
def test_shards_of_other_ranks_are_named_by_their_rule(tmp_path: Path, source: list[int], words: str) -> None:
    found = only(check_made(tmp_path, "tp=4", {"w": by_rank("[12/tp, 4]", "tp=4", source)}))
    assert found.kind == "misordered"
    assert words in found.summary


def test_reversed_ranks_are_those_of_a_mesh_given_backwards(tmp_path: Path) -> None:
    found = only(check_made(tmp_path, "tp=4", {"w": by_rank("[12/tp, 4]", "tp=4", [3, 2, 1, 0])}))
    assert found.held == "tp=i holds the shard of tp=3-i, as on a mesh given as [3, 2, 1, 0]"
    assert not found.also


def test_halves_exchanged_on_two_ranks_are_told_with_the_fix_of_both_explanations(tmp_path: Path) -> None:
    made = Made("[12/tp, 4]", ids={0: arange(12, 4)[6:], 1: arange(12, 4)[:6]})
    found = only(check_made(tmp_path, "tp=2", {"w": made}))
    assert found.also == ("dim 0's halves are exchanged",)
    assert "mesh.get_local_rank('tp')" in found.fix
    assert "concatenate the segments in the order" in found.fix


def test_what_is_claimed_and_held_stands_beneath_and_not_in_the_sentence(tmp_path: Path) -> None:
    found = only(check_made(tmp_path, MESH, {"w": Made("[16/fsdp/tp, 12]", held="[16/tp/fsdp, 12]")}))
    assert found.held not in found.summary
    assert found.claimed not in found.summary
    assert len(found.summary) < 240


def test_the_coordinate_of_another_axis_is_named(tmp_path: Path) -> None:
    found = only(check_made(tmp_path, "fsdp=2,tp=2", {"w": Made("[16/tp, 8]", held="[16/fsdp, 8]")}))
    assert (found.kind, found.held) == ("wrong-placement", "[16/fsdp, 8]")
    assert "another axis" in found.summary
    assert "mesh.get_local_rank('tp')" in found.fix


def test_a_shard_chosen_by_the_global_rank_is_named_by_the_rule(tmp_path: Path) -> None:
    made = by_rank("[12/tp, 4]", "tp=2,dp=3", [0, 4, 2, 3, 1, 5])
    found = only(check_made(tmp_path, "tp=2,dp=3", {"w": made}))
    assert found.held == "each rank holds the shard of tp = rank % 2 of its global rank"
    assert found.fix.startswith("choose the shard by mesh.get_local_rank('tp')")


def test_experts_dealt_out_in_turn_are_named(tmp_path: Path) -> None:
    made = Made("[8/ep, 3]", ids={rank: arange(8, 3)[rank::4] for rank in range(4)})
    found = only(check_made(tmp_path, "ep=4", {"w": made}))
    assert (found.kind, found.held) == ("misordered", "[8/2/ep, 3]")
    assert "dealt out in turn" in found.summary
    assert "weight[rank::size]" in found.cause


@pytest.mark.parametrize("sizes", [(16, 4, 4), (12, 8), (4, 4, 8, 2)])
def test_segments_of_different_sizes_each_split_are_named_with_their_sizes(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    total = sum(sizes)
    segments = np.split(arange(total, 3), np.cumsum(sizes)[:-1])
    ids = {rank: np.concatenate([np.split(one, 2)[rank] for one in segments]) for rank in range(2)}
    found = only(check_made(tmp_path, "tp=2", {"w": Made(f"[{total}/tp, 3]", ids=ids)}))
    assert found.kind == "misordered"
    assert found.held == f"dim 0 has segments of {', '.join(map(str, sizes))}, each split over tp"
    assert "Linear of its own" in found.fix


@pytest.mark.parametrize(
    ("claimed", "held"),
    [
        ("[(48/2/dp)/3/tp, 8]", "[(48/3/tp)/dp, 8]"),
        ("[(48/2/dp)/3/tp, 8]", "[48/dp/tp, 8]"),
    ],
)
def test_a_fused_weight_under_fsdp_is_told_what_fsdp_can_be_made_to_do(tmp_path: Path, claimed: str, held: str) -> None:
    mesh = "dp=2,tp=2" if "3/tp)" in held else "dp=3,tp=2"
    found = only(check_made(tmp_path, mesh, {"wqkv": Made(claimed, held=held)}))
    assert (found.kind, found.held) == ("misordered", held)
    assert "FSDP2 cuts each rank's rows of a fused weight" in found.cause
    assert "shard_placement_fn=lambda param: Shard(1)" in found.fix
    assert "label the local tensors" not in found.fix


def test_one_reversed_axis_of_two_is_named(tmp_path: Path) -> None:
    made = by_rank("[12/fsdp/tp, 4]", "fsdp=2,tp=3", [2, 1, 0, 5, 4, 3])
    assert "tp=i holds the shard of tp=2-i" in only(check_made(tmp_path, "fsdp=2,tp=3", {"w": made})).summary


def test_every_permutation_of_four_ranks_is_explained(tmp_path: Path) -> None:
    for source in permutations(range(4)):
        report = check_made(tmp_path, "tp=4", {"w": by_rank("[12/tp, 4]", "tp=4", list(source))})
        if source == (0, 1, 2, 3):
            assert not report.findings
        else:
            assert "scrambled" not in only(report).held


def test_a_mesh_whose_ranks_fall_is_fine_as_long_as_shards_follow_it(tmp_path: Path) -> None:
    mesh = Mesh(("tp",), (4,), (3, 2, 1, 0))
    assert check_made(tmp_path, mesh, {"w": "[12/tp, 4]"}).findings == ()


def test_head_tail_order_of_context_parallel_is_named(tmp_path: Path) -> None:
    order = np.concatenate([np.r_[i, 7 - i] for i in range(4)])
    content = arange(8, 3)[order]
    found = only(check_made(tmp_path, "cp=4", {"x": reordered(content, "[8/cp, 3]", "cp=4")}))
    assert found.kind == "misordered"
    assert "chunks i and 7-i of 8" in found.held


def test_an_even_split_that_is_not_torch_chunk_is_named(tmp_path: Path) -> None:
    ids = dict(enumerate(np.array_split(arange(10), 4)))
    found = only(check_made(tmp_path, "tp=4", {"w": Made("[10/tp]", ids=ids)}))
    assert found.kind == "wrong-shape"
    assert "at most one" in found.summary


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (arange(16, 2)[::-1], "dim 0 is reversed"),
        (np.roll(arange(16, 2), 3, 0), "dim 0 is rolled by 3"),
        (arange(16, 2).reshape(2, 4, 2, 2).swapaxes(1, 2).reshape(16, 2), "view(2, 4, 2, 1).transpose(1, 2)"),
        (arange(16, 2).reshape(2, 2, 4, 2).swapaxes(1, 2).reshape(16, 2), "view(2, 2, 4, 1).transpose(1, 2)"),
        (arange(16, 2).reshape(4, 4, 2).swapaxes(0, 1).reshape(16, 2), "view(1, 4, 4, 1).transpose(1, 2)"),
        (np.concatenate([arange(16, 2)[8:], arange(16, 2)[:8]]), "dim 0's halves are exchanged"),
        (arange(16, 2)[np.r_[0:4, 12:16, 8:12, 4:8]], "blocks of 4 come in the order 0 3 2 1"),
    ],
)
def test_a_dim_in_another_order_is_named(tmp_path: Path, content: NDArray[np.int64], words: str) -> None:
    found = only(check_made(tmp_path, "tp=2", {"w": reordered(content, "[16/tp, 2]", "tp=2")}))
    assert found.kind in ("misordered", "misordered-within-shard")
    assert any(words in text for text in (found.summary, *found.also))


def test_rotary_order_on_load_is_named_with_its_reference(tmp_path: Path) -> None:
    content = arange(16, 2).reshape(4, 2, 2, 2).swapaxes(1, 2).reshape(16, 2)
    found = only(check_made(tmp_path, "tp=2", {"w": reordered(content, "[16/tp, 2]", "tp=2")}))
    assert found.kind == "misordered-within-shard"
    assert found.refs == ("torchtitan#1483",)
    assert "rotary" in found.cause


@pytest.mark.parametrize(
    ("heads", "halves", "mesh", "layout"),
    [
        (2, (4, 2), "fsdp=2,tp=2", "[16/tp/fsdp, 2]"),  # as segments of two rows that fsdp split
        (2, (2, 4), "fsdp=8,tp=2", "[16/tp/fsdp, 2]"),  # as shards of one row, along fsdp in another order
        (4, (4, 2), "tp=32", "[32/tp, 2]"),
    ],
)
def test_the_rotary_order_is_named_first_where_single_rows_look_like_shards(
    tmp_path: Path, heads: int, halves: tuple[int, int], mesh: str, layout: str
) -> None:
    rows = heads * math.prod(halves)
    content = arange(rows, 2).reshape(heads, *halves, 2).swapaxes(1, 2).reshape(rows, 2)
    found = only(check_made(tmp_path, mesh, {"w": reordered(content, layout, mesh)}))
    assert "rotary" in found.cause
    assert found.also, "what the shards look like is said too"


def test_interleaved_rows_are_not_blamed_on_a_mesh_of_other_sizes(tmp_path: Path) -> None:
    content = arange(16, 2).reshape(2, 8, 2).swapaxes(0, 1).reshape(16, 2)
    several = only(
        check_made(tmp_path / "a", "fsdp=8,tp=2", {"w": reordered(content, "[16/tp/fsdp, 2]", "fsdp=8,tp=2")})
    )
    assert "interleaves" in several.cause
    one = only(check_made(tmp_path / "b", "tp=16", {"w": reordered(content, "[16/tp, 2]", "tp=16")}))
    assert "numbers the ranks" in one.cause, "two nodes of eight ranks may be numbered so"
    assert "view(1, 2, 8, 1)" in one.also[0]


@pytest.mark.parametrize("order", [[0, 2, 4, 6, 1, 3, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7]])
def test_shards_of_several_rows_in_another_order_are_the_ranks(tmp_path: Path, order: list[int]) -> None:
    content = arange(32, 2).reshape(2, 8, 2, 2)[:, order].reshape(32, 2)
    found = only(check_made(tmp_path, "fsdp=8,tp=2", {"w": reordered(content, "[32/tp/fsdp, 2]", "fsdp=8,tp=2")}))
    assert "numbers the ranks" in found.cause
    assert not found.also


@pytest.mark.parametrize(
    "content",
    [arange(6, 6).T, arange(4, 6).T.reshape(6, 4), arange(24).reshape(4, 6).T.copy()],
)
def test_a_transposed_tensor_is_named(tmp_path: Path, content: NDArray[np.int64]) -> None:
    rows, columns = content.shape
    made = reordered(content, f"[{rows}/tp, {columns}]", "tp=2")
    found = only(check_made(tmp_path, "tp=2", {"w": made}))
    assert found.kind == "misordered"
    assert "transpose(0, 1)" in found.held


def test_shards_transposed_after_the_split_are_named(tmp_path: Path) -> None:
    ids = {rank: part.T for rank, part in shards_of(arange(6, 4), "[6/tp, 4]", "tp=2").items()}
    found = only(check_made(tmp_path, "tp=2", {"w": Made("[6/tp, 4]", ids=ids)}))
    assert found.kind == "wrong-shape"
    assert "each shard transposed" in found.held


@pytest.mark.parametrize("shape", [(6, 8), (4, 6, 8)])
def test_shards_read_without_the_strides_of_a_transposed_tensor_are_named(tmp_path: Path, shape) -> None:
    text = "[6/tp, 8]" if len(shape) == 2 else "[4, 6/tp, 8]"
    parts = shards_of(arange(*shape), text, "tp=2")
    ids = {rank: part.swapaxes(-1, -2).reshape(part.shape) for rank, part in parts.items()}
    found = only(check_made(tmp_path, "tp=2", {"w": Made(text, ids=ids)}))
    assert found.kind == "misordered-within-shard"
    last = len(shape) - 1
    assert f"each shard's own transpose({last - 1}, {last}), in the order of its memory" in found.held
    assert "strides" in found.cause
    assert ".contiguous()" in found.fix


def test_a_square_shard_transposed_has_one_name(tmp_path: Path) -> None:
    ids = {rank: part.T for rank, part in shards_of(arange(8, 4), "[8/tp, 4]", "tp=2").items()}
    found = only(check_made(tmp_path, "tp=2", {"w": Made("[8/tp, 4]", ids=ids)}))
    assert "each shard transposed" in found.held
    assert not any("memory" in one for one in found.also)


def test_an_axis_of_one_rank_is_no_other_axis(tmp_path: Path) -> None:
    made = Made("[4/ep/efsdp, 8]", held="[4/2/ep, 8]")
    found = only(check_made(tmp_path, "efsdp=1,ep=2", {"w": made}))
    assert (found.kind, found.held) == ("misordered", "[4/2/ep, 8]")
    assert "deals the rows out in turn" in found.cause


def test_what_nothing_fits_is_scrambled_with_its_first_differences(tmp_path: Path) -> None:
    content = np.random.default_rng(0).permutation(arange(6, 6).ravel()).reshape(6, 6)
    found = only(check_made(tmp_path, "tp=2", {"w": reordered(content, "[6/tp, 6]", "tp=2")}))
    assert found.kind == "misordered"
    assert found.held.startswith("scrambled: rank 0 holds [")
    assert found.sentence.endswith(": no known pattern fits")
    assert found.details[0].startswith("first differences: rank 0 holds [")


def test_two_elements_exchanged_in_one_shard_stay_within_it(tmp_path: Path) -> None:
    content = arange(6, 6)
    content[0, 1], content[1, 0] = content[1, 0], content[0, 1]
    found = only(check_made(tmp_path, "tp=2", {"w": reordered(content, "[6/tp, 6]", "tp=2")}))
    assert (found.kind, found.ranks) == ("misordered-within-shard", (0,))


def test_a_missing_rank_does_not_hide_the_order(tmp_path: Path) -> None:
    made = Made("[12/fsdp/tp, 12]", held="[12/tp/fsdp, 12]")
    report = check_made(tmp_path, MESH, {"w": made})
    assert kinds(report) == ["misordered"]
    (tmp_path / "made.shardviz" / "rank_00003.json").unlink()
    from shardviz.check.run import check_dump

    found = next(finding for finding in check_dump(tmp_path / "made.shardviz").findings if finding.tensor == "w")
    assert (found.kind, found.held) == ("misordered", "[12/tp/fsdp, 12]")
