"""The line at the top: the dump, its findings, its ranks and mesh, and how far it has been read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from shardviz.dump.read import mesh_of
from shardviz.dump.records.base import WEIGHTS
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import counted, printable

from ..colors import verdict_style
from ..model.names import shortened

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.check.verdicts import Verdict
    from shardviz.dump.records.files import RunRecord

    from ..model.document import Document


@dataclass(frozen=True)
class Opened:
    """What the title is about.

    Attributes:
        path: The dump's folder.
        run: What is true of the whole run; None until `run.json` is read.
        document: The dump; None until one rank is read.
        note: How far it has been read, or when it changed.
    """

    path: Path
    run: RunRecord | None = None
    document: Document | None = None
    note: str = ""


class Title(Static):
    """The dump's name, its verdict, and counts of ranks and tensors; a note shows how far it has been read."""

    _about: Opened | None = None

    def show(self, about: Opened) -> None:
        """Describe the dump."""
        self._about = about
        self.update(title_text(about, self.size.width or MOST_NAME), layout=False)

    def on_resize(self) -> None:
        """Cut the name to its new room, so that the verdict is always in view."""
        if self._about is not None:
            self.show(self._about)


MOST_NAME = 80
LEAST_NAME = 8
FOR_VERDICT = 28
"""Columns that are kept free for the verdict where there are so many, whatever the name of the dump."""
SHORT = 40
"""Columns of a line that names what was not checked in a dump without findings."""


def title_text(about: Opened, room: int = MOST_NAME) -> Text:
    """Write the name, the verdict and the counts, as far as they are known, for a line of so many columns.

    The name gives way to the rest: a line too short for both has the rest alone.
    """
    document = about.document
    state = _verdict(document, is_short=room < SHORT)
    if document is not None and (missing := len(document.missing)):
        state.append(f" · {counted(missing, 'rank')} missing", verdict_style("warning"))
    if about.note:
        state.append(f" · {about.note}", "dim")
    name = printable((about.path.name or about.path.resolve().name).removesuffix(".shardviz"))
    for_name = max(room - FOR_VERDICT, min(room - 2 - state.cell_len, LEAST_NAME))
    text = Text(no_wrap=True, overflow="ellipsis")
    if for_name >= min(LEAST_NAME, len(name)):
        text.append(f"{shortened(name, for_name)}  ", "bold")
    text.append_text(state)
    for part in _counts(about):
        if text.cell_len + len(part) > room:
            break
        text.append(part, "dim")
    return text


def _counts(about: Opened) -> list[str]:
    """Return what there is of ranks and tensors, what matters most first: only whole parts are shown."""
    run, document = about.run, about.document
    ranks = [f" · {counted(run.num_ranks, 'rank')}"] if run is not None else []
    mesh = [f" {mesh_of(run.mesh)}"] if run is not None and run.mesh else []
    weights = _num_weights(document) if document is not None else 0
    tensors = [f" · {counted(weights, 'tensor')}"] if weights else []
    return [*ranks, *mesh, *tensors]


def _num_weights(document: Document) -> int:
    """Return how many tensors the model is made of, as the report counts them; gradients and states are its own."""
    weights = (entry.tensor for entry in document.entries if entry.tensor.role in WEIGHTS)
    return len({name for tensor in weights for name in tensor.names})


def _verdict(document: Document | None, *, is_short: bool = False) -> Text:
    if document is None or document.is_partial:
        return Text(UNICODE.of("pending"), verdict_style("pending"))
    if document.report is None:
        verdict: Verdict = "unknown" if document.failed else "pending"
        return Text(f"{UNICODE.of(verdict)} {'not checked' if document.failed else 'checking'}", verdict_style(verdict))
    if document.findings:
        worst = document.findings[0].severity
        return Text(f"{UNICODE.of(worst)} {counted(len(document.findings), 'finding')}", verdict_style(worst))
    unchecked = document.report.not_checked
    verdict = "unknown" if any(reason.tensor for reason in unchecked) else "good"
    but = [f"{len(unchecked):,} not checked"] if unchecked else []
    words = ", ".join(but if is_short and but else ["no findings", *but])
    return Text(f"{UNICODE.of(verdict)} {words}", verdict_style(verdict))
