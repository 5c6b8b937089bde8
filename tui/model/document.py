"""The data that the views show: a dump with its verdicts, independent of widgets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from shardviz.check.verdicts import captured, is_listed, verdict_on, wrong_result
from shardviz.dump.costs import CountedTensor, counted_tensors
from shardviz.dump.dump import find_tensors
from shardviz.dump.records.base import WEIGHTS
from shardviz.errors import ShardvizError
from shardviz.layout.dtypes import itemsize
from shardviz.picture.model.by_layout import only_layout
from shardviz.picture.model.mesh import Heat, heats_of
from shardviz.picture.model.palette import Coloring
from shardviz.picture.model.subject import drawn_sides
from shardviz.picture.text.report import layout_text, own_dtype
from shardviz.text import Fold, bytes_text, printable
from shardviz.text import counted as counted_in_words

from .rank import hovered, who_has
from .step import Step, step_of
from .usage import Usage, usage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from pathlib import Path

    from shardviz.check.report import Report
    from shardviz.check.verdicts import Verdict
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.exhibits.exhibit import Exhibit
    from shardviz.picture.model.sides import Sides

    from .tree import Entry


MOST_KEPT = 128
"""How many maps are kept, those that were made last."""


@dataclass(frozen=True)
class TensorEntry:
    """One line of the tensor list.

    Attributes:
        dtype: The model's own dtype: it may have been stamped in a wider one.
        verdict: The worst that was found of it.
        listed: Whether it is listed unless more is asked for.
        findings: Indices into the report's findings.
        verdicts: The verdict on each of its names, if they are not all alike.
        wrong: What is wrong, if it is not the tensor itself: its gradient, for one.
    """

    tensor: Tensor
    dtype: str
    verdict: Verdict
    listed: bool = True
    findings: tuple[int, ...] = ()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    wrong: str = ""

    @cached_property
    def title(self) -> str:
        """Its names folded, safe to print, with its role unless it is a parameter."""
        return self.title_of(self.tensor.name)

    def title_of(self, name: str) -> str:
        """Return one of its names, or all of them, with its role unless it is a parameter."""
        return printable(name or self.tensor.name) + (f" ({self.role})" if self.role != "param" else "")

    @property
    def names(self) -> list[str]:
        """Its names."""
        return self.tensor.names

    @property
    def role(self) -> str:
        """What it is to the model."""
        return self.tensor.role

    def is_on(self, rank: int) -> bool:
        """Whether a rank has a part of it."""
        return rank in self.tensor.shards

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of its placements."""
        return self.tensor.claimed.mesh if self.tensor.claimed else None

    @property
    def pending(self) -> str:
        """The axes over which a sum is pending: `+tp`."""
        return " ".join(f"+{axis}" for axis, _ in self.tensor.claimed.partial) if self.tensor.claimed else ""

    @property
    def has_claim(self) -> bool:
        """Whether it has placements on any rank."""
        return self.tensor.claimed is not None

    def verdict_of(self, name: str) -> Verdict:
        """Return the verdict on one of its names."""
        return self.verdicts.get(name, self.verdict)

    @cached_property
    def facts(self) -> str:
        """The local shape on the lowest rank that has it, unless that is what the layout says, and its bytes there."""
        local_shape = self.tensor.first.body.local_shape
        shape, size = str(list(local_shape)), bytes_text(math.prod(local_shape) * itemsize(self.dtype))
        return size if self.layout.startswith(f"{self.dtype}{shape}") else f"{shape} {size}"

    @cached_property
    def layout(self) -> str:
        """The layout that its placements claim, in the notation."""
        return layout_text(self.tensor, self.dtype)

    @cached_property
    def short_layout(self) -> str:
        """The same without the dtype."""
        return self.layout.removeprefix(self.dtype)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The mesh axes that split it or over which it is pending."""
        layouts = [layout for layout in self.tensor.claims if layout is not None]
        return frozenset(a for layout in layouts for a in (*layout.split_axes, *(axis for axis, _ in layout.partial)))


class Judged:
    """What a check found, by tensor: of a dump or of a checkpoint."""

    report: Report | None
    entries: Sequence[Entry]
    is_partial = False
    failed = ""

    @property
    def is_judged(self) -> bool:
        """Whether all is read and checked, so that nothing that is shown as wrong goes away."""
        return self.report is not None or bool(self.failed)

    def is_about(self, finding: int, entry: int) -> bool:
        """Whether a finding is about an entry, or about the whole dump."""
        if finding not in self.by_finding:
            return finding < len(self.findings)
        return finding in self.entries[entry].findings

    def exhibit(self, finding: int) -> Exhibit | None:
        """Return what a finding is seen by, if that is a table."""
        return None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings, worst first; one that many tensors have is one."""
        return self.report.findings if self.report else ()

    @cached_property
    def findings_of(self) -> Mapping[str, Sequence[int]]:
        """The indices of the findings that name or count each tensor."""
        indices: dict[str, list[int]] = {}
        for index, finding in enumerate(self.findings):
            for name in dict.fromkeys(member.tensor for member in finding.of_all if member.tensor):
                indices.setdefault(name, []).append(index)
        return indices

    @cached_property
    def by_finding(self) -> dict[int, int]:
        """The first entry of each finding; findings about no tensor are left out."""
        return {finding: index for index, entry in reversed([*enumerate(self.entries)]) for finding in entry.findings}


@dataclass(frozen=True)
class Document(Judged):
    """A dump, as far as it could be read.

    Attributes:
        path: Its folder.
        report: The result of the check; None while it runs.
        failed: Why there will be no report; empty if there is or will be one.
        is_partial: Whether it is only what one rank shows, while the others are being read.
    """

    path: Path
    dump: Dump
    report: Report | None = None
    failed: str = ""
    is_partial: bool = False
    _sides: dict[Hashable, Sides] = field(default_factory=dict, compare=False, repr=False)
    _layouts: dict[int, tuple[Layout, frozenset[int]] | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def mesh(self) -> Mesh:
        """The mesh of all ranks."""
        return self.dump.files.mesh

    @property
    def missing(self) -> frozenset[int]:
        """The ranks without a readable file, once all are read."""
        return frozenset() if self.is_partial else frozenset(self.dump.files.missing_ranks)

    @cached_property
    def entries(self) -> tuple[TensorEntry, ...]:  # type: ignore[override]
        """The tensors in model order, each once."""
        return tuple(map(self._entry, captured(self.dump)))

    def _entry(self, tensor: Tensor) -> TensorEntry:
        dump, report, names = self.dump, self.report, tensor.names
        dtype, listed = own_dtype(dump, tensor, names[0]), is_listed(dump, tensor, names, report)
        if report is None:
            return TensorEntry(tensor, dtype, "unknown" if self.failed else "pending", listed)
        indices = tuple(sorted({index for name in names for index in self.findings_of.get(name, ())}))
        verdict = verdict_on(dump, tensor, names, report)
        mixed = names if verdict != "good" and len(names) > 1 else []
        verdicts = {name: verdict_on(dump, tensor, [name], report) for name in mixed}
        wrong = wrong_result(tensor, names, report)
        return TensorEntry(tensor, dtype, verdict, listed, indices, verdicts, wrong)

    @property
    def counts(self) -> str:
        """How many tensors the model has; empty if none."""
        weights = len({name for entry in self.entries if entry.role in WEIGHTS for name in entry.names})
        return counted_in_words(weights, "tensor") if weights else ""

    def find(self, text: str) -> str:
        """Return the tensor that a text names, as `shardviz show` finds it.

        Raises:
            ShardvizError: There is none.
        """
        return find_tensors(self.dump, text)[0][0]

    @cached_property
    def counted(self) -> list[CountedTensor]:
        """The tensors that take memory, as `shardviz show --memory` counts them."""
        return counted_tensors(self.dump)

    @cached_property
    def _counted_of(self) -> dict[tuple[str, str], CountedTensor]:
        return {(item.tensor.role, name): item for item in self.counted for name in item.widths}

    def sizes_of(self, entry: int, rank: int, names: Sequence[str] = ()) -> list[int]:
        """Return the bytes of each of an entry's names on a rank; names that take no memory are left out."""
        tensor = self.entries[entry].tensor
        known = ((self._counted_of.get((tensor.role, name)), name) for name in names or tensor.names)
        return [item.on(rank, name) for item, name in known if item is not None]

    @cached_property
    def usage(self) -> Usage:
        """The memory of modules on all ranks."""
        return usage_of(self)

    @cached_property
    def of_a_step(self) -> dict[str, int]:
        """What a plan's step adds to a rank's memory at its fullest moment, at most; empty without a plan."""
        from shardviz.plan.counting import OF_A_STEP, PlanBytes

        planned = self.dump.files.planned
        if planned is None:
            return {}
        by_role = PlanBytes(planned).by_role
        return {role: int(by_role[role].max()) for role in ("buckets", *OF_A_STEP)}

    @cached_property
    def heats(self) -> list[Heat]:
        """What the mesh can show as heat."""
        return heats_of(self.dump, self.report)

    def coloring_of(self, entry: int) -> Coloring:
        """Return what ranks of the dump's mesh get their colors by, as they have them on the map of a tensor.

        A stage's mesh has some of the dump's axes; one with axes of its own, such as two flattened into one, is used.
        """
        sides, mesh = self.drawn(entry), self.mesh
        if sides is None or sides.coloring.mesh is None or {*sides.coloring.axes} <= {*mesh.axes}:
            return Coloring(mesh, sides.coloring.axes if sides is not None else ())
        return sides.coloring

    @cached_property
    def step(self) -> Step:
        """The training step that the dump records."""
        return step_of(self.dump)

    def sides(self, entry: int, name: str = "") -> Sides:
        """Return both sides of an entry's tensor, made once: intended beside held if that is what is wrong.

        Until the check is over only what is claimed is known: a rank that is read later may hold what is missing.
        Entries that are the same but for their names share a map; layers in files of their own have ids of their own.

        Raises:
            DumpError: Its ids are too many to draw.
        """
        tensor = self.entries[entry].tensor
        if name and name != tensor.names[0] and tensor.first.body.dense:
            tensor = replace(tensor, fold=Fold(name))
        key: Hashable = (entry, tensor.names[0], self.report is not None)
        if not self.entries[entry].findings:  # all there is to draw may be its layout, which others have too
            if entry not in self._layouts:
                self._layouts[entry] = only_layout(self.dump, self.entries[entry].tensor)
            key = self._layouts[entry] or key
        sides = self._sides.get(key)
        if sides is None:
            sides = drawn_sides(self.dump, tensor, self.report)
            if not self.is_judged and sides.has_claimed and sides.has_held:
                sides = replace(sides, has_held=False, missing=0)
            if len(self._sides) >= MOST_KEPT:
                self._sides.pop(next(iter(self._sides)), None)  # another thread may have left it out already
            sides = self._sides.setdefault(key, sides)  # of two threads that draw it at once both get the first
        return sides

    def drawn(self, entry: int, name: str = "") -> Sides | None:
        """Return both sides of an entry's tensor; None if there is nothing that can be drawn."""
        try:
            return self.sides(entry, name) if self.entries else None
        except ShardvizError:
            return None

    def describe(self, entry: int, place: Sequence[int], name: str = "") -> str:
        """Say in a few words who holds an element."""
        return hovered(self.sides(entry, name), place, self.entries[entry].tensor.shape)

    def who(self, entry: int, place: Sequence[int], name: str = "") -> list[str]:
        """Say who should hold an element and who does.

        Raises:
            DumpError: The tensor's ids are too many to draw.
        """
        return who_has(self.dump, self.entries[entry].tensor, self.sides(entry, name), place, name)

    def exhibit(self, finding: int) -> Exhibit | None:
        """Return what a finding is seen by, if that is a table."""
        return self._exhibit(finding)

    @cached_property
    def _exhibit(self) -> Callable[[int], Exhibit | None]:
        from shardviz.picture.exhibits.of_finding import exhibit_of

        laid_out = self.report.laid_out if self.report else None
        return cache(lambda finding: exhibit_of(self.dump, self.findings[finding], laid_out))
