"""`show DUMP -o x.svg` without a name: the tensor of the only finding is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.cli import main
from shardviz.errors import EXIT_USAGE
from shardviz.layout.mesh import parse_mesh
from tests.check.checking import arange, reordered
from tests.dumps import make_dump

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

IN_ORDER = "[8/tp, 2]"
EXCHANGED = arange(8, 2)[[4, 5, 6, 7, 0, 1, 2, 3]]


def test_the_tensor_of_the_only_finding_is_drawn(tmp_path: Path) -> None:
    wrong = reordered(EXCHANGED, IN_ORDER, "tp=2")
    dump = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=2"), {"a": IN_ORDER, "b": wrong, "c": IN_ORDER})
    drawn, named = tmp_path / "drawn.svg", tmp_path / "named.svg"
    assert main(["show", str(dump), "-o", str(drawn)]) == 0
    assert main(["show", str(dump), "b", "-o", str(named)]) == 0
    assert drawn.read_bytes() == named.read_bytes()


def test_of_several_findings_the_tensors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = reordered(EXCHANGED, IN_ORDER, "tp=2")
    other = reordered(arange(8, 2)[::-1], IN_ORDER, "tp=2")
    dump = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=2"), {"a": IN_ORDER, "b": one, "c": other})
    assert main(["show", str(dump), "-o", str(tmp_path / "x.svg")]) == EXIT_USAGE
    assert capsys.readouterr().err == (
        "shardviz: error: an SVG shows one tensor, and 2 tensors have findings\n"
        "Hint: name one of b, c; or use --format html for all\n"
    )
