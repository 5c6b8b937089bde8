"""What a run took and sent, as sections of its page: memory by rank and tensor, collectives by axis, a schedule."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shardviz.dump.memory import ROLES, schemes, uses
from shardviz.errors import ShardvizError
from shardviz.picture.html.parts import bar, bytes_cell, section, table
from shardviz.picture.markup import element, words
from shardviz.picture.model.holders import mask_of, ranks_text
from shardviz.picture.svg.schedule import schedule_drawing
from shardviz.picture.text.comms import received, traffic
from shardviz.text import bytes_text, cut_at_comma, fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardviz.dump.dump import Dump
    from shardviz.dump.memory import Use
    from shardviz.picture.text.comms import Traffic

MOST_ROWS = 60
"""Lines of any table."""

ForRole = dict[str, int]
"""Bytes by role."""


def memory_section(dump: Dump) -> str:
    """Write what a rank's tensors take, by role and by tensor, beside the schemes of data parallel."""
    found = uses(dump)
    if not found:
        return section("memory", "Memory", element("p", "The dump has no tensors that take memory."))
    roles = [role for role in ROLES if any(use.role == role for use in found)]
    by_rank = _by_rank(dump, found)
    parts = [_ranks(by_rank, roles, found)]
    if {"grad", "optim"} <= set(roles):
        parts.append(_schemes(dump, found, by_rank))
    return section("memory", "Memory", *parts, _tensors(found))


def _by_rank(dump: Dump, found: Sequence[Use]) -> dict[int, ForRole]:
    taken: dict[int, ForRole] = {rank: Counter() for rank in sorted(dump.files.ranks)}
    for use in found:
        for rank, count in use.bytes.items():
            taken[rank][use.role] += count
    return taken


def _ranks(by_rank: dict[int, ForRole], roles: Sequence[str], found: Sequence[Use]) -> str:
    """Write a line for all ranks that take the same, with a bar."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, taken in by_rank.items():
        groups.setdefault(tuple(taken[role] for role in roles), []).append(rank)
    most = max(map(sum, groups))
    rows = [
        [
            words(f"rank{'s' * (len(ranks) > 1)} {_some(ranks)}"),
            *map(bytes_cell, sizes),
            bytes_cell(sum(sizes)),
            bar(_parts(roles, sizes), most),
        ]
        for sizes, ranks in list(groups.items())[:MOST_ROWS]
    ]
    wholes = [sum(use.whole for use in found if use.role == role) for role in roles]
    rows.append(["unsharded", *map(bytes_cell, wholes), bytes_cell(sum(wholes)), ""])
    keys = [element("span", class_=f"key {role}", aria_hidden="true") + words(role) for role in roles]
    written = table(["On", *keys, "together", ""], rows, "Bytes a rank by role")
    return written + _more(len(groups), "shardviz show --memory --all")


def _parts(roles: Sequence[str], sizes: Sequence[int]) -> Iterable[tuple[str, int, str]]:
    return ((role, size, f"{role}: {size:,} bytes") for role, size in zip(roles, sizes, strict=True))


def _some(ranks: Sequence[int]) -> str:
    text = ranks_text(mask_of(ranks))
    return text if len(text) <= 40 else f"{cut_at_comma(text, 40)} ({len(ranks):,})"


def _schemes(dump: Dump, found: Sequence[Use], by_rank: dict[int, ForRole]) -> str:
    """Write what data parallel with Adam takes by its closed formulas, and what the fullest rank here has."""
    params, num_ranks = sum(use.whole for use in found if use.role == "param"), dump.files.run.num_ranks
    here = max(sum(taken[role] for role in ("param", "grad", "optim")) for taken in by_rank.values())
    known = [(one.name, words(one.formula), one.bytes) for one in schemes(params, num_ranks)]
    lines = [*known, ("this run", "the fullest rank", here)]
    most = max(size for _, _, size in lines)
    rows = [
        [name, formula, bytes_cell(size), bar([("this" if name == "this run" else "scheme", size, "")], most)]
        for name, formula, size in lines
    ]
    said = f"Parameters, gradients and Adam on a rank, for P = {bytes_text(params)} over N = {num_ranks:,} ranks"
    heads = ("Scheme", "Formula", "A rank", "")
    return element("h3", words(said)) + table(heads, rows, "Schemes of data parallel", left=2)


def _tensors(found: Sequence[Use]) -> str:
    """Write the largest tensors first, identical layers together."""
    ordered = sorted(found, key=lambda use: -max(use.bytes.values()))
    folded = fold(
        (use.name, (use.role, min(use.bytes.values()), max(use.bytes.values()), use.whole)) for use in ordered
    )
    rows = []
    for names, (role, least, most, whole) in folded[:MOST_ROWS]:
        a_rank = bytes_cell(most) if least == most else f"{bytes_cell(least)} to {bytes_cell(most)}"
        count = f" ({len(names):,} tensors)" if len(names) > 1 else ""
        rows.append([words(f"{names}{count}"), words(role), a_rank, bytes_cell(whole)])
    written = table(("Tensor", "Role", "On a rank", "Unsharded"), rows, "Bytes by tensor", left=2)
    closed = element("details", element("summary", "By tensor"), written)
    return closed + _more(len(folded), "shardviz show --memory --all")


def comms_section(dump: Dump) -> str:
    """Write the collectives of a step, axis by axis."""
    found = traffic(dump)
    if not found:
        why = "No collective ran in a step: a probe with a batch() is stepped, a captured job is not."
        return section("comms", "Communication", element("p", why))
    axes = sorted(dict.fromkeys(one.record.axes for one in found), key=lambda names: (len(names), names))
    most = {names: _most(dump, names) for names in axes}
    rows = [
        [words(_where(names)), bytes_cell(most[names]), bar([("this", most[names], "")], max(most.values()))]
        for names in axes
    ]
    received_by = table(("Group", "A rank receives up to", ""), rows, "Bytes received by axis")
    own = [one for names in axes for one in found if one.record.axes == names]
    return section("comms", "Communication", received_by, _collectives(own))


def _where(axes: Sequence[str]) -> str:
    return f"along {' and '.join(axes)}" if axes else "over ranks that are no axis"


def _most(dump: Dump, axes: tuple[str, ...]) -> int:
    ranks = dump.files.ranks.values()
    return max(sum(received(one) for one in rank.collectives if one.axes == axes) for rank in ranks)


def _collectives(found: Sequence[Traffic]) -> str:
    """Write a line for the collectives that are alike in identical layers."""
    heads = ("Collective", "Group", "Module", "Pass", "Times", "Bytes", "Received", "Group of", "On ranks")
    folded = fold((one.record.module or "-", (replace(one.record, module=""), len(one.ranks))) for one in found)
    rows = []
    for modules, (record, num_ranks) in folded[:MOST_ROWS]:
        where = _where(record.axes)
        sizes = bytes_cell(record.bytes), bytes_cell(received(record))
        texts = (words(text) for text in (record.op, where, modules, record.when, f"{record.count:,}"))
        rows.append([*texts, *sizes, f"{record.size:,}", f"{num_ranks:,}"])
    return table(heads, rows, "Collectives of a step", left=4) + _more(len(folded), "shardviz show --comms")


def schedule_section(dump: Dump) -> str:
    """Draw the schedule of a pipeline; nothing where there is none."""
    try:
        drawn = schedule_drawing(dump)
    except ShardvizError as error:
        return section("schedule", "Schedule", element("p", words(error.message)))
    if drawn is None:
        return ""
    picture, said = drawn
    return section("schedule", "Schedule", element("p", words(said)), element("figure", picture, tabindex=0))


def _more(count: int, command: str) -> str:
    return element("p", f"{count - MOST_ROWS:,} more lines: {command} prints them") if count > MOST_ROWS else ""
