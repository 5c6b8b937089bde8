"""Which tensors are listed: those with findings, of a role, over an axis, with a text in their name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from .document import Document


Kept = dict[int, "Sequence[str]"]
"""The names that are listed, by the index of their entry."""

Choice = TypeVar("Choice", bound=str)


class Filtered(Protocol):
    """A tensor as filters need it: of a dump, or of a checkpoint."""

    @property
    def names(self) -> Sequence[str]:
        """Its names."""

    @property
    def title(self) -> str:
        """Its name, or the folded names, with its role."""

    @property
    def layout(self) -> str:
        """Its layout."""

    @property
    def role(self) -> str:
        """What it is to the model."""

    @property
    def axes(self) -> Set[str]:
        """The mesh axes that split it."""

    @property
    def listed(self) -> bool:
        """Whether it is listed unless more is asked for."""

    @property
    def findings(self) -> Sequence[int]:
        """Its findings."""


@dataclass(frozen=True)
class Filters:
    """The conditions under which a tensor is listed; an empty one is always met.

    Attributes:
        text: A part of its name or of its layout; upper and lower case are the same.
        findings: Whether only tensors with findings are listed.
        role: The role it must have; `all` for any. Empty for the model's own tensors, and for those of the step's
            results that have findings: a gradient, a state and an output for every layer would bury the rest. With a
            text all roles are searched.
        axis: The mesh axis that must split it, or over which a sum must be pending.
    """

    text: str = ""
    findings: bool = False
    role: str = ""
    axis: str = ""

    def passes(self, entry: Filtered) -> bool:
        """Whether an entry is listed."""
        return (
            (not self.findings or bool(entry.findings))
            and (self._is_of_model(entry) if not self.role else self.role in ("all", entry.role))
            and (not self.axis or self.axis in entry.axes)
            and (not self.text or self._matches(entry))
        )

    def kept(self, entries: Sequence[Filtered]) -> Kept:
        """Return the names that are listed; all of them where nothing is asked for and nothing is the model's own."""
        passing = [at for at, entry in enumerate(entries) if self.passes(entry)]
        if not passing and self == Filters():
            passing = list(range(len(entries)))
        return {at: self._own(entries[at]) for at in passing}

    def _own(self, entry: Filtered) -> Sequence[str]:
        """Return the names of a listed entry that are: one layer of several, where the text is in its name alone."""
        text, names = self.text.lower(), entry.names
        if not text or text in entry.layout.lower():
            return names
        matching = [name for name in names if text in printable(name).lower()]
        return matching if 0 < len(matching) < len(names) else names

    def keeps(self, entry: Filtered, name: str) -> bool:
        """Whether one of a listed entry's names is."""
        return name in self._own(entry)

    def _is_of_model(self, entry: Filtered) -> bool:
        return entry.listed or bool(self.text)

    def _matches(self, entry: Filtered) -> bool:
        text = self.text.lower()
        if text in entry.title.lower() or text in entry.layout.lower():
            return True
        return any(text in printable(name).lower() for name in entry.names)

    def __str__(self) -> str:
        parts = ["findings only"] * self.findings + [f"role {self.role}"] * bool(self.role)
        return " · ".join([*parts, *[f"axis {self.axis}"] * bool(self.axis)])


def roles_of(document: Document) -> list[str]:
    """Return the choices of a role: the model's own tensors, all, then each role of the document alone."""
    return ["", "all", *sorted({entry.role for entry in document.entries})]


def axes_of(document: Document) -> list[str]:
    """Return the choices of an axis: none, then each axis that splits a tensor of the document."""
    return ["", *sorted({axis for entry in document.entries for axis in entry.axes})]


def after(choices: Sequence[Choice], current: Choice) -> Choice:
    """Return the choice after the current one; after the last comes the first."""
    return choices[(choices.index(current) + 1) % len(choices)] if current in choices else choices[0]
