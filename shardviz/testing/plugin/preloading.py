"""Start the fork server while pytest still collects, then give it the test modules.

The process imports torch first, then waits for the list of modules, which is known when collection has ended. Ranks
then find everything imported, and a test starts in the time of a fork.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardviz.live import world
from shardviz.testing.plugin.on_ranks.modules import source_of
from shardviz.testing.plugin.options import launch_method

if TYPE_CHECKING:
    from collections.abc import Sequence

SERVER = "shardviz.testing.plugin.on_ranks.server"
VARIABLE = "SHARDVIZ_TEST_MODULES"


class Preload:
    """Starts the fork server at the first sign of a test on ranks; ends with collection."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder: Path | None = None
        if launch_method(config) == "spawn":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="shardviz-modules-"))
        os.environ[VARIABLE] = str(self._folder / "modules")
        world.prepare(launch_method(config), (SERVER,))
        del os.environ[VARIABLE]

    def finish(self, items: Sequence[pytest.Item]) -> None:
        """Tell which modules tests for ranks are in. Only the first call counts."""
        if self._folder is None or (self._folder / "modules").exists():
            return
        sources = {source_of(item): None for item in items if isinstance(item, pytest.Function)}
        unfinished = self._folder / "modules.tmp"
        unfinished.write_bytes(pickle.dumps((tuple(sys.path), list(sources))))
        unfinished.rename(self._folder / "modules")

    def end(self) -> None:
        """Leave nothing behind."""
        self.finish([])
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
