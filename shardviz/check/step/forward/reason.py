"""A rule's reason for a wrong output, which replaces the plain finding that numbers differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardviz.check.step.comparison import Compared
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding


@dataclass(frozen=True)
class Reason:
    """An explanation of a wrong output.

    Attributes:
        explanation: The cause, or the likeliest that fits.
        clause: What bears it out, in numbers.
        tensor: The tensor or module at fault; empty if it is the output itself.
        claimed: Where its elements are taken to be, in the notation.
        held: Where they are, in the notation or in words.
        alike: Other tensors with the same fault.
    """

    explanation: Cause
    clause: str
    tensor: str = ""
    claimed: str = ""
    held: str = ""
    alike: tuple[str, ...] = ()

    def of(self, finding: Finding) -> Finding:
        """Return the finding of a wrong output with this reason."""
        named = replace(
            finding,
            kind=self.explanation.kinds[0],
            tensor=self.tensor or finding.tensor,
            details=(*finding.details, self.clause),
            claimed=self.claimed or ("" if self.tensor else finding.claimed),
            held=self.held,
            generic=False,
        )
        named = named.because(self.explanation)
        members = [replace(named, tensor=name) for name in (named.tensor, *self.alike)] if self.alike else []
        return replace(named, members=tuple(members))

    def finding(self, result: Compared, sentence: str) -> Finding:
        """Return the finding that a result is wrong for this reason."""
        return self.of(self.explanation.finding(result.name, result.wrong, sentence))
