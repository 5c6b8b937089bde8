"""What a plan says as text: bytes per rank and why, what is uneven, what a step sends, the bubble."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.timeline import timeline
from shardviz.errors import ShardvizError
from shardviz.layout.notation import write
from shardviz.picture.text.schedule import bubble_text
from shardviz.picture.text.tables.comms import groups_text
from shardviz.picture.text.tables.table import table
from shardviz.picture.text.terminal import DIM, line
from shardviz.plan.amounts import ROLES, Amounts, gathered
from shardviz.plan.splits import uneven, whole
from shardviz.plan.traffic import crossing, sent
from shardviz.text import bytes_text, counted, cut_at_comma, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text

    from shardviz.plan.ranks import PlannedPart, PlannedRanks
    from shardviz.plan.records import PlanPart, PlanRecord
    from shardviz.plan.splits import Uneven, Whole
    from shardviz.plan.traffic import Sent

MOST = 8
"""Tensors that are named of each kind."""

WORDS = {"activations": "what a step's modules make", "gathered": "what FSDP gathers and sends"}

MODULES = 60
"""Characters of the names of modules that call a collective."""


def plan_lines(probe: str, ranks: PlannedRanks) -> Iterator[Text]:
    """Yield what a plan says.

    Args:
        probe: The name of the probe.
        ranks: The plan's ranks.
    """
    amounts = Amounts(ranks)
    plan = ranks.plan
    nodes = f", {counted(-(-len(ranks) // plan.node), 'node')} of {plan.node}" if plan.node else ""
    yield line((f"plan of {printable(probe)} on mesh {ranks.mesh}", "bold"), f": {len(ranks):,} ranks{nodes}")
    yield from (line((printable(how), DIM)) for how in plan.how)
    yield line("")
    yield from _memory(amounts)
    yield from _uneven(list(uneven(amounts)))
    yield from _whole(list(whole(amounts)))
    yield line("")
    yield from _traffic(plan, ranks)
    yield from _bubble(ranks)


def _memory(amounts: Amounts) -> Iterator[Text]:
    fullest, emptiest = amounts.fullest, amounts.emptiest
    roles = [role for role in ROLES if amounts.by_role[role].any()]
    mesh = amounts.ranks.mesh
    heads = ["bytes per rank", f"rank {fullest}, the fullest", f"rank {emptiest}, the emptiest", "all ranks"]
    rows = [[role, *(bytes_text(int(amounts.by_role[role][rank])) for rank in (fullest, emptiest))] for role in roles]
    for role, row in zip(roles, rows, strict=True):
        row.append(bytes_text(int(amounts.by_role[role].sum())) if role != "gathered" else "-")
    total = [bytes_text(int(amounts.together[rank])) for rank in (fullest, emptiest)]
    yield from table([heads, *rows, ["together", *total, "-"]])
    if amounts.together[fullest] == amounts.together[emptiest]:
        yield line((f"every rank has as much as rank {fullest}", DIM))
    else:
        yield line(
            f"rank {fullest} ({mesh.label(fullest)}) has more than rank {emptiest} ({mesh.label(emptiest)}), gradients "
            "and optimizer state included:"
        )
        yield from _why(amounts, fullest, emptiest)
    yield from _moment(amounts.ranks.part_of(fullest).part)
    yield from _gathered(amounts.ranks.part_of(fullest))


def _why(amounts: Amounts, fullest: int, emptiest: int) -> Iterator[Text]:
    """Yield the tensors that make the difference between two ranks, the largest first."""
    here, there = _by_name(amounts, fullest), _by_name(amounts, emptiest)
    more = sorted(((size - there.get(name, 0), name) for name, size in here.items()), reverse=True)
    for size, name in [one for one in more if one[0] > 0][:MOST]:
        yield line(f"  {bytes_text(size)} of {printable(name)}")
    for role in ("activations", "gathered"):
        size = int(amounts.by_role[role][fullest] - amounts.by_role[role][emptiest])
        if size > 0:
            yield line(f"  {bytes_text(size)} of {WORDS[role]}")


def _by_name(amounts: Amounts, rank: int) -> dict[str, int]:
    """Return a rank's bytes by parameter, with the gradient and what the optimizer keeps of it."""
    found: dict[str, int] = {}
    for part, held in amounts.held:
        at = part.ranks.index(rank) if rank in part.ranks else -1
        for one in held if at >= 0 else ():
            name = one.name.rpartition(".")[0] if one.role == "optimizer" else one.name
            found[name] = found.get(name, 0) + int(one.bytes[at])
    return found


def _moment(part: PlanPart) -> Iterator[Text]:
    """Yield when a step holds most, and what of that waits for backward."""
    if part.peak is None:
        return
    when = "backward" if part.peak.in_backward else "forward"
    kept = sum(saved.bytes for saved in part.saved)
    yield line(
        f"activations and gathered are those of a step's fullest moment, in the {when} of {_named(part.peak.module)}; "
        f"{bytes_text(kept)} of activations wait for backward when the forward ends"
    )


def _gathered(part: PlannedPart) -> Iterator[Text]:
    units = part.part.units
    if not units:
        return
    stays = [unit for unit in units if unit.stays]
    largest = max(units, key=lambda unit: unit.bytes)
    kept = f"; {_named(stays[0].name)} stays gathered until its backward" if len(stays) == 1 else ""
    kept = f"; {len(stays)} units stay gathered until their backward" if len(stays) > 1 else kept
    most = f", at most {bytes_text(gathered(part))} at once, the next one already beside the one that runs"
    yield line(
        f"FSDP gathers {counted(len(units), 'unit')}{most if part.part.peak is None else ''}; the largest is "
        f"{_named(largest.name)}, {bytes_text(largest.bytes)}{kept}"
    )


def _named(module: str) -> str:
    return printable(module) or "the model itself"


def _uneven(found: list[Uneven]) -> Iterator[Text]:
    if not found:
        return
    yield line("")
    yield line((f"{counted(len(found), 'parameter')} in uneven parts", "bold"))
    for one in found[:MOST]:
        layout = write(one.held.layout) if one.held.layout else ""
        empty = f", {one.empty:,} of {one.ranks:,} ranks have none" if one.empty else ""
        yield line(f"  {printable(one.held.name)} {layout}: {one.least:,} to {one.most:,} elements{empty}")
    if len(found) > MOST:
        yield line((f"  and {len(found) - MOST} more", DIM))


def _whole(found: list[Whole]) -> Iterator[Text]:
    if not found:
        return
    yield line("")
    yield line(("could be split and is not", "bold"))
    for one in found[:MOST]:
        layout = write(one.held.layout) if one.held.layout else ""
        saved = f"split over {one.axis}({one.size}) it would save each rank {bytes_text(one.saved)}"
        yield line(f"  {printable(one.held.name)} {layout}: {saved}")
    if len(found) > MOST:
        yield line((f"  and {len(found) - MOST} more", DIM))


def _traffic(plan: PlanRecord, ranks: PlannedRanks) -> Iterator[Text]:
    found = sent(plan, ranks.mesh)
    if plan.without_step:
        yield line("planned without activations and collectives: " + printable(plan.without_step))
    if not found:
        if not plan.without_step:
            yield line("no step was planned: the probe has no batch(), and there is no --batch")
        return
    yield from table([_HEADS, *(_cells(one, plan.node) for one in found)], left=3)
    if plan.node:
        across = bytes_text(crossing(plan, ranks.mesh))
        yield line(f"a rank receives at most {across} in a step from groups that cross nodes of {plan.node}")


_HEADS = ["collectives of a step", "pass", "modules", "count", "bytes", "received", "group", "nodes"]


def _cells(one: Sent, node: int) -> list[str]:
    modules = cut_at_comma(", ".join(_named(name) for name in one.modules), MODULES)
    sizes = [f"{one.count:,}", bytes_text(one.bytes), bytes_text(one.received), f"{one.size:,}"]
    return [f"{one.op} {groups_text(one.axes)}", one.when, modules, *sizes, str(one.nodes) if node else "-"]


def _bubble(ranks: PlannedRanks) -> Iterator[Text]:
    schedules = {part.part.record.rank: part.part.record.schedule for part in ranks.parts if part.part.record.schedule}
    if not schedules:
        return
    try:
        yield line(bubble_text(timeline(schedules)))
    except ShardvizError as error:
        yield line(f"the bubble is not known: {error.message}")
