"""The line at the top: the dump, its findings, its ranks and mesh, and how far it has been read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from shardviz.dump.records import WEIGHTS
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import counted, printable

from ..colours import verdict_style

if TYPE_CHECKING:
    from shardviz.check.verdicts import Verdict

    from ..model.document import Document


class Title(Static):
    """The dump's name, its verdict, and counts of ranks and tensors; a note shows how far it has been read."""

    _shown: Text | None = None

    def show(self, document: Document | None, note: str = "") -> None:
        """Describe the dump, with a note."""
        text = title_text(document, note)
        if text != self._shown:
            self._shown = text
            self.update(text, layout=False)


def title_text(document: Document | None, note: str = "") -> Text:
    """Write the name, the verdict and the counts, as far as they are known."""
    name = printable(document.path.name.removesuffix(".shardviz")) if document is not None else "shardviz"
    text = Text.assemble((name, "bold"), no_wrap=True, overflow="ellipsis")
    if document is not None:
        run = document.dump.files.run
        text.append("  ").append_text(_verdict(document))
        if missing := len(document.dump.files.missing_ranks):
            text.append(f" · {counted(missing, 'rank')} missing", verdict_style("warning"))
        if note:
            text.append(f" · {note}", "dim")
        text.append(f" · {counted(run.num_ranks, 'rank')} {document.dump.files.mesh}", "dim")
        return text.append(f" · {counted(_num_weights(document), 'tensor')}", "dim")
    return text.append(f"  {note}", "dim") if note else text


def _num_weights(document: Document) -> int:
    """Return how many tensors the model is made of, as the report counts them; gradients and states are its own."""
    weights = (entry.tensor for entry in document.entries if entry.tensor.role in WEIGHTS)
    return len({name for tensor in weights for name in tensor.names})


def _verdict(document: Document) -> Text:
    if document.report is None:
        verdict: Verdict = "unknown" if document.failed else "pending"
        return Text(f"{UNICODE.of(verdict)} {'not checked' if document.failed else 'checking'}", verdict_style(verdict))
    if document.findings:
        worst = document.findings[0].severity
        return Text(f"{UNICODE.of(worst)} {counted(len(document.findings), 'finding')}", verdict_style(worst))
    unchecked = document.report.not_checked
    verdict = "unknown" if any(one.tensor for one in unchecked) else "good"
    but = f", {len(unchecked):,} not checked" if unchecked else ""
    return Text(f"{UNICODE.of(verdict)} no findings{but}", verdict_style(verdict))
