"""What a map marks: wrong values in place, a part of a block, and nothing of what is right."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shardviz.check.run import check_dump
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.picture.model.holders import Plane, mask_of, ranks_of, ranks_text
from shardviz.picture.model.mesh import part_labels
from shardviz.picture.model.palette import Coloring
from shardviz.picture.model.sides import Sides
from shardviz.picture.model.subject import drawn_sides, of_layout, of_tensor
from shardviz.picture.text.page import picture_lines
from shardviz.picture.text.paint import CellLook, Frame, Ruler, Side, paint
from shardviz.picture.text.ranks import rank_rows
from shardviz.picture.text.terminal import Terminal
from tests.check.records import add_values, change_run
from tests.dumps import Made, make_dump

SHARDS = {rank: np.arange(8).reshape(2, 4) + 10.0 * rank for rank in range(4)}


def sides_in(folder: Path, name: str = "w") -> Sides:
    report = check_dump(folder)
    dump = dump_of(read_files(folder))
    return drawn_sides(dump, next(one for one in dump.tensors if name in one.names), report)


def page_of(folder: Path, name: str = "w") -> str:
    """Return the map and its notes."""
    report, dump = check_dump(folder), dump_of(read_files(folder))
    subject = of_tensor(dump, dump.first_captured[name], name, report)
    return "".join(f"{line.plain}\n" for line in picture_lines(subject, Terminal()))


def of_ids(tmp_path: Path, mesh: str, tensor: Made | str) -> Sides:
    return sides_in(make_dump(tmp_path / "d.shardviz", parse_mesh(mesh), {"w": tensor}))


def of_values(tmp_path: Path, claimed: str, values: dict[int, np.ndarray], mesh: str = "tp=4") -> Sides:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh(mesh), {"other": "[4]"})
    add_values(folder, "w", claimed, values)
    return sides_in(folder)


def looks(sides: Sides, side: Side = "difference", height: int = 24) -> dict[str, CellLook]:
    """Return the looks of a map by their first labels."""
    edges = [sides.holders.edges(dim) for dim in range(2)]
    rows, cols = Ruler.fitted(edges[0], height, 8), Ruler.fitted(edges[1], 60, 8)
    return {
        look.labels[0]: look for look in paint(Frame(sides, side, Plane(0, 1, (0, 0)), rows, cols), 0, 0, 60, 60).of
    }


def test_shards_of_the_same_values_are_marked_and_different_ones_are_grey(tmp_path: Path) -> None:
    same = dict.fromkeys(range(4), np.random.default_rng(0).normal(size=(2, 4)))
    assert [*looks(of_values(tmp_path / "a", "[8/tp, 4]", same))] == ["✗ 0", "✗ 1", "✗ 2", "✗ 3"]
    fine = looks(of_values(tmp_path / "b", "[8/tp, 4]", SHARDS))
    assert [(label, look.tone) for label, look in fine.items()] == [(str(rank), "in place") for rank in range(4)]


def test_of_equal_copies_the_one_that_is_not_is_named(tmp_path: Path) -> None:
    values = dict.fromkeys(range(4), SHARDS[0]) | {2: SHARDS[0] + 0.5}
    sides = of_values(tmp_path, "[2, 4]", values)
    assert [*looks(sides)] == ["0-3: ✗ 2"]
    assert [*looks(sides, "claimed")] == ["0-3: ✗ 2"], "no side reads as if all were well"


def test_a_shard_in_another_order_is_marked_where_its_order_is_wrong(tmp_path: Path) -> None:
    whole = np.arange(1, 33).reshape(8, 4)
    ids = {0: whole[:4][[0, 2, 1, 3]], 1: whole[4:]}
    sides = of_ids(tmp_path, "tp=2", Made("[8/tp, 4]", ids=ids))
    wrong = [row for row in range(8) if sides.at((row, 0)).different]
    assert wrong == [1, 2]
    assert ranks_of(sides.at((1, 0)).astray) == (0,)


def test_two_exchanged_shards_mark_their_blocks_and_no_others(tmp_path: Path) -> None:
    whole = np.arange(1, 129).reshape(64, 2)
    ids = {rank: whole[rank % 4 * 16 + rank // 4 : rank % 4 * 16 + rank // 4 + 1] for rank in range(64)}
    ids[5], ids[3] = ids[3], ids[5]
    sides = of_ids(tmp_path, "fsdp=16,tp=4", Made("[64/tp/fsdp, 2]", ids=ids))
    edges = np.arange(0, 65, 16)
    frame = Frame(sides, "difference", Plane(0, 1, (0, 0)), Ruler(edges, 16), Ruler(np.array([0, 2])))
    found = paint(frame, 0, 0, 4, 60).of
    assert [look.tone for look in found] == ["in place", "partly", "in place", "partly"]
    assert [look.labels[0] for look in found if look.tone == "partly"] == [
        "tp=1: ✗ fsdp=1 → 3",
        "tp=3: ✗ fsdp=0 → 5",
    ]


def test_what_one_rank_leaves_out_is_marked_as_missing(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=4"), {"other": "[4]"})
    add_values(folder, "w", "[8/tp, 4]", SHARDS)
    (folder / "rank_00002.json").unlink()
    assert [*looks(sides_in(folder), "claimed")] == ["0", "1", "✗ 2", "3"]


def test_a_rank_without_a_file_keeps_its_mark_beside_a_finding_about_others(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("dp=4"), {"other": "[4]"})
    add_values(folder, "w", "[2, 4]", dict.fromkeys(range(4), SHARDS[0]) | {1: SHARDS[0] + 0.5})
    (folder / "rank_00002.json").unlink()
    sides = sides_in(folder)
    cell = sides.at((0, 0))
    assert ranks_of(cell.guilty) == (1, 2)
    assert sides.reasons == ("values that differ from the other copies", "no file")
    assert [(ranks_of(ranks), words) for ranks, words in sides.reasons_at(cell)] == [
        ((1,), "values that differ from the other copies"),
        ((2,), "no file"),
    ]


def test_a_rank_without_a_file_is_not_placed_as_claimed(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=4"), {"other": "[4]"})
    add_values(folder, "w", "[8/tp, 4]", SHARDS)
    (folder / "rank_00002.json").unlink()
    sides = sides_in(folder)
    assert not sides.is_placed
    stranger = replace(sides, strangers=mask_of([1]))
    assert not stranger.is_placed
    assert stranger.reasons == ("a different tensor with this name", "no file")
    assert stranger.reasons_at(stranger.at((4, 0)))[-1] == (mask_of([2]), "no file")


def stamped(tmp_path: Path, claimed: str, mesh: str = "dp=2,tp=2", values: dict[int, np.ndarray] | None = None) -> Path:
    """Return a dump of a tensor with ids in place, and of its own values."""
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh(mesh), {"a": claimed, "w": claimed})
    if values is not None:
        add_values(folder, "w", claimed, values)
    return folder


@pytest.mark.parametrize(
    ("claimed", "label", "copies"),
    [
        ("[8, 3]", "0-3: ✗ 1", "by its placements 4 ranks along dp and tp share each part"),
        ("[8/tp, 3]", "1,3: ✗ 1", "by its placements 2 ranks along dp share each part"),
        ("[8/dp/tp, 3]", "✗ 1", ""),
    ],
)
def test_a_missing_file_of_a_stamped_tensor_is_not_a_wrong_place(
    tmp_path: Path, claimed: str, label: str, copies: str
) -> None:
    whole = page_of(stamped(tmp_path / "a", claimed))
    folder = stamped(tmp_path / "b", claimed)
    (folder / "rank_00001.json").unlink()
    page = page_of(folder)
    assert f" {label} " in page
    assert "✗ no file\n" in page
    assert copies in page
    assert not any(text in page for text in ("not held where", "nobody", "equal copies"))
    assert "✗" not in whole
    assert ("equal copies" in whole) == bool(copies)


def test_a_part_in_a_wrong_place_stays_one_beside_a_missing_file(tmp_path: Path) -> None:
    swapped = Made("[8/tp, 4]", ids={0: np.arange(9, 17).reshape(2, 4), 1: np.arange(1, 9).reshape(2, 4)})
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=4"), {"w": swapped})
    (folder / "rank_00003.json").unlink()
    page = page_of(folder)
    assert "✗ not held where the placements claim it\n" in page
    assert "✗ no file\n" in page
    assert "nobody" not in page
    sides = sides_in(folder)
    assert [sides.at((row, 0)).different for row in range(0, 8, 2)] == [True, True, False, False]


def test_a_rank_without_a_file_is_drawn_where_the_held_layout_has_it_and_nobody_is_said_to_hold_nothing(
    tmp_path: Path,
) -> None:
    made = {"w": Made("[12/fsdp/tp, 4]", "[12/tp/fsdp, 4]")}
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("fsdp=2,tp=3"), made)
    (folder / "rank_00002.json").unlink()
    sides = sides_in(folder)
    assert [ranks_text(sides.at((row, 0)).held) for row in range(0, 12, 2)] == ["0", "3", "1", "4", "2", "5"]
    page = page_of(folder)
    assert "✗ no file\n" in page
    assert "nobody" not in page
    assert "✗ 1-2" not in page


def test_a_held_block_names_its_rank_without_a_file_among_those_that_hold_it(tmp_path: Path) -> None:
    whole = np.arange(1, 33).reshape(8, 4)
    ids = {rank: whole[2:4] if rank % 4 == 0 else whole[0:2] for rank in (0, 1, 4, 5)}
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("dp=2,tp=4"), {"w": Made("[8/tp, 4]", ids=ids)})
    (folder / "rank_00006.json").unlink()
    assert [label for label in ("✗ 0,4", "✗ 1,5", "2,6: ✗ 6", " 3,7 ") if label not in page_of(folder)] == []


def test_reasons_beside_a_missing_file_are_all_printed_and_only_those_read_are_placed(tmp_path: Path) -> None:
    folder = stamped(tmp_path, "[8, 3]", values={r: np.full((8, 3), 1.0 + r // 3) for r in range(4)})
    (folder / "rank_00001.json").unlink()
    page = page_of(folder)
    assert "0-3: ✗ 1,3" in page
    assert "✗ placed as claimed; values that differ from the other copies\n" in page
    assert "✗ no file\n" in page


@pytest.mark.parametrize("claimed", ["[8, 3]", None])
def test_values_are_placed_as_claimed_only_where_ids_say_so(tmp_path: Path, claimed: str | None) -> None:
    values = {rank: np.full((8, 3), 1.0 + rank // 3) for rank in range(4)}
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("dp=4"), {"a": "[4]"})
    add_values(folder, "w", claimed, values, role="param" if claimed else "buffer")
    assert "✗ values that differ from the other copies" in page_of(folder)
    assert "placed as claimed" not in page_of(folder)
    assert "✗ placed as claimed; values that differ" in page_of(stamped(tmp_path / "s", "[8, 3]", "dp=4", values))


def test_each_reason_is_of_its_own_ranks(tmp_path: Path) -> None:
    same = np.random.default_rng(0).normal(size=(4, 3))
    folder = stamped(tmp_path, "[8/tp, 3]", values=dict.fromkeys(range(4), same))
    report, dump = check_dump(folder), dump_of(read_files(folder))
    (repeated,) = report.findings
    odd = replace(repeated, kind="unreplicated", ranks=(3,))
    both = replace(report, findings=(odd, replace(repeated, ranks=(0, 2))))
    sides = drawn_sides(dump, dump.first_captured["w"], both)
    assert sides.blamed == (
        (mask_of([3]), "values that differ from the other copies"),
        (mask_of([0, 2]), "the same values as other shards"),
    )
    assert sides.reasons_at(sides.at((0, 0))) == [(mask_of([0, 2]), "the same values as other shards")]
    assert sides.reasons_at(sides.at((4, 0))) == [(mask_of([3]), "values that differ from the other copies")]


def test_a_broken_tie_marks_ranks_and_not_the_map(tmp_path: Path) -> None:
    folder = stamped(tmp_path, "[8, 3]", "dp=4", {rank: np.full((8, 3), 1.0 + rank // 3) for rank in range(4)})
    first, other = read_files(folder).run.stamps
    change_run(folder, stamps=(first, msgspec.structs.replace(other, first=first.first, tied_to=first.name)))
    assert {finding.kind for finding in check_dump(folder).findings} == {"unreplicated", "untied"}
    assert [*looks(sides_in(folder))] == ["0-3: ✗ 3"]


def test_an_element_in_order_on_a_misordered_rank_is_not_marked(tmp_path: Path) -> None:
    whole = np.arange(1, 33).reshape(32, 1)
    ids = {0: whole[[*range(14), 15, 14]], 1: whole[16:]}
    sides = of_ids(tmp_path, "tp=2", Made("[32/tp, 1]", ids=ids))
    assert [row for row in range(32) if sides.at((row, 0)).is_wrong] == [14, 15]


def test_a_misordered_rank_whose_order_no_map_shows_is_marked_whole(tmp_path: Path) -> None:
    scattered = np.arange(1, 17).reshape(4, 4).copy()
    scattered[[0, 1], [0, 1]] = scattered[[1, 0], [1, 0]]
    ids = {0: scattered, 1: np.arange(17, 33).reshape(4, 4)}
    sides = of_ids(tmp_path, "tp=2", Made("[8/tp, 4]", ids=ids))
    assert sides.blamed == ((1, "in a different order"),)
    assert [row for row in range(8) if sides.at((row, 0)).is_wrong] == [0, 1, 2, 3]


@pytest.mark.parametrize(("claimed", "part"), [("[8/tp, 3]", "[2:4, 0:3]"), ("[8, 3]", "[0:8, 0:3]")])
def test_ranks_without_placements_are_listed_beside_those_that_have_some(
    tmp_path: Path, claimed: str, part: str
) -> None:
    values = np.random.default_rng(0).normal(size=(4, *((2, 3) if "tp" in claimed else (8, 3))))
    values[1:] = values[1:] if "tp" in claimed else values[:1]
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=4"), {"a": "[4]"})
    add_values(folder, "w", claimed, dict(enumerate(values[:2])))
    add_values(folder, "w", None, {2: values[2], 3: values[3]})
    dump = dump_of(read_files(folder))
    subject = of_tensor(dump, dump.first_captured["w"], "w", check_dump(folder))
    assert subject.claims[1] == part
    assert [row.claims for row in rank_rows(subject, None)[0]][-1] == "plain"
    assert subject.plain == (2, 3)
    page = page_of(folder)
    assert "no placements say which part is on ranks 2-3: a plain tensor\n" in page
    assert ("copies along tp: 2 ranks hold each part" in page) == (claimed == "[8, 3]")


def test_where_all_ranks_have_placements_or_none_has_no_row_is_plain(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=4"), {"a": "[4]"})
    add_values(folder, "w", None, {rank: np.ones((2, 3)) for rank in range(4)})
    dump = dump_of(read_files(folder))
    for name in ("a", "w"):
        subject = of_tensor(dump, dump.first_captured[name], name)
        assert not subject.plain
        assert "plain" not in subject.claims.values()


def test_what_ranks_without_placements_hold_is_not_against_a_claim(tmp_path: Path) -> None:
    mesh = parse_mesh("tp=2")
    folder = make_dump(tmp_path / "d.shardviz", mesh, {"w": "[8/tp, 3]"})
    other = make_dump(tmp_path / "other.shardviz", mesh, {"w": Made(None, held="[8/tp, 3]", shape=(8, 3))})
    (folder / "rank_00001.json").write_bytes((other / "rank_00001.json").read_bytes())
    dump = dump_of(read_files(folder))
    subject = of_tensor(dump, dump.first_captured["w"], "w")
    assert (subject.claims[1], subject.holds[1]) == ("plain", "[4:8, 0:3]")
    assert not subject.misplaced
    assert all(row.is_same for row in rank_rows(subject, None)[0])


@pytest.mark.parametrize("width", [52, 60, 80])
def test_a_mark_in_place_leaves_room_for_the_ranks(width: int) -> None:
    subject = of_layout(parse("float32[8, 64/tp]").layout(parse_mesh("dp=2,tp=8")))
    sides = replace(subject.sides, blamed=((mask_of(range(16)), "wrong values"),))
    text = "\n".join(line.plain for line in picture_lines(replace(subject, sides=sides), Terminal(width)))
    assert "✗ 0,8" in text
    assert "✗ …" not in text


@pytest.mark.parametrize(
    ("part", "whole", "label"),
    [
        ([1], range(8), "1"),
        ([*range(1, 64, 4)], range(64), "tp=1"),
        ([60, 61, 62, 63], range(64), "60-63"),
        ([0, 5, 9, 17, 30, 41], range(64), "6 of 64 ranks"),
    ],
)
def test_a_part_of_ranks_is_named_within_them(part: list[int], whole: range, label: str) -> None:
    coloring = Coloring(parse_mesh("fsdp=16,tp=4"), ("tp", "fsdp"))
    assert part_labels(mask_of(part), mask_of(whole), coloring)[0] == label
