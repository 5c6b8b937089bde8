"""The page of one tensor, as a terminal shows it. The golden files are reviewed as diffs."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.model.subject import of_tensor
from shardviz.picture.text.page import page_lines
from shardviz.picture.text.ranks import rank_lines
from shardviz.picture.text.terminal import ASCII, Terminal, line
from tests.dumps import Made, make_dump
from tests.lanes import at_night, recorded
from tests.picture.golden import check_golden

if TYPE_CHECKING:
    from pathlib import Path

HEALTHY = {
    "even": ("fsdp=2,tp=4", "[16/fsdp, 8/tp]"),
    "uneven": ("fsdp=2,tp=4", "[10/fsdp, 7/tp]"),
    "empty": ("fsdp=5", "[6/fsdp, 3]"),
    "strided": ("fsdp=2,tp=4", "[16/tp/fsdp, 8]"),
    "fused_qkv": ("fsdp=2,tp=2", "[12/3/tp, 8]"),
    "replicated": ("replicate=2,shard=2", "[8, 8]"),
    "hsdp": ("replicate=2,shard=3", "bfloat16[6/shard, 8]"),
    "partial": ("dp=2,tp=2", "[8/dp, 8] +tp"),
    "flat": ("replicate=2,shard=4", "[flat(10, 10)/shard]"),
    "flat_with_offset": ("shard=3", "[flat(4, 6) at 5 of 30/shard]"),
    "no_dims": ("tp=4", "[] +tp:max"),
    "one_dim": ("fsdp=2,tp=3", "[13/tp]"),
    "three_dims": ("a=2,b=2,c=2", "[4/a, 6/b, 8/c]"),
    "convolution": ("fsdp=4", "[64/fsdp, 3, 7, 7]"),
    "no_elements": ("tp=2", "[0/tp, 4]"),
    "ranks_1024": ("fsdp=128,tp=8", "[128256/fsdp, 8192/tp]"),
}


def page(tmp_path: Path, mesh: str, tensor: Made | str, terminal: Terminal, *, missing: int | None = None) -> str:
    path = make_dump(tmp_path / "d.shardviz", parse_mesh(mesh), {"layers.0.weight": tensor, "bias": "[3]"})
    if missing is not None:
        (path / f"rank_{missing:05d}.json").unlink()
    dump = dump_of(read_files(path))
    subject = of_tensor(dump, dump.tensors[0], "layers.0.weight")
    return terminal.render([*page_lines(subject, terminal), line(""), *rank_lines(subject, terminal)])


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_tensor_at_80_columns(name: str, tmp_path: Path) -> None:
    mesh, layout = HEALTHY[name]
    text = page(tmp_path, mesh, layout, Terminal(80))
    check_golden(name, text)
    assert max(map(len, text.splitlines())) <= 80


MISORDERED = {
    "misordered_rows": ("fsdp=2,tp=4", Made("[16/fsdp/tp, 8]", "[16/tp/fsdp, 8]")),
    "misordered_uneven": ("fsdp=2,tp=4", Made("[12/fsdp/tp, 12]", "[12/tp/fsdp, 12]")),
    "misordered_line": ("fsdp=2,tp=3", Made("[12/fsdp/tp]", "[12/tp/fsdp]")),
    "other_dim": ("tp=4", Made("[8/tp, 8]", "[8, 8/tp]")),
    "misordered_1024": ("fsdp=128,tp=8", Made("[128256/fsdp/tp, 8192]", "[128256/tp/fsdp, 8192]")),
}
SMALL = [name for name in MISORDERED if not name.endswith("1024")]


@pytest.mark.parametrize(
    ("name", "width"),
    [*product(MISORDERED, [80]), *at_night(product(SMALL, [160]), recorded), *at_night([("misordered_1024", 160)])],
)
def test_claimed_and_held_are_both_drawn_where_they_differ(name: str, width: int, tmp_path: Path) -> None:
    mesh, made = MISORDERED[name]
    text = page(tmp_path, mesh, made, Terminal(width))
    check_golden(f"{name}_{width}", text)
    assert max(map(len, text.splitlines())) <= width


def test_a_terminal_without_box_drawing_gets_ascii(tmp_path: Path) -> None:
    mesh, made = MISORDERED["misordered_rows"]
    text = page(tmp_path, mesh, made, Terminal(80, ASCII))
    check_golden("misordered_ascii", text)
    assert text.isascii()


def test_a_rank_without_a_file_is_marked_on_the_part_that_it_claims(tmp_path: Path) -> None:
    check_golden("missing_rank", page(tmp_path, "fsdp=3", "[9/fsdp, 4]", Terminal(80), missing=1))


def test_a_tensor_that_claims_nothing_is_drawn_as_it_is_held(tmp_path: Path) -> None:
    check_golden("plain", page(tmp_path, "tp=2", Made(None, "[8/tp, 4]", shape=(8, 4)), Terminal(80)))


def test_values_that_are_not_the_tensors_own_are_counted(tmp_path: Path) -> None:
    ids = {0: np.array([[3, 1], [4, 2]]), 1: np.array([[0, -1], [0, 10]])}
    text = page(tmp_path, "tp=2", Made("[4/tp, 2]", ids=ids), Terminal(80))
    check_golden("scattered", text)
    assert "own ids, scattered: 4" in text
    assert "ids of other tensors: 1; zeros: 2; no ids: 1" in text


def test_colors_leave_the_characters_alone(tmp_path: Path) -> None:
    mesh, made = MISORDERED["misordered_rows"]
    plain = page(tmp_path, mesh, made, Terminal(80))
    colored = page(tmp_path, mesh, made, Terminal(80, color=True))
    assert "\x1b[" in colored
    assert [shown.rstrip() for shown in _without_escapes(colored).splitlines()] == plain.splitlines()


def _without_escapes(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)
