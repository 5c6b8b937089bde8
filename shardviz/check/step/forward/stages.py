"""Pipeline layers on wrong stages: out of order, on two stages, or on none.

Ranks along the axis of a pipeline have different layers, and one coordinate of it has the output. Each layer belongs to
one stage, and layers rise from stage to stage; a rank may have several stages, in the order of a loop or of a V.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from shardviz.check.step.comparison import Compared, Reason
from shardviz.dump.records.base import WEIGHTS
from shardviz.explain.step.forward import LayersDropped, OverlappingStages, StagesMisnumbered, StagesOutOfOrder
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.files import RankRecord
    from shardviz.layout.mesh import Mesh

NUMBERED = re.compile(r"(.*?\.|)(\d+)\.")
MAX_LISTED = 4


@dataclass(frozen=True)
class Pipeline:
    """Which coordinates of a pipeline's axis have which layers of one list, and which stages.

    Attributes:
        prefix: The name of the list of layers, with its dot.
        layers: The numbers of the layers on every coordinate.
        size: How many layers the unsharded model has.
    """

    dump: Dump
    mesh: Mesh
    axis: str
    prefix: str
    layers: Mapping[int, frozenset[int]]
    size: int

    @cached_property
    def stages(self) -> Mapping[int, list[int]]:
        """The numbers of the stages that ran on every coordinate; the coordinate itself if nothing says so."""
        ran: dict[int, set[int]] = {coord: set() for coord in self.layers}
        for rank, record in self.dump.files.ranks.items():
            ran[_coord(self.mesh, rank, self.axis)] |= _stages_of(record)
        if not all(ran.values()):
            return {coord: [coord] for coord in ran}
        return {coord: sorted(own) for coord, own in ran.items()}

    @cached_property
    def is_numbered(self) -> bool:
        """Whether the run says which stages ran."""
        return any(record.schedule for record in self.dump.files.ranks.values())

    @cached_property
    def has_several(self) -> bool:
        """Whether a coordinate has several stages."""
        return any(len(own) > 1 for own in self.stages.values())

    def coords_of(self, layer: int) -> list[int]:
        """Return the coordinates that have a layer."""
        return [coord for coord, own in self.layers.items() if layer in own]

    def ranks_at(self, coord: int) -> list[int]:
        """Return the ranks at a coordinate."""
        return [rank for rank in self.dump.files.ranks if _coord(self.mesh, rank, self.axis) == coord]

    def who(self, coord: int) -> str:
        """Name the ranks at a coordinate with their stages."""
        ranks = self.ranks_at(coord)
        numbers = f"stage{'s' * (len(self.stages[coord]) > 1)} {listed(self.stages[coord], MAX_LISTED)}"
        return f"{numbers} ({named_ranks(ranks, MAX_LISTED)})"

    def what(self, coord: int) -> str:
        """Say which layers the ranks at a coordinate have."""
        layers = sorted(self.layers[coord])
        has = "have" if len(self.stages[coord]) > 1 else "has"
        return f"{self.who(coord)} {has} {listed((f'{self.prefix}{layer}' for layer in layers), MAX_LISTED)}"


def check_stages(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if a pipeline's layers are not on its stages in order, each on one."""
    for pipeline in _pipelines(evidence.dump, comparison):
        rules = (_lost, _twice, _out_of_order, _handed_on)
        if (reason := next(filter(None, (rule(pipeline, evidence) for rule in rules)), None)) is not None:
            return reason
    return None


def of_another_stage(evidence: Evidence, comparison: Compared) -> str:
    """Return why an output cannot be the model's: only ranks without the last stage of the pipeline have it."""
    ran = {rank: {run.stage for run in record.schedule} for rank, record in evidence.dump.files.ranks.items()}
    last = max((stage for own in ran.values() for stage in own), default=0)
    holders = [rank for rank, own in ran.items() if last in own]
    if comparison.role != "output" or not holders or set(holders) & comparison.values.keys():
        return ""
    where = listed(sorted(comparison.values), MAX_LISTED)
    return f"the output: rank {where} has it, and stage {last}, the last, ran on rank {listed(holders, MAX_LISTED)}"


def _stages_of(record: RankRecord) -> set[int]:
    """Return the stages that a rank ran; if none was seen to run, those that the probe names."""
    return {run.stage for run in record.schedule} or {*record.stages}


def _coord(mesh: Mesh, rank: int, axis: str) -> int:
    return mesh.coord_of(rank)[mesh.axis_index(axis)]


def _pipelines(dump: Dump, comparison: Compared) -> Iterator[Pipeline]:
    """Yield every list of layers that an axis divides and whose output one coordinate alone has, if it is recorded."""
    mesh = comparison.mesh
    if comparison.role != "output" and not any(map(_stages_of, dump.files.ranks.values())):
        return
    everywhere: dict[str, set[int]] = {}
    for at in filter(None, map(NUMBERED.match, dump.stamps)):
        everywhere.setdefault(at[1], set()).add(int(at[2]))
    for axis in mesh.axes:
        num_holders = len({_coord(mesh, rank, axis) for rank in comparison.values})
        if mesh.axis_size(axis) < 2 or (comparison.role == "output" and num_holders != 1):
            continue
        for prefix, numbers in everywhere.items():
            layers = _layers(dump, mesh, axis, prefix)
            if len(numbers) > 1 and len(set(layers.values())) > 1 and numbers == set(range(len(numbers))):
                yield Pipeline(dump, mesh, axis, prefix, layers, len(numbers))


def _layers(dump: Dump, mesh: Mesh, axis: str, prefix: str) -> Mapping[int, frozenset[int]]:
    held: dict[int, set[int]] = {coord: set() for coord in range(mesh.axis_size(axis))}
    for name, tensor in dump.stamped.items():
        at = NUMBERED.match(name)
        if tensor.role in WEIGHTS and at is not None and at[1] == prefix:
            for rank in tensor.shards:
                held[_coord(mesh, rank, axis)].add(int(at[2]))
    return {coord: frozenset(own) for coord, own in held.items()}


def _lost(pipeline: Pipeline, _evidence: Evidence) -> Reason | None:
    lost = [layer for layer in range(pipeline.size) if not pipeline.coords_of(layer)]
    if not lost:
        return None
    names = listed((f"{pipeline.prefix}{layer}" for layer in lost), MAX_LISTED)
    num_stages = sum(map(len, pipeline.stages.values()))
    at_end = lost == list(range(pipeline.size - len(lost), pipeline.size))
    left_over = at_end and (pipeline.size - len(lost)) % num_stages == 0 and len(lost) < num_stages
    return Reason(
        LayersDropped(pipeline.size, num_stages, left_over),
        f"no stage has {names}: {_who_has_what(pipeline)}",
        tensor=f"{pipeline.prefix}{lost[0]}",
    )


def _twice(pipeline: Pipeline, evidence: Evidence) -> Reason | None:
    ran = {rank: set(names) for rank, names in evidence.activations.order.items()}
    for layer in range(pipeline.size):
        name, coords = f"{pipeline.prefix}{layer}", pipeline.coords_of(layer)
        if len(coords) < 2 or not all(name in ran[rank] for coord in coords for rank in pipeline.ranks_at(coord)):
            continue
        where = " and ".join(map(pipeline.who, coords))
        return Reason(
            OverlappingStages(name, len(coords), pipeline.size),
            f"{name} is on {where}, and ran on {'both' if len(coords) == 2 else 'all'}",
            tensor=name,
        )
    return None


def _out_of_order(pipeline: Pipeline, evidence: Evidence) -> Reason | None:
    by_layer = [coord for layer in range(pipeline.size) for coord in pipeline.coords_of(layer)]
    numbered = sorted((stage, coord) for coord, own in pipeline.stages.items() for stage in own)
    by_stage = [coord for _, coord in numbered if pipeline.layers[coord]]
    if _without_repeats(by_layer) == _without_repeats(by_stage) or not _begins_there(pipeline, evidence):
        return None
    return Reason(
        StagesOutOfOrder(pipeline.axis, pipeline.size, tuple(by_stage)),
        f"{_who_has_what(pipeline)}: {_order_in_words(pipeline)}",
        tensor=pipeline.prefix.rstrip("."),
        held=f"layers 0 to {pipeline.size - 1} on {pipeline.axis}={listed(by_layer, 2 * MAX_LISTED)}",
    )


def _begins_there(pipeline: Pipeline, evidence: Evidence) -> bool:
    """Whether layers are right up to the first that does not follow the one before it, which is wrong.

    Where a rank has several stages, their numbers must do.
    """
    coords = sorted(pipeline.layers, key=lambda coord: pipeline.stages[coord])
    ran = [layer for coord in coords for layer in sorted(pipeline.layers[coord])]
    modules = evidence.activations.by_name
    if pipeline.has_several:
        return True
    if not all(f"{pipeline.prefix}{layer}" in modules for layer in ran):
        return pipeline.is_numbered
    states = [modules[f"{pipeline.prefix}{layer}"].is_odd for layer in ran]
    first = next((at for at, layer in enumerate(ran) if at != layer), len(ran))
    return first < len(ran) and states[first] and not any(states[:first])


def _order_in_words(pipeline: Pipeline) -> str:
    """Say how the layers run through the stages if each rank has one."""
    by_layer = [coord for layer in range(pipeline.size) for coord in pipeline.coords_of(layer)]
    count = len(pipeline.layers)
    if len(by_layer) > count and by_layer == [layer % count for layer in range(len(by_layer))]:
        return "layers are placed round-robin, and stages are consecutive"
    if all(after <= before for before, after in pairwise(by_layer)):
        return "layers rise and the stages' order falls"
    return "the order of the layers is not the order of the stages"


def _without_repeats(coords: Sequence[int]) -> list[int]:
    return [coord for coord, _ in groupby(coords)]


def _who_has_what(pipeline: Pipeline) -> str:
    return "; ".join([pipeline.what(coord) for coord in pipeline.layers][:MAX_LISTED])


def _handed_on(pipeline: Pipeline, evidence: Evidence) -> Reason | None:
    """Return the reason if every rank's first stage is right and the first of a later one is not.

    Each rank's first wrong layer follows a layer of a different rank then.
    """
    modules, within = evidence.activations.by_name, False
    for layers in pipeline.layers.values():
        ran = sorted(layer for layer in layers if f"{pipeline.prefix}{layer}" in modules)
        odd = [layer for layer in ran if modules[f"{pipeline.prefix}{layer}"].is_odd]
        if odd and (odd[0] == 0 or odd[0] - 1 in layers):
            return None
        within |= bool(odd) and odd[0] != ran[0]
    if not within or not pipeline.has_several:
        return None
    return Reason(
        StagesMisnumbered(),
        f"each rank's first layers are right, and its next stage begins wrong: {_who_has_what(pipeline)}",
        tensor=pipeline.prefix.rstrip("."),
    )
