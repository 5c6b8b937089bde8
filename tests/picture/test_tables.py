"""Tables whose columns stand below each other, also where names have wide characters."""

from pathlib import Path

import numpy as np
from rich.cells import cell_len

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.model.subject import of_tensor
from shardviz.picture.text.costs import memory_lines
from shardviz.picture.text.ranks import rank_lines, value_lines
from shardviz.picture.text.report import table_lines
from shardviz.picture.text.terminal import ASCII, Terminal, table
from tests.check.records import add_values
from tests.dumps import make_dump

WIDE = "层.注意力.weight"


def _made(path: Path):
    make_dump(path, parse_mesh("tp=2"), {WIDE: "[8/tp, 4]", "w": "[8/tp, 4]"})
    return dump_of(read_files(path))


def _starts(lines, word):
    """Return the columns of the screen at which a word begins."""
    return {cell_len(line.plain[: line.plain.index(word)]) for line in lines if word in line.plain}


def test_columns_are_aligned_by_the_width_on_the_screen():
    lines = table([["name", "bytes"], ["层", "16"], ["weight", "8"]])
    assert [line.plain for line in lines] == ["name    bytes", "层         16", "weight      8"]
    assert len({line.cell_len for line in lines}) == 1


def test_a_tensor_with_a_wide_name_does_not_move_the_columns_of_the_report(tmp_path):
    lines = table_lines(_made(tmp_path / "d"), None, Terminal())
    assert len(lines) == 3
    assert len(_starts(lines[1:], "float32[")) == len(_starts(lines[1:], "[4, 4]")) == 1


def test_a_tensor_with_a_wide_name_does_not_move_the_columns_of_the_memory_table(tmp_path):
    lines = memory_lines(_made(tmp_path / "d"))
    assert len([line for line in lines if "param  " in line.plain and "128" in line.plain]) == 2
    assert len(_starts([line for line in lines if WIDE in line.plain or line.plain.startswith("w ")], "param")) == 1


def test_names_that_are_shorter_than_their_head_do_not_move_the_columns_of_the_report(tmp_path):
    make_dump(tmp_path, parse_mesh("tp=2"), {"w": "[8/tp, 4]"})
    head, row = table_lines(dump_of(read_files(tmp_path)), None, Terminal())
    assert _starts([head], "layout") == _starts([row], "float32[")
    assert _starts([head], "per rank") == _starts([row], "[4, 4]")


def test_ranks_in_ascii_do_not_move_the_columns_of_their_lists(tmp_path):
    folder = make_dump(tmp_path / "d", parse_mesh("dp=8,tp=4"), {"a": "[4]"})
    add_values(folder, "w", "[8/tp, 3]", {rank: np.full((2, 3), 1.5 + rank % 4) for rank in range(32)})
    dump = dump_of(read_files(folder))
    tensor, terminal = dump.first_captured["w"], Terminal(glyphs=ASCII)
    subject = of_tensor(dump, tensor, "w")
    for lines, number in ((rank_lines(subject, terminal), ":8, "), (value_lines(tensor, terminal), "4.5")):
        text = terminal.render(lines)
        assert "0..28 step 4" in text
        assert [row.cell_len for row in lines] == [cell_len(row.plain.translate({0x2026: ".."})) for row in lines]
        assert number in text


def test_the_list_of_ranks_is_a_table(tmp_path):
    dump = _made(tmp_path / "d")
    lines = rank_lines(of_tensor(dump, dump.tensors[0], WIDE), Terminal())
    assert [line.plain for line in lines] == [
        "   ranks  claimed and held",
        "   0      [0:4, 0:4]      ",
        "   1      [4:8, 0:4]      ",
    ]
