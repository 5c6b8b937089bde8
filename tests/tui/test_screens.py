"""The screens as text at three sizes, on dumps in order, wrong and damaged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.lanes import at_night
from tests.tui.driving import SIZES, assert_golden, walk, walk_on

if TYPE_CHECKING:
    from pathlib import Path

VIEWS = {"tensors": "1", "mesh": "2", "rank": "3", "findings": "4"}


@pytest.mark.parametrize(
    "size", [SIZES[0], *at_night([(size,) for size in SIZES[1:]])], ids=lambda size: f"{size[0]}x{size[1]}"
)
def test_the_first_screen_says_what_is_wrong_at_every_size(bug: Path, size: tuple[int, int]) -> None:
    assert_golden(walk(bug, size=size), f"first-{size[0]}x{size[1]}")


@pytest.mark.parametrize("files", [*at_night(["healthy", "even_bug"]), "damaged"])
def test_each_view_of_each_dump(files: str, request: pytest.FixtureRequest) -> None:
    views = {**VIEWS, "step": "5"} if files == "damaged" else VIEWS
    for view, shown in walk_on(request.getfixturevalue(files), views, size=(100, 30)).items():
        assert_golden(shown, f"{view}-{files}")


@pytest.mark.parametrize("files", ["lost_stage", *at_night(["stepped", "pipelined", "bug"])])
def test_the_step_of_each_dump(files: str, request: pytest.FixtureRequest) -> None:
    assert_golden(walk(request.getfixturevalue(files), "5", size=(100, 30)), f"step-{files}")


@pytest.mark.parametrize(
    "size", [SIZES[0], *at_night([(size,) for size in SIZES[1:]])], ids=lambda size: f"{size[0]}x{size[1]}"
)
def test_the_step_at_every_size(stepped: Path, size: tuple[int, int]) -> None:
    assert_golden(walk(stepped, "5", "end", size=size), f"step-{size[0]}x{size[1]}")


def test_each_view_on_a_small_terminal_has_the_whole_verdict(even_bug: Path) -> None:
    for view, shown in walk_on(even_bug, {**VIEWS, "step": "5"}, size=(80, 24)).items():
        line = shown.text.splitlines()[0]
        assert line.split("  ")[:2] == [" even_bug", "✗ 1 finding"]
        assert re.findall("[A-Z][a-z]+", line) == ["Tensors", "Mesh", "Rank", "Findings", "Step", "Memory"]
        if view not in ("tensors", "step"):
            assert_golden(shown, f"{view}-80x24")


def test_two_dumps_side_by_side(bug: Path, even_bug: Path) -> None:
    assert_golden(walk(bug, "7", other=even_bug, size=(100, 30)), "compare")


def test_the_sides_of_a_misordered_tensor_and_its_single_ids(even_bug: Path) -> None:
    walks = {"difference": (), "claimed": "v", "held": "v", "ids": ("enter", "+", "+", "+")}
    for side, shown in walk_on(even_bug, walks, size=(100, 44)).items():
        assert_golden(shown, f"side-{side}")


def test_every_kind_of_tensor_is_drawn(shapes: Path) -> None:
    kinds = ("replicated", "uneven", "empty", "scalar", "vector", "strided", "partial", "cube", "flat", "plain")
    walks = {kind: ("home",) if kind == "replicated" else ("down",) for kind in (*kinds, "scattered")}
    for kind, shown in walk_on(shapes, walks, size=(90, 30)).items():
        assert_golden(shown, f"kind-{kind}")


def test_hostile_names_are_shown_as_text(shapes: Path) -> None:
    assert_golden(walk(shapes, "slash", "type red", "enter", size=(120, 30)), "hostile")
