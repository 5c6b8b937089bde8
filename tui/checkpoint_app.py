"""The viewer of a checkpoint: its tensors, which file holds which part of one, its files with sizes, its findings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardviz.checkpoint.open import open_checkpoint
from shardviz.errors import ShardvizError

from .keys import keys
from .model.selection import opened_on
from .model.stored import StoredDocument, named
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
        document = StoredDocument(checkpoint)
        self._opened_on = opened_on(document, tensor, None)
        self.set_reactive(CheckpointApp.document, document)  # type: ignore[misc]
        self.set_reactive(CheckpointApp.selection, self._opened_on)

    def on_mount(self) -> None:
        """Check what is opened already."""
        self._read(is_opened=True)

    def read_again(self) -> None:
        """Open the checkpoint again, and check it."""
        self._read(is_opened=False)

    def _read(self, *, is_opened: bool) -> None:
        reading = partial(_read, self._document, is_opened, partial(self.showing(), self._show_read))
        self.run_worker(reading, thread=True, exclusive=True, group="load")

    @property
    def _document(self) -> StoredDocument:
        assert self.document is not None, "it is there from the start"
        return self.document

    def _show_read(self, item: object) -> None:
        """Show what a thread has read, or why it could not be read again."""
        if isinstance(item, StoredDocument):
            self.show_document(item)
        elif isinstance(item, ShardvizError):
            self.show_failure(item)

    def picture(self) -> str:
        """Draw which file holds which part of the chosen tensor, as `shardviz show` does."""
        from shardviz.picture.svg.stored import stored_svg

        if not self._document.entries:
            raise ShardvizError("the checkpoint has no tensors")
        return stored_svg(self._document.stored(self.selection.entry))


def _read(document: StoredDocument, is_opened: bool, show: Callable[[object], object]) -> None:
    from shardviz.checkpoint.findings import check_checkpoint

    try:
        if not is_opened:
            document = StoredDocument(open_checkpoint(document.checkpoint.path))
            show(document)
        show(replace(document, report=check_checkpoint(document.checkpoint)))
    except ShardvizError as error:
        show(error)


def view_checkpoint(path: Path, *, tensor: str | None = None) -> None:
    """Open the TUI on a checkpoint, on one of its tensors if given.

    Raises:
        ShardvizError: It is not one, or is damaged, or has no such tensor.
        SystemExit: The viewer failed, and has printed why.
    """
    checkpoint = open_checkpoint(path)
    run(CheckpointApp(checkpoint, named(checkpoint, tensor) if tensor is not None else None))
