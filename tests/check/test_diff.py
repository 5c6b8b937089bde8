"""What changed between two dumps: said tensor by tensor, and nothing where nothing did."""

from dataclasses import replace

import numpy as np
import pytest

from shardviz.check.diff import Change, Difference, compare
from shardviz.check.step.runs.departure import StepDifference
from shardviz.cli import main
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import Mesh
from shardviz.picture.text.difference import difference_lines
from shardviz.picture.text.terminal import Terminal
from tests.check.records import add_values
from tests.dumps import Made, make_dump

MESH = Mesh(("fsdp", "tp"), (2, 4))


def made(path, tensors, mesh=MESH):
    return dump_of(read_files(make_dump(path, mesh, tensors)))


def test_a_dump_is_not_different_from_itself(tmp_path):
    dump = made(tmp_path / "a", {"w": "float32[12/tp/fsdp, 12]", "b": "float32[12/tp]"})
    assert not compare(dump, dump)


def test_a_misordered_tensor_shows_as_held_elsewhere_and_as_a_finding_gained(tmp_path):
    before = made(tmp_path / "a", {"w": "float32[16/fsdp/tp, 12]"})
    after = made(tmp_path / "b", {"w": Made("float32[16/fsdp/tp, 12]", "[16/tp/fsdp, 12]")})
    difference = compare(before, after)
    (change,) = difference.changes
    assert (change.tensor, change.aspect) == ("w", "held")
    assert (change.before, change.after) == (
        "[16/fsdp/tp, 12] on (fsdp=2, tp=4)",
        "[16/tp/fsdp, 12] on (fsdp=2, tp=4)",
    )
    assert [finding.kind for finding in difference.gained] == ["misordered"]
    assert difference.lost == ()
    assert [finding.kind for finding in compare(after, before).lost] == ["misordered"]


def test_another_mesh_is_another_layout_and_no_finding(tmp_path):
    before = made(tmp_path / "a", {"w": "float32[12/tp, 12]"})
    after = made(tmp_path / "b", {"w": "float32[12/tp, 12]"}, Mesh(("fsdp", "tp"), (4, 2)))
    difference = compare(before, after)
    assert [(change.aspect, change.after) for change in difference.changes] == [
        ("claimed", "[12/tp, 12] on (fsdp=4, tp=2)")
    ]
    assert difference.gained == difference.lost == ()


def test_tensors_that_come_and_go_are_named(tmp_path):
    before = made(tmp_path / "a", {"old": "float32[4]", "kept": "float32[4]"})
    after = made(tmp_path / "b", {"kept": "float32[4]", "new": "float32[8]"})
    changes = {change.tensor: (change.before, change.after) for change in compare(before, after).changes}
    assert changes == {"old": ("float32[4]", "absent"), "new": ("absent", "float32[8]")}


def test_another_dtype_and_shape_are_told_apart(tmp_path):
    before = made(tmp_path / "a", {"w": "float32[12]"})
    after = made(tmp_path / "b", {"w": "bfloat16[16]"})
    aspects = {change.aspect for change in compare(before, after).changes}
    assert {"shape", "dtype"} <= aspects


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


def test_values_of_which_a_rank_claims_another_shape_are_not_compared(tmp_path):
    paths = [make_dump(tmp_path / name, MESH, {"b": "[8]"}) for name in "ab"]
    for path, last in zip(paths, ("[16/tp, 2]", "[8/tp]"), strict=True):
        add_values(path, "w", "[8/tp]", {rank: np.ones(2) * (last != "[8/tp]") for rank in range(7)})
        add_values(path, "w", last, {7: np.ones(2) if last == "[8/tp]" else np.ones((4, 2))})
    (one,) = compare(*(dump_of(read_files(path)) for path in paths)).not_compared
    assert "rank 7 claims a part that lies outside [8]" in one.why


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


def test_layouts_of_two_jobs_whose_steps_agree_are_shown_and_change_nothing():
    change = Change("w", "claimed", "[8/tp] on (tp=2)", "[8/tp] on (tp=4)")
    others = [replace(change, tensor=name, before="[8] on (tp=2)") for name in ("layers.0.b", "layers.1.b")]
    agree = StepDifference((), 3, agreement="the jobs agree", is_of_jobs=True)
    difference = Difference((), (), (), (), 3, agree, (change, *others))
    assert not difference
    assert [line.plain for line in difference_lines(difference, Terminal())] == [
        "✓ step: the jobs agree at 3 places, exactly",
        "  layouts differ, as two jobs' may: w [8/tp] on (tp=2) and [8/tp] on (tp=4), and 1 other layout",
        "✓ the jobs agree",
    ]
    assert [found["tensor"] for found in difference.to_json()["relaid"]] == ["w", "layers.0.b", "layers.1.b"]


@pytest.mark.parametrize(
    ("claims", "shapes", "dtypes", "code", "line"),
    [
        ((None, None), (12, 6), (4, 4), 0, "layouts differ, as two jobs' may: w [12] and [6]"),
        (("[48/tp]", None), (12, 12), (4, 4), 0, "layouts differ, as two jobs' may: w [48] and [12], and 1 other"),
        (("[48/tp]", "[24/fsdp]"), (12, 12), (4, 4), 1, "shape  w\n  before  [48]\n  after   [24]"),
        (("[48/tp]", "[24/fsdp/tp]"), (12, 3), (4, 4), 1, "shape  w\n  before  [48]\n  after   [24]"),
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


def test_two_dumps_that_share_nothing_to_compare_are_an_error(tmp_path, capsys):
    paths = [make_dump(tmp_path / name, MESH, {}) for name in ("a", "b")]
    assert main(["diff", *map(str, paths)]) == 2
    assert "nothing was compared: neither dump has a weight or a buffer" in capsys.readouterr().err
    kept = [make_dump(tmp_path / name, MESH, {"w": "[8/tp]"}) for name in ("c", "d")]
    assert main(["diff", *map(str, kept)]) == 0
    assert main(["diff", str(paths[0]), str(kept[0])]) == 1


def test_strict_fails_where_anything_was_not_compared(tmp_path):
    one, other = (make_dump(tmp_path / name, MESH, {"w": "[8/tp]"}) for name in ("a", "b"))
    assert main(["diff", str(one), str(other), "--strict"]) == 0
    add_values(other, "w", "[8/tp]", {rank: np.ones(2) for rank in range(8)})
    assert main(["diff", str(one), str(other)]) == 0
    assert main(["diff", str(one), str(other), "--strict"]) == 1
