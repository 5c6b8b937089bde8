"""The line at the bottom: the keys that work now."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment

from .word_line import Word, WordLine

if TYPE_CHECKING:
    from textual.binding import ActiveBinding
    from textual.screen import Screen

ALWAYS = ("help", "quit")
"""The actions that come last, and stay if there is not room for all."""


class KeyBar(WordLine):
    """As many of the keys that work now as fit in a line, each with its name; a click presses a key."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"key-bar--key"}

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._keys: list[ActiveBinding] = []

    def on_mount(self) -> None:
        """Follow the focus."""
        self.screen.bindings_updated_signal.subscribe(self, self._bindings_changed)

    def _bindings_changed(self, screen: Screen[object]) -> None:
        found: dict[str, ActiveBinding] = {}
        for active in screen.active_bindings.values():
            if active.binding.show and active.enabled:
                found.setdefault(active.binding.action, active)
        keys = sorted(found.values(), key=lambda active: active.binding.action in ALWAYS)
        if keys != self._keys:
            self._keys = keys
            self.refresh()

    def words(self) -> list[Word]:
        """Return the keys that fit in the line."""
        plain, bold = self.rich_style, self.get_component_rich_style("key-bar--key")
        words = [
            Word(
                (
                    Segment(f" {self.app.get_key_display(active.binding)} ", bold),
                    Segment(f"{active.binding.description} ", plain),
                ),
                f"press({number})",
                active.tooltip,
            )
            for number, active in enumerate(self._keys)
        ]
        last = sum(active.binding.action in ALWAYS for active in self._keys)
        while len(words) > last and sum(word.width for word in words) > self.size.width:
            words.pop(-1 - last)
        return words

    async def action_press(self, number: int) -> None:
        """Run the action of a key on the widget that binds it."""
        active = self._keys[number]
        await self.app.run_action(active.binding.action, active.node)
