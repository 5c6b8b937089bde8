"""Reading and checking a dump away from the event loop: what runs in a thread, and what it posts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.dump.read import read_dump
from shardviz.dump.tensors import model_of
from shardviz.errors import ShardvizError

from .document import Document
from .messages import DocumentRead, Progressed, ReadFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from textual.message import Message


def load(path: Path, post: Callable[[Message], object]) -> None:
    """Read a dump, damaged files and all, then check it; post what there is after each."""

    def progressed(read: int, files: int) -> None:
        post(Progressed(read, files))

    try:
        dump = read_dump(path, strict=False, on_progress=progressed)
    except ShardvizError as error:
        post(ReadFailed(str(error)))
        return
    document = Document(path, model_of(dump))
    post(DocumentRead(document))
    post(DocumentRead(checked(document)))


def checked(document: Document) -> Document:
    """Return the document with its report."""
    from shardviz.check.run import check_model

    try:
        return replace(document, report=check_model(document.model))
    except ShardvizError as error:
        return replace(document, failed=error.message)
