"""The subject of a page: one tensor of a dump, or a layout that nobody has built yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from shardviz.check.order.rules.foreign import CountError, count_ids
from shardviz.check.order.rules.intent import wanted_layout
from shardviz.check.report import named_ranks
from shardviz.dump.arrays import ID_NONE
from shardviz.layout.notation import write
from shardviz.picture.exhibits.of_finding import exhibit_of
from shardviz.picture.model.by_layout import PartOverlay
from shardviz.picture.model.holders import mask_of
from shardviz.picture.model.sides import NO_FILE, Sides, claimed_parts, sides_of, sides_of_intended

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardviz.check.order.case import Case, LaidOut
    from shardviz.check.report import Report
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding, Kind
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.layout.region import Region
    from shardviz.picture.exhibits.exhibit import Exhibit
    from shardviz.picture.model.holders import Mask

OF_INTENT = ("wrong-segment", "wrong-placement")
"""Findings about what is held beside what is intended, and not beside what is claimed."""

OF_PLACES = frozenset(
    {
        *("misordered", "misordered-within-shard", "duplicated", "missing", "foreign", "wrong-shape"),
        *("wrong-placement", "wrong-segment", "name-collision"),
    }
)
"""Kinds of findings that the difference of two sides shows; of the others, a map has nothing to mark."""

OF_VALUES = frozenset({"unreplicated", "identical-shards"})
"""Kinds of findings whose elements are in place, and whose values are not what they should be."""

IN_PLACE: dict[Kind, str] = {
    "unreplicated": "values that differ from the other copies",
    "identical-shards": "the same values as other shards",
    "unreduced-gradient": "its gradient is not reduced",
    "unreduced-scalar": "not reduced",
    "unreduced-output": "not reduced",
    "wrong-scale": "off by a factor in the step",
    "wrong-value": "wrong values in the step",
    "write-not-applied": "the old values",
    "sequence-order": "in a different order than the tokens",
    "misordered-within-shard": "in a different order",
    "collective-mismatch": "gathered wrong",
}
"""What is wrong where every part is on the ranks that claim it, by the kind of the finding, in a few words."""

OF_COUNTS = frozenset({"duplicated", "missing"})
"""Kinds of findings about elements that too many or too few ranks hold."""

MAX_DRAWN_RANKS = 1 << 14
"""A layout over more ranks than this is described in words only."""


@dataclass(frozen=True)
class Subject:
    """A tensor of a dump and what its page says of it.

    Attributes:
        name: Its name; empty for a layout alone.
        claimed: What its placements say; None for a plain tensor.
        held: Where its elements are, if that is known and can be written in the notation.
        sides: Who holds what, for the picture.
        claims: What each rank should hold, in words; if `sides` has intended and held, what its author wants.
        holds: What each rank holds, in words; empty if that is not known.
        intended: The layout that its author wants, if the ranks do not hold it, in the notation.
        findings: What was found about it.
        exhibits: What these findings are seen by, beside the map.
        is_checked: Whether no check of it was left out; if one was, its copies may not be equal.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    claimed: Layout | None
    held: Layout | None
    sides: Sides
    claims: Mapping[int, str]
    holds: Mapping[int, str]
    intended: str = ""
    findings: tuple[Finding, ...] = ()
    exhibits: tuple[Exhibit, ...] = ()
    is_checked: bool = True

    @property
    def marked(self) -> frozenset[int]:
        """Ranks with a mark: they hold something wrong, have a finding, or left no file."""
        named = named_ranks(self.findings, len(self.claims) or self.mesh.size)
        return self.misplaced.union(self.silent, named)

    @property
    def held_words(self) -> str:
        """What is held, in a finding's words, if no layout describes it."""
        about = OF_VALUES if self.held is not None else OF_VALUES | OF_PLACES
        return next((one.held for one in self.findings if one.kind in about and one.held), "")

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that are to hold nothing."""
        return tuple(rank for rank, text in self.claims.items() if text == NOTHING)

    @property
    def plain(self) -> tuple[int, ...]:
        """The ranks that have a tensor without placements, if others have some."""
        return tuple(rank for rank, text in self.claims.items() if text == PLAIN)

    @property
    def silent(self) -> tuple[int, ...]:
        """The ranks of whose file nothing is left."""
        return tuple(rank for rank, text in self.holds.items() if text == NO_FILE)

    @property
    def misplaced(self) -> frozenset[int]:
        """The ranks that hold something else than they claim, as far as they left a file."""
        both = self.claims.keys() & self.holds.keys() - {*self.silent, *self.plain}
        return frozenset(rank for rank in both if self.claims[rank] != self.holds[rank])


NOTHING = "nothing"

PLAIN = "plain"
"""What ranks claim that have a tensor without placements, if others have some."""


def of_tensor(
    dump: Dump, tensor: Tensor, name: str, report: Report | None = None, laid_out: LaidOut | None = None
) -> Subject:
    """Describe one tensor of a dump.

    Args:
        tensor: The tensor, or the fold that it is in.
        report: What a check found; without one the tensor is drawn as it is, without a word of what is wrong.
        laid_out: The dump's tensors as they were laid out, if there is no report.

    Raises:
        DumpError: The ids lie scattered and are too many to draw.
    """
    from shardviz.check.order.case import LaidOut

    laid_out = (report.laid_out if report else laid_out) or LaidOut(dump)
    findings = report.findings_of.get(name, ()) if report else ()
    cases = laid_out.cases(tensor, name)
    parts = ((region_text(region), ranks) for ranks, region, _ in claimed_parts(dump, tensor))
    claims = {rank: text for text, ranks in parts for rank in ranks}
    if claims:
        claims |= dict.fromkeys(set(tensor.claims.get(None, ())) - claims.keys(), PLAIN)
    plain = Subject(
        name=name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        mesh=tensor.claimed.mesh if tensor.claimed is not None else dump.files.mesh,
        claimed=tensor.claimed,
        held=cases[0].held if cases else None,
        sides=_with_marks(sides_of(dump, tensor, name, laid_out), findings, cases),
        claims=dict(sorted(claims.items())),
        holds=_held_texts(dump, tensor, cases),
        is_checked=report is None or name not in report.why_not_checked,
    )
    if not findings:
        return plain
    subject = _beside_intended(plain, dump, tensor, findings, laid_out)
    exhibits = (exhibit_of(dump, finding, laid_out) for finding in findings)
    return replace(subject, findings=findings, exhibits=tuple(dict.fromkeys(one for one in exhibits if one)))


def _intended_layout(tensor: Tensor, findings: Sequence[Finding], laid_out: LaidOut) -> Layout | None:
    """Return the layout that a tensor's author wants, if that is what the findings are about."""
    text = next((one.intended for one in findings if one.kind in OF_INTENT and one.intended), "")
    cases = laid_out.cases(tensor, findings[0].tensor) if text else ()
    return wanted_layout(cases[0], text) if cases else None


def drawn_sides(dump: Dump, tensor: Tensor, report: Report | None) -> Sides:
    """Return the two sides that a tensor's map shows: claimed and held, or intended and held.

    Raises:
        DumpError: The ids lie scattered and are too many to draw.
    """
    from shardviz.check.order.case import LaidOut

    laid_out = (report.laid_out if report else None) or LaidOut(dump)
    name = tensor.names[0]
    findings = report.findings_of.get(name, ()) if report else ()
    wanted = _intended_layout(tensor, findings, laid_out) if findings else None
    if wanted is not None:
        return sides_of_intended(dump, tensor, name, wanted, laid_out)
    return _with_marks(sides_of(dump, tensor, laid_out=laid_out), findings, laid_out.cases(tensor, name))


def _with_marks(sides: Sides, findings: Sequence[Finding], cases: Sequence[Case]) -> Sides:
    """Mark what the two sides can't show: wrong values, and parts with too few or many copies."""
    sides = _with_counts(sides, findings, cases)
    if any(finding.kind in OF_PLACES - {"misordered-within-shard"} for finding in findings):
        strangers = (finding for finding in findings if finding.kind == "name-collision")
        return replace(sides, strangers=_ranks_of(strangers, sides))
    wrong: dict[str, Mask] = {}
    for finding in findings:
        shown = sides.out_of_order if finding.kind == "misordered-within-shard" else 0
        if finding.kind in IN_PLACE and (ranks := _ranks_of([finding], sides) & ~shown):
            wrong[IN_PLACE[finding.kind]] = wrong.get(IN_PLACE[finding.kind], 0) | ranks
    return replace(sides, blamed=tuple((ranks, words) for words, ranks in wrong.items()))


def _ranks_of(findings: Iterable[Finding], sides: Sides) -> Mask:
    """Return the ranks that findings name and of which something was read."""
    return mask_of({rank for one in findings for rank in one.ranks if rank < sides.shift}) & ~sides.missing


def _with_counts(sides: Sides, findings: Sequence[Finding], cases: Sequence[Case]) -> Sides:
    """Mark a plain tensor's parts that too few or too many ranks hold, if a finding says so."""
    if sides.has_claimed or len(cases) != 1 or not any(one.kind in OF_COUNTS for one in findings):
        return sides
    try:
        return replace(sides, copies=count_ids(cases[0]).copies)
    except CountError:
        return sides


def _beside_intended(
    subject: Subject, dump: Dump, tensor: Tensor, findings: Sequence[Finding], laid_out: LaidOut
) -> Subject:
    """Return the subject with what is intended beside what is held, if that is what is wrong."""
    wanted = _intended_layout(tensor, findings, laid_out)
    if wanted is None:
        return subject
    return replace(
        subject,
        sides=sides_of_intended(dump, tensor, subject.name, wanted, laid_out),
        claims={rank: region_text(region) for rank, region in wanted.regions()},
        intended=write(wanted, subject.dtype),
    )


def _held_texts(dump: Dump, tensor: Tensor, cases: Sequence[Case]) -> dict[int, str]:
    """Say what each rank holds, by rank; nothing is known of a tensor that was not stamped."""
    if tensor.moment != "stamped":
        return {}
    holds = {case.rank(coord): _held_text(case, coord) for case in cases for coord in case.shards}
    holds |= dict.fromkeys(dump.files.missing_ranks, NO_FILE)
    return dict(sorted(holds.items()))


def of_layout(layout: Layout, dtype: str = "float32") -> Subject:
    """Describe a layout on its own."""
    laid = PartOverlay()
    for region, ranks in layout.holders().items() if layout.mesh.size <= MAX_DRAWN_RANKS else ():
        laid.add(region, mask_of(ranks), flat=layout.flat is not None)
    return Subject(
        name="",
        shape=layout.tensor_shape,
        dtype=dtype,
        mesh=layout.mesh,
        claimed=layout,
        held=None,
        sides=Sides(
            laid.holders(layout.tensor_shape),
            shift=max(layout.mesh.ranks) + 1,
            has_claimed=bool(laid.regions or laid.runs),
            has_held=False,
            mesh=layout.mesh,
            axes=layout.nested_axes,
        ),
        claims={rank: region_text(region) for rank, region in layout.regions()},
        holds={},
    )


@lru_cache(maxsize=1 << 14)
def region_text(region: Region) -> str:
    """Write a region, or that it is nothing."""
    if not region.size:
        return NOTHING
    return str(region) if region.dims else "the number"


def _held_text(case: Case, coord: Coord) -> str:
    if coord in case.regions:
        return region_text(case.regions[coord])
    ids = case.ids[coord]
    kinds = {
        "own ids, scattered": int((ids > 0).sum()),
        "ids of other tensors": int((ids < ID_NONE).sum()),
        "zeros": int((ids == 0).sum()),
        "no ids": int((ids == ID_NONE).sum()),
    }
    return "; ".join(f"{kind}: {count:,}" for kind, count in kinds.items() if count)
