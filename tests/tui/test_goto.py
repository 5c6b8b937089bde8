"""`g` from anywhere: to a rank, a tensor or an element, and where that is said while it is typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.region import Region
from shardviz.tui.loading import checked
from shardviz.tui.model.document import Document
from shardviz.tui.model.selection import Target, about, parse_place, parse_target
from tests.tui.conftest import MESH
from tests.tui.driving import walk, walk_on

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.layout.mesh import Mesh
    from shardviz.tui.app import ShardvizApp


@dataclass(frozen=True)
class Entry:
    """A tensor, or identical layers of one; `tensor` has its shape alone."""

    names: tuple[str, ...]
    tensor: Region


ENTRIES = (
    Entry(("embed.weight",), Region.whole((4, 5))),
    Entry(tuple(f"layers.{layer}.wq.weight" for layer in range(40)), Region.whole((6, 4))),
    Entry(("norm",), Region.whole((9,))),
)


@dataclass(frozen=True)
class Known:
    """What is known of a document."""

    mesh: Mesh | None
    entries: tuple[Entry, ...] = ENTRIES


def parsed(text: str, entry: int = 0, mesh: Mesh | None = MESH) -> Target | str:
    return parse_target(text, Known(mesh), entry, ENTRIES[entry].names[0])


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("rank 3", Target(rank=3)),
        ("r3", Target(rank=3)),
        ("3", Target(rank=3)),
        ("fsdp=1,tp=2", Target(rank=6)),
        ("tp=2", Target(rank=2)),
        ("embed.weight", Target(0, "embed.weight")),
        ("layers.37", Target(1, "layers.37.wq.weight")),
        ("wq", Target(1, "layers.0.wq.weight", others=39)),
        ("NORM", Target(2, "norm")),
        ("1, 2", Target(0, "embed.weight", (1, 2))),
        ("[1,2]", Target(0, "embed.weight", (1, 2))),
        ("-1 -1", Target(0, "embed.weight", (3, 4))),
        ("#0", Target(0, "embed.weight", (0, 0))),
        (" # 19 ", Target(0, "embed.weight", (3, 4))),
        ("norm[8]", Target(2, "norm", (8,))),
        ("layers.7.wq.weight [5, 3]", Target(1, "layers.7.wq.weight", (5, 3))),
        ("norm #4", Target(2, "norm", (4,))),
    ],
)
def test_a_short_text_says_where_to_go(text: str, target: Target) -> None:
    assert parsed(text) == target


def test_a_number_alone_is_an_element_of_a_tensor_with_one_dim() -> None:
    assert parsed("3", 2) == Target(2, "norm", (3,))
    assert parsed("rank 3", 2) == Target(rank=3)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("rank 8", "there is no rank 8: the mesh is (fsdp=2, tp=4)"),
        ("pp=0", "there is no axis pp"),
        ("tp=4", "tp=4 is not on the mesh"),
        ("4, 0", "dim 0 has indices 0 to 3"),
        ("#20", "elements go from #0 to #19"),
        ("1 2 3", "enter 2 numbers for shape [4, 5]"),
        ("norm[9]", "dim 0 has indices 0 to 8"),
        ("nrom", "no tensor has nrom in its name; did you mean norm?"),
        ("", "rank 7 · fsdp=1 tp=3 · a name"),
    ],
)
def test_what_is_nowhere_is_answered_with_what_there_is(text: str, answer: str) -> None:
    found = parsed(text)
    assert isinstance(found, str)
    assert answer in found


def test_a_checkpoint_has_no_ranks() -> None:
    assert parsed("rank 3", mesh=None) == "a checkpoint has no ranks"
    assert isinstance(parsed("3", mesh=None), str)


def test_a_tensor_without_elements_and_a_scalar() -> None:
    assert parse_place("#0", (0, 4)) == "shape [0, 4] has no elements"
    assert parse_place("0 0", (0, 4)) == "shape [0, 4] has no elements"
    assert parse_place("#0", ()) == ()


def where(app: ShardvizApp) -> tuple[object, ...]:
    chosen = app.selection
    return app.view_name, app.chosen_name, chosen.plane and chosen.plane.at, chosen.rank


def test_ranks_tensors_and_elements_are_reached_from_every_view(even_bug: Path) -> None:
    walks = {
        "element": ("4", "g", "type 7, 5", "enter"),
        "rank from findings": ("4", "g", "type rank 6", "enter"),
        "rank on the mesh": ("2", "g", "type fsdp=0 tp=3", "enter"),
        "layer from the mesh": ("2", "g", "type layers.2", "enter"),
        "another's element on the rank's view": ("3", "g", "type embedding#9", "enter"),
        "nowhere": ("g", "type 99 0", "enter", "escape"),
        "back": ("g", "escape"),
    }
    found = {name: shown.result for name, shown in walk_on(even_bug, walks, look=where).items()}
    last = ("rank", "embedding", (1, 1), 3)
    assert found == {
        "element": ("explore", "layers.0.weight", (7, 5), 1),
        "rank from findings": ("rank", "layers.0.weight", (7, 5), 6),
        "rank on the mesh": ("mesh", "layers.0.weight", (7, 5), 3),
        "layer from the mesh": ("explore", "layers.2.weight", (7, 5), 3),
        "another's element on the rank's view": last,
        "nowhere": last,
        "back": last,
    }


def said(path: Path, text: str) -> str:
    """Return what the dialog says of a text."""
    document = checked(Document(path, dump_of(read_files(path))))
    target = parse_target(text, document, 0, document.entries[0].names[0])
    assert isinstance(target, Target)
    return about(document, target)


def test_the_dialog_says_where_an_element_is_and_who_has_it_while_it_is_typed(bug: Path, healthy: Path) -> None:
    typed = walk(bug, "g", "type [4, 3]").text
    assert "[4, 3] of weight  float32[12/fsdp/tp, 12]" in typed
    assert "✗ it is not where the placements claim" in typed
    text = said(bug, "[4, 3]")
    assert "[4, 3] of weight  float32[12/fsdp/tp, 12]" in text
    assert "claimed  by rank 2 (fsdp=0 tp=2), there at [0, 3]" in text
    assert "held     by rank 1 (fsdp=0 tp=1), there at [1, 3]" in text
    assert "✗ it is not where the placements claim" in text
    text = said(healthy, "up.bias[23]")
    assert "claimed  by rank 7 (fsdp=1 tp=3), there at [2]" in text
    assert "held     by rank 7 (fsdp=1 tp=3), there at [2]" in text
    assert "not where" not in text


def test_an_element_with_copies_is_on_all_of_their_ranks(shapes: Path) -> None:
    text = said(shapes, "uneven[6, 4]")
    assert "claimed  by ranks 2,5,8,11, there at [0, 4]" in text
    assert "held     by ranks 2,5,8,11, there at [0, 4]" in text


def test_scattered_elements_are_found_one_by_one(shapes: Path) -> None:
    text = said(shapes, "scattered[1, 2]")
    assert "held     by ranks 0,3,6,9, there at [0, 0]" in text


def test_a_layer_that_the_filters_leave_out_is_shown_when_gone_to(even_bug: Path) -> None:
    shown = walk(even_bug, "f", "g", "type embedding", "enter")
    assert "embedding  [32/tp/fsdp, 8]" in shown.text
    assert "of 4" not in shown.text.splitlines()[1]


def test_the_ranks_numbers_scroll_to_the_element_gone_to(bug: Path) -> None:
    walks = walk_on(bug, {"first": "3", "gone": ("g", "type [4, 11]", "enter")}, size=(80, 24))
    assert "11" not in walks["first"].text.splitlines()[3]
    assert "✗4,11" in walks["gone"].text
