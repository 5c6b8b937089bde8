"""Dumps whose rank files are missing or damaged: what was not read is named, neither equal nor changed."""

import numpy as np
import pytest

from shardviz.check.diff import compare
from shardviz.cli import main
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.write import rank_file
from shardviz.layout.mesh import Mesh
from tests.check.records import add_values, without
from tests.dumps import Made, make_dump

MESH = Mesh(("fsdp",), (4,))


def made(path, *, odd=None, written=True, tensors=None):
    """Make a dump with values of which one element may be another, or NaN."""
    values = np.arange(8.0)
    if odd is not None:
        values[odd[0]] = odd[1]
    folder = make_dump(path, MESH, tensors or {"w": "[8/fsdp]"})
    parts = {rank: values[2 * rank : 2 * rank + 2] for rank in range(4)}
    add_values(folder, "b", "[8/fsdp]", parts, role="buffer", written=written)
    return folder


def lose(folder, how, rank=0):
    """Remove a rank's file, or cut it off."""
    path = folder / rank_file(rank)
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:100])
    return folder


def compared(*folders):
    return compare(*(dump_of(read_files(folder, strict=False)) for folder in folders))


@pytest.mark.parametrize("hows", [("missing", "missing"), ("damaged", "missing"), ("damaged", "damaged")])
def test_what_neither_dump_has_read_is_not_in_order(tmp_path, capsys, hows):
    folders = [lose(made(tmp_path / name), how) for name, how in zip("ab", hows, strict=True)]
    assert main(["diff", *map(str, folders)]) == 1
    shown = capsys.readouterr().out
    assert "? nothing changed in what was compared; not compared: what rank 0 held" in shown
    assert "✓" not in shown


def test_two_whole_dumps_are_still_equal(tmp_path, capsys):
    assert main(["diff", str(made(tmp_path / "a")), str(made(tmp_path / "b"))]) == 0
    assert "✓ nothing changed" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["missing", "damaged"])
@pytest.mark.parametrize("written", [True, False])
def test_what_one_dump_has_not_read_is_no_change(tmp_path, how, written):
    part, whole = (made(tmp_path / name, written=written) for name in "ab")
    lose(part, how)
    for folders, which in (((part, whole), "first"), ((whole, part), "second")):
        difference = compared(*folders)
        assert difference.changes == ()
        assert difference.unread == (0,)
        (one,) = difference.not_compared
        assert one.why.startswith("what rank 0 held: ")
        assert f"the {which} dump" in one.why


def test_what_was_read_and_differs_is_still_a_change(tmp_path):
    part, other = lose(made(tmp_path / "a"), "missing"), made(tmp_path / "b", odd=(5, -1.0))
    (change,) = compared(part, other).changes
    assert (change.before, change.after) == ("5", "-1 (1 of 6 elements differ, the first at [5])")


def test_an_element_that_is_nan_is_a_change_where_both_were_read(tmp_path):
    whole, nan = made(tmp_path / "a"), made(tmp_path / "b", odd=(1, np.nan))
    (change,) = compared(whole, nan).changes
    assert (change.before, change.after) == ("1", "nan (1 of 8 elements differ, the first at [1])")
    (change,) = compared(lose(whole, "missing", rank=3), nan).changes
    assert (change.before, change.after) == ("1", "nan (1 of 6 elements differ, the first at [1])")


@pytest.mark.parametrize(("lost", "changed"), [(0, False), (3, True)])
def test_a_tensor_of_ranks_that_were_not_read_may_be_there(tmp_path, lost, changed):
    one, other = (make_dump(tmp_path / name, MESH, {"w": "[8/fsdp]", "stage": "[4]"}) for name in "ab")
    for folder, rank in [(folder, rank) for folder in (one, other) for rank in (1, 2, 3)]:
        without(folder, rank, "stage")
    if changed:
        without(other, 0, "stage")
    lose(other, "missing", lost)
    for folders in ((one, other), (other, one)):
        difference = compared(*folders)
        assert [change.aspect for change in difference.changes] == ["presence"] * changed
        may = [unchecked for unchecked in difference.not_compared if unchecked.tensor == "stage"]
        assert bool(may) is not changed


def test_a_finding_that_only_ranks_show_that_were_not_read_is_not_lost(tmp_path):
    bad = {"w": Made("float32[16/fsdp]", "[16]")}
    whole, part = make_dump(tmp_path / "a", MESH, bad), make_dump(tmp_path / "b", MESH, {"w": "float32[16/fsdp]"})
    assert [one.kind for one in compared(whole, part).lost] != []
    lose(part, "missing")
    difference = compared(whole, part)
    assert difference.lost == ()
    assert [one.kind for one in difference.gained] == ["incomplete"]
    assert any("the checks of the second lack rank 0" in one.why for one in difference.not_compared)
