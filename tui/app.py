"""The viewers of a dump and of a checkpoint: the state that views share, keys that work everywhere, and what reads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.reactive import var

from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.dump.read import read_run
from shardviz.errors import ShardvizError

from .keys import keys
from .loading import load, load_checkpoint, load_compared, load_difference
from .model.document import Document
from .model.pairs import Comparison
from .model.stored import StoredDocument
from .screens.compare_view import CompareView
from .screens.explore_view import ExploreView, FindingsView, StoredView
from .screens.memory_view import MemoryView
from .screens.rank_view import MeshView, RankView
from .screens.step_view import StepView
from .viewer import Viewer, run, view_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardviz.checkpoint.records import Checkpoint


class ShardvizApp(Viewer[Document]):
    """The viewer of a dump.

    Args:
        path: The dump's folder.
        other: A second dump, or a checkpoint, to compare it with.
        tensor: The tensor that it opens on, as `shardviz show` finds it; by default that of the first finding.
        rank: The rank that it opens on.
    """

    VIEWS = (ExploreView, MeshView, RankView, FindingsView, StepView, MemoryView, CompareView)
    BINDINGS = keys("app", hidden=view_keys(VIEWS))

    compared: var[Comparison | None] = var(None)

    def __init__(
        self, path: Path, other: Path | None = None, *, tensor: str | None = None, rank: int | None = None
    ) -> None:
        first = CompareView if other is not None else RankView if rank is not None else ExploreView
        without = "" if other is not None else CompareView.NAME
        watched = [path] if other is None else [path, other]
        super().__init__(*watched, tensor=tensor, rank=rank, first=first.NAME, without=without)
        self.other = other
        self.other_document: Document | None = None

    def on_mount(self) -> None:
        """Start reading."""
        self.call_after_refresh(self.read_again)

    def read_again(self) -> None:
        """Read and check the dumps in threads."""
        self.read_in_thread("load", self.show_read, load, self.path)
        if self.other is not None and not is_checkpoint(self.other):
            self.read_in_thread("load other", self._show_other, load, self.other)

    def _show_other(self, item: object) -> None:
        """Compare with the second dump once it is read, and show what differs once they are compared."""
        if isinstance(item, Document) and not item.is_partial:
            self.other_document = item
            self._compare()
        elif isinstance(item, Comparison):
            self.compared = item
        elif isinstance(item, ShardvizError):
            self.show_failure(item)

    def picture(self) -> str:
        """Draw the chosen tensor as `shardviz show` does."""
        from shardviz.picture.model.subject import of_tensor
        from shardviz.picture.svg.page import svg

        document = self.document
        if self.view_name == "compare" and (drawn := self.query_one(CompareView).picture()):
            return drawn
        if document is None or not document.entries or document.report is None:
            raise ShardvizError("the dump is not checked yet")
        tensor = document.entries[self.selection.entry].tensor
        return svg(of_tensor(document.dump, tensor, self.chosen_name, document.report))

    def watch_document(self) -> None:
        """Offer the keys that need a report, and compare."""
        super().watch_document()
        self._compare()

    def _compare(self) -> None:
        """Compare the dump with the other in a thread, once both are checked, or with a checkpoint."""
        here, there, other = self.document, self.other_document, self.other
        if here is None or here.report is None or other is None:
            return
        if there is not None and there.report is not None:
            self.read_in_thread("compare", self._show_other, load_difference, here, there)
        elif is_checkpoint(other):
            self.read_in_thread("compare", self._show_other, load_compared, here, other)


def view(
    path: Path,
    *,
    other: Path | None = None,
    tensor: str | None = None,
    rank: int | None = None,
    started: Callable[[ShardvizApp], object] | None = None,
) -> None:
    """Open the TUI on a dump, next to a second one if given, or on a tensor and a rank.

    `started` is called with the viewer just before it runs.

    Raises:
        ShardvizError: A folder is not a dump, or can no longer be read; it has no such tensor or rank.
        SystemExit: The viewer failed, and has printed why.
    """
    for folder in (path, other):
        if folder is not None:
            if folder is other and is_checkpoint(folder):
                open_checkpoint(folder)  # so that one that cannot be opened is said before there is a screen
                continue
            num_ranks = read_run(folder).num_ranks
            if rank is not None and not 0 <= rank < num_ranks:
                raise ShardvizError(f"{folder} has no rank {rank}", f"its ranks are 0 to {num_ranks - 1:,}")
    app = ShardvizApp(path, other, tensor=tensor, rank=rank)
    if started is not None:
        started(app)
    run(app)


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
