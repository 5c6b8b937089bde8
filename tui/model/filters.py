"""Which tensors are listed: those with findings, of a role, over an axis, with a text in their name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from shardviz.dump.records import WEIGHTS
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .document import Document, TensorEntry

Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True)
class Filters:
    """What a tensor must be to be listed; empty ones ask for nothing.

    Attributes:
        text: A part of its name or of its layout, in any case.
        findings: Whether only those are listed that have findings.
        role: The role it must have; `all` for any. By default what the model is made of, and of a step's results what
            has findings: a gradient, a state and an output for every layer would bury the rest. A text looks for all.
        axis: The mesh axis that must split it, or over which a sum must be pending.
    """

    text: str = ""
    findings: bool = False
    role: str = ""
    axis: str = ""

    def passes(self, entry: TensorEntry) -> bool:
        """Whether an entry is listed."""
        return (
            (not self.findings or bool(entry.findings))
            and (self._is_of_model(entry) if not self.role else self.role in ("all", entry.tensor.role))
            and (not self.axis or self.axis in entry.axes)
            and (not self.text or self._matches(entry))
        )

    def _is_of_model(self, entry: TensorEntry) -> bool:
        return entry.tensor.role in WEIGHTS or bool(entry.findings) or bool(self.text)

    def _matches(self, entry: TensorEntry) -> bool:
        text = self.text.lower()
        if text in entry.title.lower() or text in entry.layout.lower():
            return True
        return any(text in printable(name).lower() for name in entry.tensor.names)

    def __str__(self) -> str:
        parts = ["findings only"] * self.findings + [f"role {self.role}"] * bool(self.role)
        return " · ".join([*parts, *[f"axis {self.axis}"] * bool(self.axis)])


def roles_of(document: Document) -> list[str]:
    """Return the roles that tensors of a document have; first what the model is made of, then all, then each alone."""
    return ["", "all", *sorted({entry.tensor.role for entry in document.entries})]


def axes_of(document: Document) -> list[str]:
    """Return the axes that matter to tensors of a document, with no axis first."""
    return ["", *sorted({axis for entry in document.entries for axis in entry.axes})]


def after(choices: Sequence[Choice], current: Choice) -> Choice:
    """Return the choice behind the current one, around and around."""
    return choices[(choices.index(current) + 1) % len(choices)] if current in choices else choices[0]
