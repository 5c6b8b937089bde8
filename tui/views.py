"""The views, in the order of the keys 1, 2, ... that lead to them from anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .screens.compare import CompareView
from .screens.explore import ExploreView
from .screens.findings import FindingsView
from .screens.mesh import MeshView
from .screens.rank import RankView
from .screens.step import StepView

if TYPE_CHECKING:
    from .screens.view import View

VIEWS: dict[str, type[View]] = {
    kind.NAME: kind for kind in (ExploreView, MeshView, RankView, FindingsView, StepView, CompareView)
}
KEYS = {name: str(number) for number, name in enumerate(VIEWS, start=1)}
