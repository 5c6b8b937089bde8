"""Mark the suite, so that a lane of its own can run it: `-m bugs`, or `-m "not bugs"`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "bugs: silent bugs and their right twins, two probes each on real ranks")
