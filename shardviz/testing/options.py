"""The plugin's options on pytest's command line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import pytest

    from shardviz.live.world.starting import Method

TIMEOUT = 60.0


def add_options(parser: pytest.Parser) -> None:
    """Add them."""
    group = parser.getgroup("shardviz", "tests that run on the ranks of a mesh")
    group.addoption("--shardviz-ranks", type=int, metavar="N", help="skip tests on meshes of more than N ranks")
    group.addoption("--shardviz-launch", choices=("fork", "spawn", "threads"), help="how ranks are started (fork)")
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


def ranks_seed(config: pytest.Config) -> int:
    """Return the seed that every rank starts a test with."""
    return int(config.getoption("shardviz_seed") or 0)


def is_joined() -> bool:
    """Whether pytest itself runs as a rank, under torchrun or a launcher that sets the same variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
