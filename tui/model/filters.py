"""Which tensors are listed: those with findings, of a role, over an axis, with a text in their name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .document import TensorEntry
    from .stored import StoredEntry

    Entry: TypeAlias = TensorEntry | StoredEntry
    """A tensor of a dump or of a checkpoint."""


Kept = dict[int, "Sequence[str]"]
"""The names that are listed, by the index of their entry."""

Choice = TypeVar("Choice")


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

    def passes(self, entry: Entry) -> bool:
        """Whether an entry is listed."""
        return (
            (not self.findings or bool(entry.findings))
            and (self.role in ("all", entry.role) if self.role else entry.listed or bool(self.text))
            and (not self.axis or self.axis in entry.axes)
            and (
                not self.text
                or self.is_in(entry.title)
                or self.is_in(entry.layout)
                or any(map(self.is_in, entry.names))
            )
        )

    def is_in(self, name: str) -> bool:
        """Whether the text is in a name or a layout."""
        return self.text.lower() in printable(name).lower()

    def kept(self, entries: Sequence[Entry]) -> Kept:
        """Return the names that are listed; all of them where nothing is asked for and nothing is the model's own.

        Of several layers only those are listed that have the text in their names, unless all do or it is in the layout.
        """
        passing = [at for at, entry in enumerate(entries) if self.passes(entry)]
        if not passing and self == Filters():
            passing = list(range(len(entries)))
        kept: Kept = {}
        for at in passing:
            names = entries[at].names
            matching = names if self.is_in(entries[at].layout) else [name for name in names if self.is_in(name)]
            kept[at] = matching or names
        return kept

    def __str__(self) -> str:
        parts = ["findings only"] * self.findings + [f"role {self.role}"] * bool(self.role)
        return " · ".join([*parts, *[f"axis {self.axis}"] * bool(self.axis)])


def after(choices: Sequence[Choice], current: Choice) -> Choice:
    """Return the choice after the current one; after the last comes the first."""
    return choices[(choices.index(current) + 1) % len(choices)] if current in choices else choices[0]
