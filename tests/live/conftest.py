"""What tests of worlds share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.live import standing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def late_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for ranks that all raise, however far apart a busy machine lets them: a world ends with the last of them."""
    monkeypatch.setattr("shardviz.live.world.launching.GRACE", 60.0)


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test has a temporary folder of its own, and leaves nothing of shardviz's in it; no other ranks run."""
    standing.end_all()
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert list(folder.glob("shardviz-*")) == []
