"""What one rank is: its host, how much it holds, its coordinate and its group along every axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from shardviz.picture.model.holders import mask_of, ranks_text
from shardviz.text import bytes_text, printable

from ..colours import verdict_style

if TYPE_CHECKING:
    from ..model.document import Document


class RankCard(Static):
    """A few lines: the host, the bytes held, and for each axis the position and the group."""

    _lines = -1

    def show(self, document: Document, rank: int) -> None:
        """Show a rank."""
        text = rank_text(document, rank)
        lines = text.plain.count("\n")
        self.update(text, layout=lines != self._lines)
        self._lines = lines


def rank_text(document: Document, rank: int) -> Text:
    """Write what a rank is."""
    files = document.dump.files
    mesh = files.mesh
    text = Text.assemble((f"rank {rank}", "bold"), f" of {files.run.num_ranks:,}")
    if rank in files.ranks:
        found = [one for one in document.counted if rank in one.tensor.shards]
        count, taken = sum(len(one.widths) for one in found), sum(one.on(rank) for one in found)
        text.append(f" on {printable(files.ranks[rank].hostname)}")
        text.append(f"\nholds {bytes_text(taken)} in {count:,} tensor{'' if count == 1 else 's'}")
    else:
        text.append("\n? no readable file of this rank in the dump", verdict_style("warning"))
    if rank in mesh:
        width = max(map(len, mesh.axes))
        for axis, position in zip(mesh.axes, mesh.coord_of(rank), strict=True):
            group = ranks_text(mask_of(mesh.group_of(rank, axis)))
            text.append(f"\n{axis:<{width}} ", "dim").append(f"{position}, group of ranks {group}")
    return text
