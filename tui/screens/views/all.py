"""All views, in the order of the keys 1, 2, ... that show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .beside import BesideView
from .compare import CompareView
from .explore import ExploreView
from .findings import FindingsView
from .memory import MemoryView
from .mesh import MeshView
from .rank import RankView
from .step import StepView

if TYPE_CHECKING:
    from .view import View

VIEWS: dict[str, type[View]] = {
    kind.NAME: kind
    for kind in (ExploreView, MeshView, RankView, FindingsView, StepView, MemoryView, CompareView, BesideView)
}
KEYS = {name: str(number) for number, name in enumerate(VIEWS, start=1)}
KEYS[BesideView.NAME] = KEYS[CompareView.NAME]  # a job is beside another one, or beside a checkpoint
