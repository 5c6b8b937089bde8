"""What one rank is: its coordinate, its host, its groups, how much it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from shardviz.names import printable
from shardviz.picture.holders import mask_of, ranks_text

from ..colours import verdict_style
from ..memory import bytes_of_rank, bytes_text, entries_of_rank

if TYPE_CHECKING:
    from ..document import Document

MARGIN = 9


class RankCard(Static):
    """The card."""

    _lines = -1

    def show(self, document: Document, rank: int) -> None:
        """Show a rank."""
        text = rank_text(document, rank)
        lines = text.plain.count("\n")
        self.update(text, layout=lines != self._lines)
        self._lines = lines


def rank_text(document: Document, rank: int) -> Text:
    """Write what a rank is."""
    dump = document.model.dump
    mesh = dump.mesh
    text = Text.assemble((f"rank {rank}", "bold"), f" of {dump.run.num_ranks:,}", no_wrap=True, overflow="ellipsis")
    if rank in mesh and dump.run.mesh is not None:
        _field(text, "at", mesh.label(rank))
    if rank not in dump.ranks:
        return text.append("\n? no readable file of this rank in the dump", verdict_style("warning"))
    _field(text, "host", printable(dump.ranks[rank].hostname))
    if rank in mesh:
        for axis in mesh.axes:
            group = next(group for group in mesh.groups(axis) if rank in group)
            _field(text, f"along {axis}", "ranks " + ranks_text(mask_of(group)))
    count = sum(len(document.entries[index].tensor.fold) for index in entries_of_rank(document, rank))
    _field(text, "holds", f"{bytes_text(bytes_of_rank(document, rank))} in {count:,} tensor{'' if count == 1 else 's'}")
    return text


def _field(text: Text, name: str, value: str) -> None:
    text.append(f"\n{name:<{MARGIN}} ", "dim").append(value)
