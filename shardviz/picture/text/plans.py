"""A plan as text, and which of many planned meshes fit: bytes, reasons, collectives."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardviz.dump.costs import timeline
from shardviz.errors import ShardvizError
from shardviz.layout.notation import write
from shardviz.picture.text.step import bubble_text
from shardviz.picture.text.terminal import DIM, line, table, wrapped
from shardviz.plan.alternatives import NO_STEP, fitting_meshes, is_failing, is_too_large
from shardviz.plan.counting import (
    OF_A_STEP,
    ROLES,
    PlanBytes,
    crossing_bytes,
    fold_again,
    fold_all,
    gathered_bytes,
    kind_of,
    sent_collectives,
    uneven_parameters,
    unsplit_parameters,
    where_text,
)
from shardviz.text import bytes_text, counted, cut_at_comma, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.text import Text

    from shardviz.dump.plan import PlannedRanks
    from shardviz.dump.records.files import PlanPart
    from shardviz.plan.alternatives import Row
    from shardviz.plan.counting import CollectiveTraffic, ReplicatedParameter, UnevenParameter


MOST = 8
"""Tensors that are named of each kind."""

LITTLE = 0.01
"""A part of a difference that is too small to be named."""

WORDS = {"buckets": "buckets of gradients", "activations": "activations", "gathered": "what FSDP gathers and sends"}


def plan_lines(probe: str, ranks: PlannedRanks, width: int) -> Iterator[Text]:
    """Yield what a plan says."""
    yield line((f"plan of {printable(probe)} on mesh {ranks.mesh}", "bold"))
    yield from said_lines(ranks, width)


def said_lines(ranks: PlannedRanks, width: int) -> Iterator[Text]:
    """Yield what a plan says, without a heading."""
    amounts = PlanBytes(ranks)
    plan = ranks.plan
    nodes = f" on {_nodes(len(ranks), plan.node)}" if plan.node else ""
    first, *others = plan.how or ("",)
    for text in (f"{counted(len(ranks), 'rank')}{nodes}; {printable(first)}", *map(printable, others)):
        yield from _sentence(text, width)
    yield line("")
    yield from memory_lines(amounts, width)
    yield from _uneven(uneven_parameters(amounts), width)
    yield from _replicated(unsplit_parameters(amounts), width)
    yield line("")
    yield from _traffic(ranks, width)
    yield from _bubble(ranks)


def _nodes(ranks: int, node: int) -> str:
    """Return how many nodes there are, and how full the last one is if ranks do not fill it."""
    left = ranks % node if ranks > node else 0
    return f"{counted(-(-ranks // node), 'node')} of {node}{f', the last with {left}' if left else ''}"


def _sentence(text: str, width: int, start: str = "", indent: int = 2) -> list[Text]:
    return wrapped(text, width, line(start), indent)


def memory_lines(amounts: PlanBytes, width: int) -> Iterator[Text]:
    """Yield the bytes of the fullest and the emptiest rank by role, and why they differ."""
    fullest, emptiest = int(amounts.on_gpu.argmax()), int(amounts.on_gpu.argmin())
    differ = amounts.on_gpu[fullest] > amounts.on_gpu[emptiest]
    yield from _by_role(amounts, {"fullest": fullest, "emptiest": emptiest} if differ else {"each rank": fullest})
    yield line("")
    part = amounts.ranks.part_of(fullest).part
    yield from _moment(part, int(amounts.on_gpu[fullest]), width)
    yield from _gathered(part, width)
    yield from _buckets(part, width)
    if differ:
        yield from _why_uneven(amounts, fullest, emptiest, width)


def _by_role(amounts: PlanBytes, ranks: dict[str, int]) -> list[Text]:
    """Return the table of some ranks' bytes."""
    rows = [["bytes per rank", *ranks, "all ranks"]]
    if len(ranks) > 1:
        rows.append(["", *(f"rank {rank}" for rank in ranks.values()), "together"])
    headings = len(rows)
    for role in (role for role in ROLES if amounts.by_role[role].any()):
        sizes = amounts.by_role[role]
        name = role if role != "optimizer" else _optimizer(amounts)
        of_all = "-" if role in OF_A_STEP else bytes_text(int(sizes.sum()))
        rows.append([name, *(bytes_text(int(sizes[rank])) for rank in ranks.values()), of_all])
    has_step = all(part.part.peak is not None for part in amounts.ranks.parts)
    sums = {"together" if has_step else "together, no step": amounts.together}
    if amounts.offloaded.any():
        sums |= {"in the CPU's memory": amounts.offloaded, "on the GPU": amounts.on_gpu}
    for name, sizes in sums.items():
        rows.append([name, *(bytes_text(int(sizes[rank])) for rank in ranks.values()), "-"])
    return table(rows, headings=headings)


def _optimizer(amounts: PlanBytes) -> str:
    of = printable(amounts.ranks.plan.optimizer)
    return f"state of {of}" if of else "optimizer"


def _moment(part: PlanPart, together: int, width: int) -> Iterator[Text]:
    """Yield when a step's memory peaks, what waits for backward, and what fused attention saves."""
    if part.peak is None:
        return
    when = "backward" if part.peak.in_backward else "forward"
    of_fsdp = "gathered (what FSDP has whole of weights and gradients, and sends)"
    both = f"activations and {of_fsdp} are" if part.units else "activations are"
    kept = bytes_text(sum(saved.bytes for saved in part.saved))
    yield from _sentence(
        f"{both} those at the step's peak, in the {when} of {_module_text(part.peak.module)}, with CPU kernels; "
        f"{kept} of activations wait for their backward when the forward ends",
        width,
    )
    if part.peak.scores:
        saved = part.peak.activations + part.peak.gathered - part.peak.fused
        yield from _sentence(
            f"{bytes_text(part.peak.scores)} of activations are scores of attention: a CPU has no fused kernel for it; "
            f"with one, as GPUs have, they are not made, and the rank holds {bytes_text(together - saved)} together",
            width,
        )


def _gathered(part: PlanPart, width: int) -> Iterator[Text]:
    if not part.units:
        return
    stays = [unit for unit in part.units if unit.stays]
    largest = max(part.units, key=lambda unit: unit.bytes)
    kept = f"; {_module_text(stays[0].name)} stays gathered until its backward" if len(stays) == 1 else ""
    kept = f"; {len(stays)} units stay gathered until their backward" if len(stays) > 1 else kept
    most = f", at most {bytes_text(gathered_bytes(part))} at once, with the next one already gathered"
    units = f"{counted(len(part.units), 'unit')}{most if part.peak is None else ''}"
    largest_text = f"the largest is {_module_text(largest.name)}, {bytes_text(largest.bytes)}"
    yield from _sentence(f"FSDP gathers {units}; {largest_text}{kept}", width)
    offloaded = sum(unit.on_cpu for unit in part.units)
    if offloaded:
        of_units = "all units" if offloaded == len(part.units) else f"{offloaded} of them"
        have = "has" if offloaded == 1 < len(part.units) else "have"
        text = f"{of_units} {have} parameters, gradients and optimizer state in the CPU's memory: no GPU has them"
        yield from _sentence(text, width)


def _buckets(part: PlanPart, width: int) -> Iterator[Text]:
    if not part.buckets:
        return
    most = bytes_text(max(one.bytes for one in part.buckets))
    copied = sum(one.bytes for one in part.buckets if not one.is_gradients)
    more = f", in addition to the gradients: gradient_as_bucket_view=True would save {bytes_text(copied)}"
    lie = more if copied else ", in which the gradients lie"
    buckets = f"{counted(len(part.buckets), 'bucket')} of at most {most}"
    yield from _sentence(f"DistributedDataParallel reduces gradients in {buckets}{lie}", width)


def _why_uneven(amounts: PlanBytes, fullest: int, emptiest: int, width: int) -> Iterator[Text]:
    """Yield the tensors that make two ranks differ, the largest first, layers as one kind."""
    mesh = amounts.ranks.mesh
    ranks = f"rank {fullest} ({mesh.label(fullest)}) has more than rank {emptiest} ({mesh.label(emptiest)})"
    yield from _sentence(f"{ranks}, gradients and optimizer state included:", width)
    here, there = _by_kind(amounts, fullest), _by_kind(amounts, emptiest)
    more = [(size - there.get(name, 0), name) for name, size in here.items()]
    for role, word in WORDS.items():
        more.append((int(amounts.by_role[role][fullest] - amounts.by_role[role][emptiest]), word))
    least = LITTLE * int(amounts.on_gpu[fullest] - amounts.on_gpu[emptiest])
    folded = [(size * count, name) for name, size, count in fold_again((name, size) for size, name in more)]
    for size, name in sorted((one for one in folded if one[0] > least), reverse=True)[:MOST]:
        yield line(f"  {bytes_text(size)} of {printable(name)}")


def _by_kind(amounts: PlanBytes, rank: int) -> dict[str, int]:
    """Return a rank's GPU bytes by parameter, with gradient and state; layers count together."""
    sizes: dict[str, int] = {}
    for part, held in amounts.held:
        at = part.ranks.index(rank) if rank in part.ranks else -1
        for one in held if at >= 0 else ():
            kind = kind_of(one.owner)
            sizes[kind] = sizes.get(kind, 0) + int(one.on_gpu[at])
    return sizes


def _module_text(module: str) -> str:
    return printable(module) or "the model itself"


def _uneven(uneven: list[UnevenParameter], width: int) -> Iterator[Text]:
    if not uneven:
        return
    texts = fold_all((one.held.name, _parts_text(one)) for one in uneven)
    names = [count for *_, count in texts]  # a line may stand for many
    yield line("")
    yield line((f"{counted(sum(names), 'parameter')} in uneven parts", "bold"))
    for name, text, *_ in texts[:MOST]:
        yield from _sentence(f"{printable(name)} {text}", width, "  ", 4)
    if len(texts) > MOST:
        yield line((f"  and {sum(names[MOST:]):,} more", DIM))


def _parts_text(parameter: UnevenParameter) -> str:
    layout = write(parameter.held.layout) if parameter.held.layout else ""
    empty = (
        f", {parameter.empty:,} of {parameter.ranks:,} ranks {'has' if parameter.empty == 1 else 'have'} none"
        if parameter.empty
        else ""
    )
    return f"{layout}: {parameter.least:,} to {parameter.most:,} elements{empty}"


def _replicated(wholes: list[ReplicatedParameter], width: int) -> Iterator[Text]:
    if not wholes:
        return
    yield line("")
    yield line(("could be split and is not", "bold"))
    texts = fold_all((one.held.name, (_split_text(one), one.saved)) for one in wholes)
    for name, (text, saved), experts, _ in texts[:MOST]:
        saves = f"{text} it would save each rank {bytes_text(saved * experts)}"
        yield from _sentence(f"{printable(name)} {saves}", width, "  ", 4)
    if len(texts) > MOST:
        yield line((f"  and {len(texts) - MOST} more", DIM))


def _split_text(whole: ReplicatedParameter) -> str:
    return f"{write(whole.held.layout) if whole.held.layout else ''}: split over {whole.axis}({whole.size})"


def _traffic(ranks: PlannedRanks, width: int) -> Iterator[Text]:
    plan, collectives = ranks.plan, sent_collectives(ranks)
    if plan.without_step:
        yield from _sentence(f"planned without activations and collectives: {printable(plan.without_step)}", width)
    if not collectives:
        if not plan.without_step:
            yield line(NO_STEP if any(part.peak is None for part in plan.parts) else "a step has no collectives")
        return
    heading, *rows = table([_HEADS, *(_traffic_cells(collective, plan.node) for collective in collectives)], left=2)
    yield heading
    for collective, row in zip(collectives, rows, strict=True):
        modules = ", ".join(
            _module_text(name) for name, _, _ in fold_again((name, None) for name in collective.modules)
        )
        yield row
        yield line((f"  in {cut_at_comma(modules, width - 5)}", DIM))
    if plan.node:
        across = crossing_bytes(ranks)
        most = f"a rank receives at most {bytes_text(across)} in a step from groups that cross nodes of {plan.node}"
        yield line(most if across else f"no group crosses nodes of {plan.node}")


_HEADS = ["collectives of a step", "pass", "count", "bytes", "received", "group", "nodes"]


def _traffic_cells(collective: CollectiveTraffic, node: int) -> list[str]:
    sizes = [
        f"{collective.count:,}",
        bytes_text(collective.bytes),
        bytes_text(collective.received),
        f"{collective.size:,}",
    ]
    groups = where_text(collective).replace(" and ", ",")  # or 80 columns would not do
    return [f"{collective.op} {groups}", collective.when, *sizes, str(collective.nodes) if node else "-"]


def _bubble(ranks: PlannedRanks) -> Iterator[Text]:
    schedules = {part.part.record.rank: part.part.record.schedule for part in ranks.parts if part.part.record.schedule}
    if not schedules:
        return
    try:
        yield line(bubble_text(timeline(schedules)))
    except ShardvizError as error:
        yield line(f"the bubble is not known: {error.message}")


_NUMBER = re.compile(r"[0-9]+")


def choice_lines(rows: Sequence[Row], memory: int, width: int) -> Iterator[Text]:
    """Yield the meshes that fit, as `fitting` sorts them, and then which do not and why.

    Args:
        memory: Bytes that a rank has; 0 if it is not given.
    """
    rows = sorted(rows, key=lambda row: row.place)
    fits = fitting_meshes(rows, memory)
    large = [row for row in rows if not row.failed and is_too_large(row, memory)]
    fails = {row: row.without_step for row in rows if row not in large and is_failing(row, rows)}
    failed = {row: row.failed for row in rows if row.failed}
    if fits:
        yield from table(_mesh_cells(fits))
    apart = (
        *_grouped_reasons("the step fails on", fails),
        *_too_large(large, memory),
        *_grouped_reasons("not planned:", failed),
    )
    for text in (*_notes(fits), *apart):
        yield from wrapped(text, width, line(), 2)


def _mesh_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table, without the columns that say nothing of these meshes."""
    columns = [["mesh", *(str(row.mesh) for row in rows)], ["fullest rank", *map(_fullest_text, rows)]]
    if any(row.offloaded for row in rows):
        columns.append(["in the CPU's memory", *(bytes_text(row.offloaded) for row in rows)])
    if any(row.crossing is not None for row in rows):
        columns.append(["crosses nodes", *map(_crossing_text, rows)])
    return [list(cells) for cells in zip(*columns, strict=True)]


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield notes on the rows, each once, with the meshes that it is about unless all are."""
    notes = [(note, row) for row in rows for note in row.notes]
    notes += [(f"without activations and collectives: {row.without_step}", row) for row in rows if row.without_step]
    for note in dict.fromkeys(note for note, _ in notes):
        meshes = [str(row.mesh) for other, row in notes if other == note]
        yield printable(note) if len(meshes) == len(rows) else f"{', '.join(meshes)}: {printable(note)}"


def _too_large(large: Sequence[Row], memory: int) -> Iterator[str]:
    """Yield how many meshes do not fit, and what the smallest of them needs."""
    if large:
        least = min(large, key=lambda row: row.bytes)
        meshes = "1 mesh needs" if len(large) == 1 else f"{len(large)} meshes need"
        yield f"{meshes} more than {bytes_text(memory)}, at least {bytes_text(least.bytes)} on {least.mesh}"


def _grouped_reasons(what: str, reasons: Mapping[Row, str]) -> Iterator[str]:
    """Yield the meshes that something is true of, grouped by reason, whatever its numbers."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for row, why in reasons.items():
        kinds.setdefault(_NUMBER.sub("", why), {}).setdefault(why, []).append(str(row.mesh))
    for kind in kinds.values():
        (why, own), *others = kind.items()
        more = ", ".join(mesh for _, meshes in others for mesh in meshes)
        yield f"{what} {', '.join(own)}: {printable(why)}{more and f'; with other numbers on {more}'}"


def _fullest_text(row: Row) -> str:
    return f"at least {bytes_text(row.bytes)}" if row.without_step else bytes_text(row.bytes)


def _crossing_text(row: Row) -> str:
    return "not known" if row.without_step or row.crossing is None else bytes_text(row.crossing)
