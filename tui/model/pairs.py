"""What a comparison shows: the tensors of two dumps, or of a job and a checkpoint, those that differ first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from rich.text import Text

from shardviz.checkpoint.comparing.outcome import DIFFERENT, counts_text
from shardviz.errors import ShardvizError
from shardviz.picture.model.drawing import drawn_dims
from shardviz.picture.model.holders import Plane, ranks_in_words, ranks_of
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import first_difference
from shardviz.picture.model.stored import comparison_subject, number_files
from shardviz.picture.text.checkpoint import why_text
from shardviz.picture.text.ranks import exhibit_lines
from shardviz.picture.text.terminal import Terminal
from shardviz.text import counted, fold, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardviz.check.diff import Change, Difference
    from shardviz.checkpoint.comparing.outcome import Comparison as Outcomes
    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.live_job.job import Job
    from shardviz.checkpoint.records import Checkpoint
    from shardviz.picture.model.sides import Sides
    from shardviz.picture.model.stored import ComparisonSubject, MarkedSides

    from .document import Document


RELATIONS = {"≠": "different", "<": "only here", ">": "only there", "=": "same", "?": "not compared"}
"""How two dumps' tensors compare, by the sign for it, in the order in which they are listed."""

MOST_RANKS = 40
"""Characters of the ranks in a tooltip."""


@dataclass(frozen=True)
class Pair:
    """A tensor on both sides, or several that are alike.

    Attributes:
        sign: How the sides compare, as one of `RELATIONS`.
        what: The same in words.
        here: Its entry in the dump; None if it has none.
        there: Its entry in the second dump; None if it has none.
        name: The name of its outcome, if the second side is a checkpoint.
    """

    title: str
    sign: str
    what: str
    here: int | None
    there: int | None = None
    name: str = ""


@dataclass(frozen=True)
class SideMap:
    """One side of a pair: the titles of its box, its layout or why it is not drawn, and who holds it."""

    title: str = ""
    subtitle: str = ""
    layout: str = ""
    sides: Sides | None = None
    describe: Callable[[tuple[int, ...]], str] | None = None


@dataclass(frozen=True)
class Comparison:
    """A dump beside another one, or a job beside a checkpoint.

    Attributes:
        pairs: The tensors, different ones first.
        legend: What their signs mean.
        summary: What differs, in a few words.
        maps: Draws both sides of a pair, of dumps a given one of claimed, held and their difference.
        plane: The plane that a pair opens on, if that is not the chosen tensor's.
        words: Says what became of a pair, in so many columns, if the maps do not say it.
        picture: Draws a pair as `shardviz diff` does, if it does.
    """

    pairs: tuple[Pair, ...]
    legend: str
    summary: str
    maps: Callable[[Pair, str], tuple[SideMap, SideMap]]
    plane: Callable[[Pair], Plane | None] | None = None
    words: Callable[[Pair, int], Text] | None = None
    picture: Callable[[Pair], str] | None = None


def _sorted(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    return tuple(sorted(pairs, key=lambda pair: list(RELATIONS).index(pair.sign)))


def compared_dumps(here: Document, there: Document, difference: Difference) -> Comparison:
    """Compare two dumps: the tensors of both by name and role."""
    counts = [(len(difference.lost), "only in the first"), (len(difference.gained), "only in the second")]
    findings = " · ".join(f"{counted(count, 'finding')} {where}" for count, where in counts if count)
    return Comparison(
        pairs(here, there, difference),
        "Tensors: ≠ different  < first only  > second only  = the same  ? not compared",
        findings or "the findings are the same",
        lambda pair, side: (_map_of(here, pair.here, side), _map_of(there, pair.there, side)),
    )


def _map_of(document: Document, entry: int | None, side: str) -> SideMap:
    title, sides, layout = printable(document.path.name), None, "not in this dump"
    if entry is not None:
        try:
            sides, layout = document.sides(entry), document.entries[entry].layout
        except ShardvizError as error:
            layout = f"? not drawn: {printable(error.message)}"
    return SideMap(title, side, layout, sides)


def pairs(here: Document, there: Document, difference: Difference) -> tuple[Pair, ...]:
    """Pair the tensors of two dumps by name and role, in the first one's order, different ones first.

    Layers that are one entry in one dump may be several in the other: they are one pair if both dumps agree.
    """
    from shardviz.check.diff import KEPT

    compared = {role for _, role in KEPT}
    changes: dict[str, list[Change]] = {}
    for change in (*difference.changes, *difference.relaid):
        changes.setdefault(change.tensor, []).append(change)
    unchecked = {result.tensor for result in difference.not_compared}
    ours, theirs = _entries(here), _entries(there)
    named = []
    for key in dict.fromkeys([*ours, *theirs]):
        name, role = key
        here_at, there_at, sign, what = ours.get(key), theirs.get(key), "=", ""
        if here_at is None or there_at is None:
            sign = ">" if here_at is None else "<"
        elif role not in compared:
            sign = "?"
        elif name in changes:
            sign, what = "≠", _words(changes[name])
        elif name in unchecked or difference.unread:
            sign, what = "?", "the same on all ranks that were read" if difference.unread else ""
        named.append((name, (sign, what or RELATIONS[sign], here_at, there_at)))
    return _sorted(Pair(printable(str(names)), *both) for names, both in fold(named))


def _entries(document: Document) -> dict[tuple[str, str], int]:
    """Return the index of each tensor's entry, by its name and role."""
    return {(name, entry.role): at for at, entry in enumerate(document.entries) for name in entry.names}


def _words(changes: list[Change]) -> str:
    """Write the first aspect that changed, and the names of the others."""
    first, *others = changes
    more = [other for other in dict.fromkeys(change.aspect for change in others) if other != first.aspect]
    also = f", and {', '.join(more)}" if more else ""
    return f"{first.aspect} {printable(first.before)} → {printable(first.after)}{also}"


def compared_with_checkpoint(document: Document, job: Job, checkpoint: Checkpoint, outcomes: Outcomes) -> Comparison:
    """Compare a job with a checkpoint: which rank claims which part, which file has it, wrong parts marked."""
    numbers = number_files(checkpoint)

    @cache
    def drawn(name: str) -> ComparisonSubject:
        return comparison_subject(by_name[name], job, checkpoint, numbers)

    @cache
    def both(name: str) -> tuple[MarkedSides, MarkedSides] | None:
        try:
            sides = drawn(name).sides
            return (sides, sides.turned()) if sides is not None else None
        except ShardvizError:
            return None

    def maps(pair: Pair, side: str) -> tuple[SideMap, SideMap]:
        def describe(place: tuple[int, ...]) -> str:
            return _described(drawn(pair.name), place)

        if (sides := both(pair.name)) is None:
            return SideMap(), SideMap()
        left, right = (SideMap(at.titles[0], "", "", at if at.has_claimed else None, describe) for at in sides)
        return left, right

    def plane(pair: Pair) -> Plane | None:
        sides = both(pair.name)
        return _plane_of(sides[0], drawn(pair.name).shape) if sides is not None else None

    def words(pair: Pair, width: int) -> Text:
        try:
            return _words_on(drawn(pair.name), width)
        except ShardvizError as error:
            return Text(f"? not drawn: {printable(error.message)}")

    def picture_of(pair: Pair) -> str:
        from shardviz.picture.svg.stored import beside_svg

        return beside_svg(drawn(pair.name))

    by_name = {outcome.name: outcome for outcome in outcomes.outcomes}
    return Comparison(
        _sorted(_outcome_pairs(document, job, by_name)),
        "Tensors: ≠ different  < job only  > checkpoint only  = equal  ? not compared",
        counts_text(outcomes),
        maps,
        plane,
        words,
        picture_of,
    )


def _outcome_pairs(document: Document, job: Job, outcomes: dict[str, Outcome]) -> Iterable[Pair]:
    """Yield what became of tensors, those that share a statement together."""
    known = {name: at for at, entry in reversed([*enumerate(document.entries)]) for name in entry.names}
    named = []
    for outcome in outcomes.values():
        name = outcome.name if outcome.name in job.tensors else outcome.other
        entry = known.get(name, -1) if name in job.tensors and outcome.verdict != "added" else -1
        named.append((outcome.name, (replace(outcome, name="", other=""), entry)))
    for names, (outcome, entry) in fold(named):
        verdict = outcome.verdict
        sign = {"missing": "<", "added": ">"}.get(verdict, "≠") if verdict in DIFFERENT else "?"
        sign = "=" if verdict == "equal" else sign
        yield Pair(printable(str(names)), sign, verdict, entry if entry >= 0 else None, name=names.names()[0])


def _plane_of(sides: MarkedSides, shape: tuple[int, ...]) -> Plane | None:
    """Return the plane that a tensor opens on, at the first element that differs; None without elements."""
    whole = sides.holders.shape
    if not all(whole):
        return None
    cuts = [len(sides.holders.edges(dim)) - 1 for dim in range(len(whole))]
    plane = Plane(*((1, 0) if len(shape) < 2 else drawn_dims(cuts)), (0,) * len(whole))
    place = first_difference(sides, plane)
    return replace(plane, at=place) if place else plane


def _described(picture: ComparisonSubject, place: tuple[int, ...]) -> str:
    """Say who claims an element, and which file has it."""
    assert picture.sides is not None, "there is a map"
    cell = picture.sides.at(place)
    index = place[len(place) - len(picture.shape) :]
    lines = [f"[{', '.join(map(str, index))}]{f' {WRONG}' if cell.different else ''}"]
    lines += [f"claimed by {ranks_in_words(ranks_of(cell.claimed), MOST_RANKS)}"] if cell.claimed else []
    files = picture.stored.files if picture.stored is not None else {}
    lines += [f"in {printable(files[at])}" for at in ranks_of(cell.held) if at in files]
    return "\n".join(lines)


def _words_on(picture: ComparisonSubject, width: int) -> Text:
    """Write what became of a tensor, and what ranks hold."""
    outcome = picture.outcome
    texts = [why_text(outcome) or outcome.verdict]
    texts += [picture.why] if picture.why and picture.why != outcome.why else []
    texts += [f"{title:<6} {text}" for title, text in (("fix", outcome.fix), ("cause", outcome.cause)) if text]
    lines = [Text(printable(text)) for text in texts]
    lines += exhibit_lines(picture.exhibit, Terminal(width=width)) if picture.exhibit is not None else []
    return Text("\n").join(lines)
