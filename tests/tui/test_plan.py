"""A plan in the viewer: ranks that nobody started, on meshes of a stage or flattened from two axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lanes import at_night
from tests.tui.driving import walk_on

if TYPE_CHECKING:
    from pathlib import Path


def test_a_tensor_on_a_flattened_mesh_is_shown_in_every_view(plan: Path) -> None:
    views = walk_on(plan, {view: [view] for view in "123456"})
    assert "fsdp_tp" in views["1"].text
    assert "mesh (pp=2, fsdp=64, tp=8)" in views["2"].text
    assert "a step adds at most: activations 3 MiB · gathered 1 MiB" in views["6"].text
    assert all(shown.exited is None for shown in views.values())


@pytest.mark.parametrize("size", [(80, 24), *at_night([((200, 60),)])])
def test_the_rank_view_shows_where_a_part_is_that_has_no_values(plan: Path, size: tuple[int, int]) -> None:
    (shown,) = walk_on(plan, {"": ["3"]}, size=size).values()
    assert "a plan has no values" in shown.text
    assert "┌─" in shown.text


def test_what_a_plan_does_not_know_is_not_drawn_as_held_by_nobody(plan: Path) -> None:
    walks = walk_on(plan, {"held": ("v",), "difference": ("v",), "mesh": ("2",)}, size=(120, 40))
    assert not any("nobody" in shown.text for shown in walks.values())
    assert all("? not known: drawn as claimed" in walks[side].text for side in ("held", "difference"))
