"""The plugin's options on pytest's command line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import pytest

    from shardviz.live.world.starting import Method

TIMEOUT = 60.0
PART = 0.7
"""Of pytest-timeout's time, which counts fixtures and the start of ranks too."""


def add_options(parser: pytest.Parser) -> None:
    """Add them."""
    group = parser.getgroup("shardviz", "tests that run on the ranks of a mesh")
    group.addoption("--shardviz-ranks", type=int, metavar="N", help="skip tests on meshes of more than N ranks")
    group.addoption("--shardviz-launch", choices=("fork", "spawn"), help="how ranks are started (fork)")
    group.addoption(
        "--shardviz-timeout", type=float, metavar="SECONDS", help=f"how long a test may take on its ranks ({TIMEOUT:g})"
    )
    group.addoption("--shardviz-seed", type=int, metavar="N", help="the seed of torch, numpy and random on ranks (0)")


def launch_method(config: pytest.Config) -> Method:
    """Return how ranks are started."""
    return cast("Method", config.getoption("shardviz_launch") or "fork")


def ranks_timeout(config: pytest.Config) -> float:
    """Return how many seconds a test may take on its ranks."""
    return float(config.getoption("shardviz_timeout") or TIMEOUT)


def timeout_of(item: pytest.Function, spmd_timeout: float | None) -> float:
    """Return how many seconds a test may take on its ranks, by its own word or the session's.

    If pytest-timeout allows less, ranks are given a part of that: they can say in which call they hang, it cannot.
    """
    seconds = spmd_timeout or ranks_timeout(item.config)
    marker = item.get_closest_marker("timeout")
    marked = (marker.args[0] if marker.args else marker.kwargs.get("timeout")) if marker else None
    marked = marked if marked is not None else item.config.getoption("timeout", None)
    return min(seconds, PART * float(marked)) if isinstance(marked, int | float) and marked > 0 else seconds


def ranks_seed(config: pytest.Config) -> int:
    """Return the seed that every rank starts a test with."""
    return int(config.getoption("shardviz_seed") or 0)


def is_joined() -> bool:
    """Whether pytest itself runs as a rank, under torchrun or a similar launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
