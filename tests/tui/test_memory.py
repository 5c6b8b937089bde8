"""The memory view: bytes of modules with layers folded, how uneven ranks are, and ranks as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from shardviz.dump.costs import memory_table
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from shardviz.tui.loading import checked
from shardviz.tui.model.document import Document
from shardviz.tui.model.tree import lines_of
from shardviz.tui.model.usage import bar, usage_of
from tests.dumps import Made, make_dump
from tests.lanes import nightly
from tests.tui.driving import walk, walk_on
from tests.tui.steps import add_to_ranks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    layers = {f"layers.{layer}.w": "[8/tp, 4]" for layer in range(12)}
    return make_dump(tmp_path / "uneven.shardviz", parse_mesh("tp=4"), {"first": "[9/tp, 16]", **layers})


def test_the_sums_are_those_that_show_prints(uneven: Path) -> None:
    document = checked(Document(uneven, dump_of(read_files(uneven))))
    spread, sums = document.usage.spread(), [sum(sizes) for sizes in memory_table(document.dump).by_rank.values()]
    assert (spread.most, spread.mean, spread.least) == (max(sums), sum(sums) / len(sums), min(sums))


def test_each_line_has_the_bytes_of_one_of_its_layers_and_its_imbalance(uneven: Path) -> None:
    usage = usage_of(Document(uneven, dump_of(read_files(uneven))))
    lines = lines_of(usage.tree)
    assert ["/".join(line.path) for line in lines] == ["first", "layers.[0-11]", "layers.[0-11]/w"]
    spreads = [usage.spread(line) for line in lines]
    assert [(spread.most, spread.mean, round(spread.imbalance, 2)) for spread in spreads] == [
        (192, 144.0, 1.33),
        (12 * 32, 12 * 32.0, 1.0),
        (12 * 32, 12 * 32.0, 1.0),
    ]
    largest = lines_of(usage.tree, order=usage.largest_first)
    assert [line.path[-1] for line in largest] == ["layers.[0-11]", "w", "first"]


def test_ranks_of_another_stage_make_no_imbalance(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "pp.shardviz", parse_mesh("pp=2"), {"first": "[4]", "last": "[4]"})
    stages = {0: "first", 1: "last"}
    add_to_ranks(
        path,
        lambda rank: structs.replace(rank, tensors=tuple(t for t in rank.tensors if t.name == stages[rank.rank])),
    )
    usage = usage_of(Document(path, dump_of(read_files(path))))
    assert [usage.spread(line).imbalance for line in lines_of(usage.tree)] == [1.0, 1.0]
    assert usage.spread().imbalance == 1.0


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.0, "    "), (1.0, "████"), (0.5, "██  "), (0.001, "▏   "), (0.28, "█▏  "), (7.0, "████")]
)
def test_bars_are_to_scale_and_nothing_that_is_there_is_unseen(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn


def test_the_view_says_who_is_fullest_and_opens_a_rank(uneven: Path, tmp_path: Path) -> None:
    walks = walk_on(uneven, {"memory": "6", "last": ("tab", "end"), "rank": ("enter",), "each": "6e"})
    text = walks["memory"].text
    assert "Memory: ranks 0-2 have most, 576 B; mean 528 B, imbalance 1.09" in text
    assert "param 576 B" in text
    assert "12 × 32 B" in text
    lines = [line.replace("█", "") for line in text.splitlines()]
    assert any("ranks 0-2                  576 B" in line and "3 ranks" in line for line in lines)
    assert any("rank 3                     384 B" in line and "tp=3" in line for line in lines)
    assert "4 ranks on 2 lines: e shows each" in text
    assert [f"rank {rank} " in walks["each"].text for rank in range(4)] == [True] * 4
    assert "rank 3 of 4" in walks["rank"].text
    even = make_dump(tmp_path / "even.shardviz", parse_mesh("tp=4"), {"w": "[8/tp]"})
    assert "Memory: 8 B on every rank" in walk(even, "6").text


def test_uneven_modules_are_marked_and_sorted(tmp_path: Path) -> None:
    tensors = {"even": "[64/tp]", "odd": "[9/tp, 64]", "small": "[8/tp]"}
    path = make_dump(tmp_path / "odd.shardviz", parse_mesh("tp=2"), tensors)
    walks = walk_on(path, {"model": "6", "largest": "o"}, size=(120, 40))
    rows = {name: [line[2:].split()[:2] for line in shown.text.splitlines()[3:6]] for name, shown in walks.items()}
    assert rows["model"] == [["even", "128"], ["!", "odd"], ["small", "16"]]
    assert rows["largest"] == [["!", "odd"], ["even", "128"], ["small", "16"]]


@nightly
def test_a_dump_without_ids_or_tensors_says_so(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "none.shardviz", parse_mesh("tp=2"), {})
    assert "Memory: the dump has no tensors that take any" in walk(path, "6").text
    plain = make_dump(tmp_path / "plain.shardviz", parse_mesh("tp=2"), {"w": Made(None, shape=(4,))})
    assert "w " in walk(plain, "6").text
