"""Stamped DCP folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def is_stamped_dcp(path: Path) -> bool:
    """Whether a folder is a stamped copy that torch.distributed.checkpoint wrote."""
    return False
