"""pytest's report of a test that ran on ranks: the rank's own traceback, and the command to view its dump."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.testing.plugin.launching import STORY

if TYPE_CHECKING:
    import pytest


def tell(item: pytest.Item, report: pytest.TestReport) -> None:
    """Replace the report of pytest's own process on a test that did not pass."""
    story = item.stash.get(STORY, None)
    if story is not None:
        del item.stash[STORY]
        story.put_into(report)
    folder = getattr(item, "funcargs", {}).get("shard_dump")
    if folder is not None and folder.is_dir():
        report.sections.append(("dump", f"look at it with: shardviz view {folder}"))
