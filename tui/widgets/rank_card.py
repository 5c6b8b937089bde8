"""One rank in a few lines: its host, how much it holds, its coordinate and its group along every axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from shardviz.picture.model.holders import ranks_in_words
from shardviz.text import bytes_text, counted, printable

from ..colours import verdict_style

if TYPE_CHECKING:
    from ..model.document import Document


class RankCard(Static):
    """A rank's host, the bytes that it holds, and for each axis its position and its group."""

    _of: tuple[Document, int] | None = None

    def show(self, document: Document, rank: int) -> None:
        """Show a rank."""
        if self._of is None or self._of[0] is not document or self._of[1] != rank:
            self._of = (document, rank)
            self.update(rank_text(document, rank))


def rank_text(document: Document, rank: int) -> Text:
    """Write the lines of a rank."""
    files = document.dump.files
    mesh = files.mesh
    text = Text.assemble((f"rank {rank}", "bold"), f" of {files.run.num_ranks:,}")
    if rank in files.ranks:
        found = [one for one in document.counted if rank in one.tensor.shards]
        count, taken = sum(len(one.widths) for one in found), sum(one.on(rank) for one in found)
        host = printable(files.ranks[rank].hostname)
        text.append(f" on {host}" if host else "")
        text.append(f"\nholds {bytes_text(taken)} in {counted(count, 'tensor')}")
    elif document.is_partial:
        text.append("\n… not read yet", "dim")
    else:
        text.append("\n? the dump has no readable file for this rank", verdict_style("warning"))
    if rank in mesh:
        width = max(map(len, mesh.axes))
        for axis, position in zip(mesh.axes, mesh.coord_of(rank), strict=True):
            group = ranks_in_words(mesh.group_of(rank, axis))
            text.append(f"\n{axis:<{width}} ", "dim").append(f"{position} among {group}")
    return text
