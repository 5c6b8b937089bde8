"""Real checkpoints: written once by torch on real ranks, copied for tests that damage them."""

from __future__ import annotations

import pickle
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from shardviz.live.world import launch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COORDS = [f"fsdp={rank // 2}, tp={rank % 2}" for rank in range(4)]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `saving.save`."""
    folder = tmp_path_factory.mktemp("saved")
    launch("tests.checkpoint.saving:save", (str(folder),), num_ranks=4, coords=COORDS)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy one of the formats, to change it."""

    def copy(name: str) -> Path:
        return shutil.copytree(saved / name, tmp_path / name)

    return copy


@pytest.fixture
def edited(copied: Callable[[str], Path]) -> Callable[..., Path]:
    """Copy a DCP folder and change its metadata, with torch's own classes."""

    def edit(change: Callable[[Any], object], name: str = "dcp") -> Path:
        folder = copied(name)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return folder

    return edit
