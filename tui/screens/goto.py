"""A dialog that asks where to go: to a rank, a tensor, or an element; it says where that is while it is typed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from ..model.navigation.target import HOW, Target, parse_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult

    from ..model.navigation.target import Known


class GotoScreen(ModalScreen[Target | None]):
    """A dialog that takes a rank, a name or an index, and returns where to go.

    Args:
        known: What can be gone to.
        about: Describes a target.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Back", id="goto.back", tooltip="Close without moving"),
    ]

    def __init__(self, known: Known, about: Callable[[Target], str]) -> None:
        super().__init__()
        self._known = known
        self._about = about
        self._read: tuple[str, Target | str] = ("", HOW)

    def compose(self) -> ComposeResult:
        """Put the input above the lines that say where it leads, or why it leads nowhere."""
        with Vertical(classes="dialog") as box:
            box.border_title, box.border_subtitle = "Go to", "enter goes there, esc closes"
            yield Input(id="goto")
            yield Static(HOW, id="goto-note", markup=False)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Say where the text leads."""
        target = self._target(event.value)
        self.query_one("#goto-note", Static).update(target if isinstance(target, str) else self._about(target))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Return where to go, or show why the text leads nowhere."""
        target = self._target(event.value)
        if isinstance(target, Target):
            self.dismiss(target)

    def _target(self, text: str) -> Target | str:
        """Read where a text leads, once: of many tensors all names are looked at."""
        if text != self._read[0]:
            self._read = (text, parse_target(text, self._known))
        return self._read[1]
