"""What tests of plans share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported_once() -> None:
    """Import here what every fork of a plan needs, which would otherwise import it for itself: a third of its time."""
    import torch.distributed.pipelining  # noqa: F401
