"""What a rule says of a wrong output: it takes the place of the mere statement that numbers differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardviz.explain.finding import Finding, Kind


@dataclass(frozen=True)
class Reason:
    """An explanation of a wrong output.

    Attributes:
        kind: The kind of the finding.
        clause: What bears it out, in numbers.
        cause: The cause, or those that fit.
        fix: What to change.
        tensor: The tensor or module at fault; empty where it is the output itself.
        claimed: Where its elements are taken to be, in the notation.
        held: Where they are, in the notation or in words.
    """

    kind: Kind
    clause: str
    cause: str
    fix: str
    tensor: str = ""
    claimed: str = ""
    held: str = ""

    def of(self, found: Finding) -> Finding:
        """Return the finding of a wrong output with this reason."""
        return replace(
            found,
            kind=self.kind,
            tensor=self.tensor or found.tensor,
            details=(*found.details, self.clause),
            cause=self.cause,
            fix=self.fix,
            claimed=self.claimed or ("" if self.tensor else found.claimed),
            held=self.held,
            generic=False,
        )
