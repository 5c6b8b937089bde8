"""What a user does with a folder: the verbs, the page, and the viewer until it has painted what it read."""

from __future__ import annotations

import asyncio
import contextlib
import io
from typing import TYPE_CHECKING

from shardviz.cli import main
from shardviz.errors import EXIT_BUG, EXIT_USAGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCREEN = (120, 40)
NOTHING_CHECKED = "error: nothing "
"""How `check` and `diff` begin after they have looked at everything, and could judge nothing."""


def verb(*arguments: str) -> None:
    """Run a verb and throw away what it prints.

    Raises:
        RuntimeError: The verb refused its input, or has a bug: the time that took says nothing.
    """
    talk = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(talk):
        code = main(arguments)
    refused = "error:" in talk.getvalue() and NOTHING_CHECKED not in talk.getvalue()
    if code == EXIT_BUG or (code == EXIT_USAGE and refused):
        raise RuntimeError(f"shardviz {' '.join(arguments)}: {talk.getvalue()}")


def check(*folders: Path) -> None:
    """Check a dump or a checkpoint."""
    verb("check", str(folders[0]))


def show(*folders: Path) -> None:
    """List the tensors of a dump or a checkpoint."""
    verb("show", str(folders[0]), "--all")


def html(*folders: Path) -> None:
    """Write the page of a dump or a checkpoint."""
    verb("show", str(folders[0]), "-o", str(folders[0].parent / "page.html"))


def memory(*folders: Path) -> None:
    """Show what each rank holds in bytes."""
    verb("show", str(folders[0]), "--memory")


def comms(*folders: Path) -> None:
    """Show the collectives of a step."""
    verb("show", str(folders[0]), "--comms")


def step(*folders: Path) -> None:
    """Show the modules of a step."""
    verb("show", str(folders[0]), "--step", "--all")


def diff(*folders: Path) -> None:
    """Compare the first folder with the last."""
    verb("diff", str(folders[0]), str(folders[-1]))


def diff_html(*folders: Path) -> None:
    """Write the page that compares the first folder with the last."""
    verb("diff", str(folders[0]), str(folders[-1]), "-o", str(folders[0].parent / "diff.html"))


def view(*folders: Path) -> None:
    """Open a dump or a checkpoint in the viewer, and wait until what was read and checked is painted."""
    from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
    from shardviz.tui.app import CheckpointApp, ShardvizApp

    async def run() -> None:
        app = CheckpointApp(open_checkpoint(folders[0])) if is_checkpoint(folders[0]) else ShardvizApp(folders[0])
        async with app.run_test(size=SCREEN) as pilot:
            await pilot.pause()  # reading begins after the first frame
            await app.workers.wait_for_complete()
            await pilot.pause()

    asyncio.run(run())


USES: dict[str, Callable[..., None]] = {
    "check": check,
    "show": show,
    "html": html,
    "memory": memory,
    "comms": comms,
    "step": step,
    "diff": diff,
    "diff html": diff_html,
    "view": view,
}
