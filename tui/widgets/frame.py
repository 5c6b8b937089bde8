"""What frames the views: boxes with titles, the line of the dump and the tabs, and the line of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from rich.style import Style
from rich.text import Text
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from shardviz.dump.read import mesh_of
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import counted, printable

from ..colors import verdict_style
from ..model.names import LEAST_NAME, fitted
from .grid import CHOSEN, DIM, PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from textual import events
    from textual.binding import ActiveBinding

    from shardviz.check.verdicts import Verdict
    from shardviz.dump.records.files import RunRecord

    from ..model.document import Judged
    from ..model.selection import AnyDocument
    from ..screens.view import View
    from ..viewer import Viewer


class Titled(Widget):
    """The look of all boxes: a border that is lit if the focus is within, with a title above and one below."""

    DEFAULT_CLASSES = "boxed"

    _titles: tuple[str | Text, str | Text] | None = None

    def set_titles(self, title: str | Text, subtitle: str | Text = "") -> None:
        """Write a title above and one below, cut to the width of the box."""
        if self._titles != (title, subtitle):
            self._titles = title, subtitle
            texts = [Text(text) if isinstance(text, str) else text for text in (title, subtitle)]
            self.border_title, self.border_subtitle = texts


class Box(Vertical, Titled):
    """A box whose parts are below each other."""


class ScrollBox(VerticalScroll, Titled):
    """A box that scrolls."""


def word(text: Text | str, action: str = "", tooltip: str = "", style: Style = PLAIN) -> Text:
    """Return a word of a `WordLine`: the action that a click runs, and its tooltip, are in its style."""
    meta = {"@click": action, "tooltip": tooltip} if action else {}
    return Text.assemble(text, style=style + Style(meta=meta))


class WordLine(Static):
    """Words in a line, each with an action and a tooltip of its own."""

    auto_links = False

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Show the tooltip of the word under the mouse."""
        self.tooltip = event.style.meta.get("tooltip") or None


ALWAYS = ("help", "quit")
"""The actions that come last, and stay if there is not room for all."""


class KeyBar(WordLine):
    """As many of the keys that work now as fit in a line, each with its name; a click presses a key."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"key-bar--key"}

    def on_mount(self) -> None:
        """Follow the focus."""
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.on_resize())

    def on_resize(self) -> None:
        """Write the keys that fit in the line."""
        shown: dict[str, ActiveBinding] = {}
        for active in self.screen.active_bindings.values():
            if active.binding.show and active.enabled:
                shown.setdefault(active.binding.action, active)
        keys = sorted(shown.values(), key=lambda active: active.binding.action in ALWAYS)
        words, last = [*map(self._word, keys)], sum(active.binding.action in ALWAYS for active in keys)
        while len(words) > last and sum(word.cell_len for word in words) > self.size.width:
            words.pop(-1 - last)
        self.update(Text().join(words), layout=False)

    def _word(self, active: ActiveBinding) -> Text:
        key = f" {self.app.get_key_display(active.binding)} ", self.get_component_rich_style("key-bar--key")
        action = f"app.simulate_key('{active.binding.key}')"
        return word(Text.assemble(key, f"{active.binding.description} "), action, active.tooltip)


class ViewTabs(WordLine):
    """A key and a title for each view, the current one marked; a click shows a view."""

    def show(self, tabs: Sequence[tuple[str, type[View[Any]]]], current: str) -> None:
        """Mark the current view; if it is narrow, only that one has its title, for the verdict to have room."""
        whole = sum(len(f" {key} {view.TITLE}") for key, view in tabs)
        is_narrow, words = whole > self.app.size.width - FOR_VERDICT, []
        for key, view in tabs:
            is_current = current == view.NAME
            text = f" {key} " if is_narrow and not is_current else f" {key} {view.TITLE}{' ' * is_current}"
            about = f"{view.TITLE}: {view.TOOLTIP}"
            words.append(word(text, f"app.show_view('{view.NAME}')", about, CHOSEN if is_current else DIM))
        self.update(Text().join(words))


class Title(Static):
    """The dump's name, its verdict, and counts of ranks and tensors; a note shows how far it has been read."""

    def on_mount(self) -> None:
        """Follow what is known of the dump."""
        for name in ("run_record", "document", "note", "changed"):
            self.watch(self.app, name, self.on_resize)

    def on_resize(self) -> None:
        """Describe the dump, its name cut to the room there is: the verdict is always in view."""
        state = cast("Viewer[AnyDocument]", self.app)
        note = state.note or (f"changed {state.changed}" if state.changed else "")
        room = self.size.width or MOST_NAME
        self.update(title_text(state.path, state.run_record, state.document, note, room), layout=False)


MOST_NAME = 80
FOR_VERDICT = 28
"""Columns that are kept free for the verdict if there are so many, whatever the name of the dump."""
SHORT = 40
"""Columns of a line that names what was not checked in a dump without findings."""


def title_text(
    path: Path, run: RunRecord | None = None, document: AnyDocument | None = None, note: str = "", room: int = MOST_NAME
) -> Text:
    """Write the name, the verdict and the counts, as far as they are known, for a line of so many columns.

    The name gives way to the rest: a line too short for both has the rest alone.
    """
    state = verdict_text(document, is_short=room < SHORT)
    if document is not None and (missing := len(document.missing)):
        state.append(f" · {counted(missing, 'rank')} missing", verdict_style("warning"))
    if note:
        state.append(f" · {note}", "dim")
    name = printable((path.name or path.resolve().name).removesuffix(".shardviz"))
    for_name = max(room - FOR_VERDICT, min(room - 2 - state.cell_len, LEAST_NAME))
    text = Text(no_wrap=True, overflow="ellipsis")
    if for_name >= min(LEAST_NAME, len(name)):
        text.append(f"{fitted(name, for_name)}  ", "bold")
    text.append_text(state)
    counts = [f" · {counted(run.num_ranks, 'rank')}"] if run is not None else []
    counts += [f" {mesh_of(run.mesh)}"] if run is not None and run.mesh else []
    counts += [f" · {document.counts}"] if document is not None and document.counts else []
    for part in counts:  # what matters most comes first, and only whole parts are shown
        if text.cell_len + len(part) > room:
            break
        text.append(part, "dim")
    return text


def verdict_text(document: Judged | None, *, is_short: bool = False) -> Text:
    """Write the glyph and the words of a document's verdict, in few words if asked for."""
    if document is None or document.is_partial:
        return Text(UNICODE.of("pending"), verdict_style("pending"))
    if document.report is None:
        verdict: Verdict = "unknown" if document.failed else "pending"
        return Text(f"{UNICODE.of(verdict)} {'not checked' if document.failed else 'checking'}", verdict_style(verdict))
    if document.findings:
        worst = document.findings[0].severity
        return Text(f"{UNICODE.of(worst)} {counted(len(document.findings), 'finding')}", verdict_style(worst))
    unchecked = document.report.not_checked
    verdict = "good" if document.report.num_tensors and not any(reason.tensor for reason in unchecked) else "unknown"
    words = ["no findings", f"{len(unchecked):,} not checked"] if unchecked else ["no findings"]
    shown = words if not is_short else words[-1:] if verdict == "unknown" else words[:1]
    return Text(f"{UNICODE.of(verdict)} {', '.join(shown)}", verdict_style(verdict))
