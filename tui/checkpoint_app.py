"""The viewer of a checkpoint: its tensors, which file holds which part of one, its files with sizes, its findings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardviz.checkpoint.open import open_checkpoint
from shardviz.errors import ShardvizError

from .keys import keys
from .loading import load_checkpoint
from .model.stored import StoredDocument
from .screens.explore_view import FindingsView, StoredView
from .viewer import Viewer, run, view_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardviz.checkpoint.records import Checkpoint


class CheckpointApp(Viewer[StoredDocument]):
    """The viewer of a checkpoint.

    Args:
        checkpoint: The checkpoint, opened: nothing but its headers was read.
        tensor: The name of the tensor that it opens on; by default that of the first finding.
    """

    VIEWS = (StoredView, FindingsView)
    BINDINGS = keys("checkpoint", hidden=view_keys(VIEWS))

    def __init__(self, checkpoint: Checkpoint, tensor: str | None = None) -> None:
        super().__init__(checkpoint.path, tensor=tensor)
        self._checkpoint = checkpoint

    def on_mount(self) -> None:
        """Show what is opened already, and check it."""
        self._show_document(StoredDocument(self._checkpoint))
        self._read(lambda: self._checkpoint)

    def read_again(self) -> None:
        """Open the checkpoint again, and check it."""
        self._read(partial(open_checkpoint, self.path))

    def _read(self, opened: Callable[[], Checkpoint]) -> None:
        self.read_in_thread("load", self.show_read, load_checkpoint, opened)

    def picture(self) -> str:
        """Draw which file holds which part of the chosen tensor, as `shardviz show` does."""
        from shardviz.picture.svg.stored import stored_svg

        if self.document is None or not self.document.entries:
            raise ShardvizError("the checkpoint has no tensors")
        return stored_svg(self.document.stored(self.selection.entry))


def view_checkpoint(path: Path, *, tensor: str | None = None) -> None:
    """Open the TUI on a checkpoint, on one of its tensors if given.

    Raises:
        ShardvizError: It is not one, or is damaged, or has no such tensor.
        SystemExit: The viewer failed, and has printed why.
    """
    checkpoint = open_checkpoint(path)
    if tensor is not None:
        StoredDocument(checkpoint).find(tensor)  # so that what is not there is said before there is a screen
    run(CheckpointApp(checkpoint, tensor))
