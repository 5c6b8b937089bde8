"""What changed between two dumps: said tensor by tensor, and nothing where nothing did."""

from dataclasses import replace

import numpy as np
import pytest

from shardviz.check.diff import Change, Difference, compare
from shardviz.check.step.departure import Departure, StepDifference
from shardviz.cli import main
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import Mesh
from shardviz.picture.text.difference import difference_lines
from shardviz.picture.text.terminal import Terminal
from tests.check.records import add_values
from tests.dumps import make_dump

MESH = Mesh(("fsdp", "tp"), (2, 4))


def made(path, tensors, mesh=MESH):
    return dump_of(read_files(make_dump(path, mesh, tensors)))


def test_what_only_one_dump_has_of_all_tensors_is_reported_once(tmp_path):
    whole = made(tmp_path / "a", {"w": "float32[12/tp, 12]", "b": "float32[12]"})
    values = [replace(tensor, moment="initial") for tensor in whole.tensors]
    difference = compare(replace(whole, tensors=[*whole.tensors, *values]), whole)
    assert (difference.changes, difference.gained, difference.lost) == ((), (), ())
    assert [(one.tensor, one.why) for one in difference.not_compared] == [
        ("", "the model's own values: only the first dump has them")
    ]


def test_nothing_changed_is_not_claimed_of_what_was_not_compared(tmp_path):
    whole = made(tmp_path / "a", {"w": "float32[12/tp, 12]"})
    bare = replace(whole, tensors=[replace(tensor, moment="initial") for tensor in whole.tensors])
    shown = [line.plain for line in difference_lines(compare(whole, bare), Terminal())]
    assert shown == [
        "? not compared: where elements are: only the first dump has them",
        "? not compared: the model's own values: only the second dump has them",
        "? no changes found; 2 comparisons not made",
    ]
    assert [line.plain for line in difference_lines(compare(whole, whole), Terminal())] == ["✓ nothing changed"]


def test_layouts_are_compared_where_only_one_dump_has_ids(tmp_path):
    whole = made(tmp_path / "a", {"w": "float32[12/tp, 12]"})
    other = made(tmp_path / "b", {"w": "float32[12/fsdp, 12]"})
    bare = [replace(tensor, moment="initial") for tensor in other.tensors]
    difference = compare(whole, replace(other, tensors=bare))
    assert [(change.tensor, change.aspect) for change in difference.changes] == [("w", "claimed")]
    same = [replace(tensor, moment="initial") for tensor in whole.tensors]
    difference = compare(whole, replace(whole, tensors=same))
    assert (difference.changes, difference.num_compared, difference.nothing_compared) == ((), 1, "")


def test_a_tensor_whose_ids_one_dump_lacks_is_in_both(tmp_path):
    whole = made(tmp_path / "a", {"w": "float32[12/tp, 12]", "norm": "float32[12]"})
    ids, values = whole.tensors, [replace(tensor, moment="initial") for tensor in whole.tensors]
    one = replace(whole, tensors=[ids[0], values[1]])
    difference = compare(replace(whole, tensors=[*ids, values[0]]), replace(one, tensors=[*one.tensors, values[0]]))
    assert difference.changes == ()
    assert {left.tensor: left.why for left in difference.not_compared}["norm"] == (
        "where its elements are: only the first dump has them"
    )


def test_layers_whose_values_differ_are_folded_and_hashes_are_compared(tmp_path):
    paths = [make_dump(tmp_path / name, MESH, {}) for name in "ab"]
    for path, number in zip(paths, (1.0, 2.0), strict=True):
        for layer in range(3):
            small = dict.fromkeys(range(8), np.full(2, number + layer))
            add_values(path, f"layers.{layer}.b", "[2]", small)
            large = {rank: np.arange(3.0) + number * (rank < 2) for rank in range(8)}
            add_values(path, f"layers.{layer}.w", "[24/fsdp/tp]", large, written=False)
    difference = compare(*(dump_of(read_files(path)) for path in paths))
    assert [line.plain for line in difference_lines(difference, Terminal())] == [
        "≠ values  layers.[0-2].b",
        "  first   1 in layers.0.b",
        "  second  2 (2 of 2 elements differ, the first at [0])",
        "",
        "≠ values  layers.[0-2].w",
        "  second  different values on ranks 0-1, as their hashes show",
        "",
        "≠ 6 changes",
    ]


@pytest.mark.parametrize(("odd_rank", "num_not_compared"), [(None, 0), (3, 1)])
def test_copies_on_ranks_that_one_job_lacks_are_compared_by_their_hashes(tmp_path, odd_rank, num_not_compared):
    copies = {rank: np.arange(3.0) + (rank == odd_rank) for rank in range(8)}
    few, many = Mesh(("fsdp",), (2,)), MESH
    paths = make_dump(tmp_path / "a", few, {}), make_dump(tmp_path / "b", many, {})
    for path, num_ranks in zip(paths, (2, 8), strict=True):
        add_values(path, "w", None, {rank: copies[rank] for rank in range(num_ranks)}, written=False)
    difference = compare(*(dump_of(read_files(path)) for path in paths))
    assert [change for change in difference.changes if change.aspect == "values"] == []
    assert len(difference.not_compared) == num_not_compared


def test_a_cause_that_many_gradients_of_a_step_have_is_printed_once():
    names = ["0.b", *(f"layers.{number}.w" for number in range(15))]
    departures = [Departure("sharded", name, "", f"{name} is scaled", "Each rank clips.") for name in names]
    step = StepDifference((*departures, Departure("sharded", "head", "", "head is twice as large", "")))
    assert [line.plain for line in difference_lines(Difference((), (), (), (), 0, step), Terminal())] == [
        "≠ step  0.b",
        "  differs 0.b is scaled",
        "  why     Each rank clips.",
        "  also    layers.[0-14].w: the same cause",
        "",
        "≠ step  head",
        "  differs head is twice as large",
        "",
        "≠ 17 differences of the step",
    ]


@pytest.mark.parametrize("is_of_jobs", [True, False])
def test_where_steps_agree_has_no_tick_beside_a_difference(is_of_jobs):
    change, departure = Change("w", "dtype", "float32", "float64"), Departure("sharded", "head", "", "head differs", "")
    agree = StepDifference((), 3, agreement="they agree", is_of_jobs=is_of_jobs)
    for changes, step in (((change,), agree), ((), replace(agree, departures=(departure,)))):
        text = [line.plain for line in difference_lines(Difference(changes, (), (), (), 0, step), Terminal())]
        other = "other " if step.departures and is_of_jobs else ""
        assert f"  step: they agree at 3 {other}places, exactly" in text
        assert "✓" not in "".join(text)


def test_layouts_of_two_jobs_whose_steps_agree_are_shown_and_change_nothing():
    change = Change("w", "claimed", "[8/tp] on (tp=2)", "[8/tp] on (tp=4)")
    others = [replace(change, tensor=name, before="[8] on (tp=2)") for name in ("layers.0.b", "layers.1.b")]
    agree = StepDifference((), 3, agreement="the jobs agree", is_of_jobs=True)
    difference = Difference((), (), (), (), 3, agree, (change, *others))
    assert not difference
    assert [line.plain for line in difference_lines(difference, Terminal())] == [
        "✓ step: the jobs agree at 3 places, exactly",
        "  layouts differ, as two jobs' may: w [8/tp] on (tp=2) and [8/tp] on (tp=4), and 1 other layout",
        "✓ the jobs agree up to this step's gradients; to compare its update, trace the next step too",
    ]
    assert [found["tensor"] for found in difference.to_json()["relaid"]] == ["w", "layers.0.b", "layers.1.b"]


@pytest.mark.parametrize(
    ("claims", "shapes", "dtypes", "code", "line"),
    [
        ((None, None), (12, 6), (4, 4), 0, "layouts differ, as two jobs' may: w [12] and [6]"),
        (("[48/tp]", None), (12, 12), (4, 4), 0, "layouts differ, as two jobs' may: w [48] and [12], and 1 other"),
        (("[48/tp]", "[24/fsdp]"), (12, 12), (4, 4), 1, "shape  w\n  first   [48]\n  second  [24]"),
        (("[48/tp]", "[24/fsdp/tp]"), (12, 3), (4, 4), 1, "shape  w\n  first   [48]\n  second  [24]"),
        (("[48/tp]", "[48/fsdp/tp]"), (12, 6), (4, 4), 0, "layouts differ, as two jobs' may: w [48/tp] on"),
        ((None, None), (12, 6), (4, 8), 1, "dtype"),
    ],
)
def test_what_two_jobs_may_have_otherwise_is_their_layout(
    tmp_path, monkeypatch, capsys, claims, shapes, dtypes, code, line
):
    """Compare dumps of jobs whose steps agree: the traces themselves are in tests/live/run/traced."""
    agree = StepDifference((), 3, agreement="the jobs agree", is_of_jobs=True)
    paths = [make_dump(tmp_path / name, MESH, {}) for name in "ab"]
    for path, claimed, size, width in zip(paths, claims, shapes, dtypes, strict=True):
        ones = np.ones(size, f"f{width}")
        add_values(path, "w", claimed, dict.fromkeys(range(8), ones), constant=True, written=False)
    assert main(["diff", *map(str, paths)]) == 1
    monkeypatch.setattr("shardviz.check.diff.compare_steps", lambda *_: agree)
    capsys.readouterr()
    assert main(["diff", *map(str, paths)]) == code
    assert line in capsys.readouterr().out


def test_strict_fails_where_anything_was_not_compared(tmp_path):
    one, other = (make_dump(tmp_path / name, MESH, {"w": "[8/tp]"}) for name in ("a", "b"))
    assert main(["diff", str(one), str(other), "--strict"]) == 0
    add_values(other, "w", "[8/tp]", {rank: np.ones(2) for rank in range(8)})
    assert main(["diff", str(one), str(other)]) == 0
    assert main(["diff", str(one), str(other), "--strict"]) == 1
