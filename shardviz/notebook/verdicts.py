"""A report and its findings as objects, with the arrays that each finding was judged from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardviz.notebook.runs import ByRank, read_only
from shardviz.picture.display import HTML, Drawable, framed
from shardviz.text import counted, named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from rich.text import Text

    from shardviz.check.report import NotChecked
    from shardviz.check.report import Report as Judged
    from shardviz.explain.finding import Finding
    from shardviz.notebook.runs import Run
    from shardviz.picture.text.terminal import Terminal
    from shardviz.relate.relations import RankPair, Related

    Array = NDArray[Any]

HEIGHT = 420
"""Pixels of a single finding in a notebook."""


class ReportOfRun(Drawable):
    """The report of `shardviz check` on a run.

    Attributes:
        run: The run.
        judged: The report as the checks made it.
        findings: What is wrong, worst first; one cause on many tensors is one finding.
        why_not: Why nothing could be checked; empty if something was.
    """

    def __init__(self, run: Run[Any], judged: Judged, why_not: str) -> None:
        """Take what the checks of a run made."""
        self.run, self.judged, self.why_not = run, judged, why_not
        self.findings = tuple(FindingOfRun(run, finding) for finding in judged.findings)

    @property
    def clean(self) -> bool:
        """Whether something was checked and nothing is wrong: exit code 0 of `shardviz check`."""
        return not self.findings and not self.why_not

    def __bool__(self) -> bool:
        """Refuse: a reader expects either that a clean report is true, or that one with findings is.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a report is neither true nor false: write `if report.clean:` or `if report.findings:`")

    @property
    def not_checked(self) -> tuple[NotChecked, ...]:
        """What could not be looked at, each with its reason."""
        return self.judged.not_checked

    def of(self, tensor: str) -> tuple[FindingOfRun, ...]:
        """Return the findings of a tensor, with its own numbers."""
        return tuple(FindingOfRun(self.run, finding) for finding in self.judged.findings_of.get(tensor, ()))

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz check --format json` prints."""
        return self.judged.to_json()

    def lines(self, terminal: Terminal) -> list[Text]:
        """Return the report as `shardviz check` prints it."""
        return self.run.report_lines(terminal)

    def markup(self) -> Mapping[str, str]:
        """Return the findings of the run's page, in a frame."""
        return {HTML: framed(self.run.report_page())}

    @property
    def title(self) -> str:
        """What it is, in a line."""
        unchecked = f", {len(self.not_checked):,} not checked" if self.not_checked else ""
        kinds = dict.fromkeys(finding.kind for finding in self.findings)
        found = f"{counted(len(self.findings), 'finding')} ({', '.join(kinds)})" if kinds else "no findings"
        return f"Report of {self.run.path.resolve().name}: {found}{unchecked}"


class FindingOfRun(Drawable):
    """One finding: what is wrong, the most likely cause, and the fix.

    Attributes:
        judged: The finding as the judge made it, with everything that it knows.
        kind: Which rule it breaks: `shardviz explain KIND`.
        severity: `error` if numbers are wrong, `warning` if something could not be seen whole.
        cause_id: The name of its cause: `shardviz explain CAUSE`.
        tensor: The name of the tensor, or of the first of several; empty if it is about the whole run.
        tensors: The names of all tensors that have it.
        ranks: The ranks that disagree, rising.
        what: What is wrong, in numbers.
        cause: The most likely cause.
        fix: What to change.
        claimed: Where the placements say each element is, in the notation; empty if that is not what it is about.
        held: Where each element really is, in the notation or in words; empty likewise.
        intended: Where the author wants each element, in the notation; empty if nothing was said.

    Example:
        >>> finding = shardviz.load("before.shardviz").check().findings[0]
        >>> finding.kind, finding.ranks, finding.relation.chain
        ('misordered', (1, 2), (Located([12/tp/fsdp, 12]),))
        >>> finding.pair.expected[1][0, :3], finding.pair.actual[1][0, :3]
        (array([37, 38, 39]), array([73, 74, 75]))
    """

    def __init__(self, run: Run[Any], judged: Finding) -> None:
        """Take a finding of a run."""
        self._run, self.judged = run, judged
        self.kind, self.severity, self.cause_id = judged.kind, judged.severity, judged.cause_id
        self.tensor, self.tensors, self.ranks = judged.tensor, judged.tensors, judged.ranks
        self.what, self.cause, self.fix = judged.summary, judged.cause, judged.fix
        self.claimed, self.held, self.intended = judged.claimed, judged.held, judged.intended

    @property
    def each(self) -> tuple[FindingOfRun, ...]:
        """The finding of each tensor, with its own numbers."""
        return tuple(FindingOfRun(self._run, single) for single in self.judged.each)

    @property
    def pair(self) -> ArrayPair | None:
        """Expected and actual arrays of the first tensor; None for a checkpoint's, or if it isn't about numbers."""
        first = self._first
        return ArrayPair(first) if first is not None else None

    @property
    def relation(self) -> Related | None:
        """How actual arrays relate to expected ones, or None if the finding isn't about that.

        `relation.chain` has the relations that explain all ranks (`shardviz.relate.relations`). It is None if no single
        chain explains all of them: `relation.groups` then has the chain of each group of ranks.
        """
        first = self._first
        return first.related if first is not None else None

    @property
    def _first(self) -> RankPair | None:
        return next(iter(self.judged.each[0].pairs or self.judged.pairs), None)

    def to_json(self) -> dict[str, Any]:
        """Return the object that stands for it in `shardviz check --format json`."""
        return self.judged.to_json()

    def lines(self, terminal: Terminal) -> list[Text]:
        """Return it as `shardviz check` prints it, with the table that it is seen by."""
        return self._run.report_lines(terminal, self.judged)

    def markup(self) -> Mapping[str, str]:
        """Return it as the run's page has it, with a map of its tensor, in a frame."""
        return {HTML: framed(self._run.report_page(self.judged), HEIGHT)}

    @property
    def title(self) -> str:
        """What it is, in a line."""
        ranks = named_ranks(self.ranks) if self.ranks else ""
        head = " ".join(filter(None, (self.kind, printable(self.judged.title), ranks)))
        return f"Finding {head}: {printable(self.judged.sentence)}"


class ArrayPair:
    """The expected and actual arrays that a finding was judged from, by rank, read on demand.

    Attributes:
        expected: What each rank should hold; None if nothing says it. Ids count from 1 within the tensor.
        actual: What it holds, after the reductions that its placements say are pending.
    """

    def __init__(self, judged: RankPair) -> None:
        """Read nothing yet."""
        self.expected: Mapping[int, Array | None] = ByRank(judged.ranks, lambda rank: _expected(judged, rank), _dots)
        self.actual: Mapping[int, Array] = ByRank(judged.ranks, lambda rank: read_only(judged.held_of(rank)), _dots)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were compared, rising."""
        return tuple(self.actual)

    def __repr__(self) -> str:
        return f"<Pair of expected and actual arrays on {named_ranks(self.ranks)}>"


def _expected(judged: RankPair, rank: int) -> Array | None:
    wanted = judged.wanted_of(rank)
    return read_only(wanted) if wanted is not None else None


def _dots(_: int) -> str:
    return "..."
