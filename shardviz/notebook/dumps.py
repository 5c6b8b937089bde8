"""The run of a dump or a plan, and its tensors: what each rank claims and holds, their values, and the whole."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from shardviz.check.order.case import LaidOut
from shardviz.check.run import report_on
from shardviz.check.verdicts import captured, nothing_checked, num_of_model
from shardviz.dump.records.base import WEIGHTS
from shardviz.dump.tensor import shape_before
from shardviz.errors import DumpError
from shardviz.layout.notation import write
from shardviz.layout.region import Region
from shardviz.notebook.runs import ByRank, Run, Tensors, assembled, concise, read_only
from shardviz.notebook.verdicts import ReportOfRun
from shardviz.picture.display import SVG, Drawable
from shardviz.picture.model.subject import of_tensor
from shardviz.picture.text.report import layout_text, own_dtype
from shardviz.relate.factors import REDUCTIONS, over
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from shardviz.check.order.case import Case
    from shardviz.dump.dump import Dump, Shard
    from shardviz.dump.dump import Tensor as Record
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.placements import Placement
    from shardviz.notebook.runs import Place
    from shardviz.notebook.verdicts import FindingOfRun
    from shardviz.picture.model.subject import Subject
    from shardviz.picture.text.terminal import Terminal

    Array = NDArray[Any]

BY = ("held", "claimed")


class TensorOfRun(Drawable):
    """One tensor of a dump over all ranks; a checkpoint's (`SavedTensor`) has less.

    Attributes:
        run: The run that it is of.
        name: Its name.
        role: What it is to the model: `param`, `buffer`, `grad`, `optim`, `activation`, `output`, `scalar`.

    Example:
        >>> weight = shardviz.load("before.shardviz")["weight"]
        >>> weight.shards
        {0: float32[3, 12], 1: float32[3, 12], 2: float32[3, 12], 3: float32[3, 12]}
        >>> int((weight.full() != weight.full(by="claimed")).sum())
        72
    """

    def __init__(self, run: DumpRun, record: Record, name: str) -> None:
        """Name one tensor of a fold; nothing of it is read.

        Args:
            run: The run.
            record: The fold that it is in, as it was captured first.
            name: Its name.
        """
        self.run, self.name, self.role = run, name, record.role
        self._record, self._dump = record, run.dump

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape; a plain tensor's is that of its weight before sharding, if sizes fit."""
        return shape_before(self._dump, self._record, self.name)

    @property
    def _weight(self) -> str:
        """The name of the weight that a state of the optimizer is of; otherwise its own."""
        return self.name.rpartition(".")[0] if self.role == "optim" else self.name

    @property
    def dtype(self) -> str:
        """The model's own dtype, as torch names it without `torch.`."""
        return own_dtype(self._dump, self._record, self.name)

    @property
    def layout(self) -> str:
        """What its placements claim, in the notation: `[24/tp/fsdp, 12]`."""
        return layout_text(self._record, self.dtype).removeprefix(self.dtype)

    @property
    def claimed(self) -> Layout | None:
        """The layout that its placements claim; None for a plain tensor."""
        return self._record.claimed

    @property
    def placements(self) -> tuple[Placement, ...] | None:
        """What is claimed, one placement for each axis of the mesh; None for a plain tensor."""
        return self.claimed.placements() if self.claimed is not None else None

    @property
    def mesh(self) -> Mesh:
        """The mesh that it is on."""
        return self.claimed.mesh if self.claimed is not None else self.run.mesh

    @property
    def held_layout(self) -> str:
        """Layout that ranks hold, in the notation; empty if unknown or inexpressible."""
        layouts = [case.held for case in self._cases(self.name)]
        return write(layouts[0]) if len(layouts) == 1 and layouts[0] is not None else ""

    @property
    def held(self) -> Mapping[int, Place]:
        """What each rank holds: a region, or each element's number, from 1, if it isn't a block.

        Empty if nothing shows it: the tensor was not stamped, and its values were not looked up in a reference.
        """
        places = self._places(self.name) if self.role in WEIGHTS or self._record.moment == "stamped" else {}
        return ByRank(sorted(places), places.__getitem__, lambda rank: _place_text(places[rank]))

    def _places(self, name: str) -> dict[int, Place]:
        """Return where the ids of a stamped tensor say that each rank's shard belongs."""
        return {
            case.rank(coord): case.regions[coord] if coord in case.regions else read_only(case.ids[coord])
            for case in self._cases(name)
            for coord in case.shards
        }

    def _cases(self, name: str) -> tuple[Case, ...]:
        stamped = self._dump.stamped.get(name)
        if stamped is None or name in self._dump.without_ids:
            return ()
        return self.run.laid_out.cases(stamped, name)

    @property
    def ids(self) -> Mapping[int, NDArray[np.int64]]:
        """The ids that each rank holds, from 1 within the tensor; empty if it was not stamped.

        Zeros are 0, values that are no ids -1, ids of other tensors less.
        """
        stamped = self._dump.stamped.get(self.name)
        shards = stamped.shards if stamped is not None and stamped.role == self.role else {}
        return ByRank(
            shards,
            lambda rank: read_only(self._dump.local_ids(shards[rank], self.name)),
            lambda rank: f"ids{list(shards[rank].body.local_shape)}",
        )

    @property
    def shards(self) -> Mapping[int, Array]:
        """Values that each rank holds, read on demand; bfloat16 as float32.

        Raises:
            DumpError: The dump has no values of it, when they are asked for.
        """
        record = self._values
        return ByRank(
            record.shards,
            lambda rank: read_only(_values_of(self._dump, record.shards[rank], self.name)),
            lambda rank: _shard_text(record.shards[rank], record.dtype),
        )

    @property
    def _values(self) -> Record:
        """The record that has values: the model's own, not the ids."""
        own = self._dump.find("initial", self.role, self.name)
        return own if self._record.moment == "stamped" and own is not None else self._record

    @property
    def grad(self) -> TensorOfRun | None:
        """Its gradient after the step that was recorded; None if there is none."""
        record = self._dump.find("step", "grad", self.name) if self.role != "grad" else None
        return TensorOfRun(self.run, record, self.name) if record is not None else None

    @property
    def reference(self) -> Array | None:
        """The values of the unsharded model, whole; None if the dump has none."""
        moments: tuple[Literal["reference", "updated"], ...] = ("reference", "updated")
        found = (self._dump.find(moment, self.role, self.name) for moment in moments)
        record = next((record for record in found if record is not None), None)
        return read_only(_values_of(self._dump, record.first, self.name)) if record is not None else None

    @concise
    def full(self, by: Literal["held", "claimed"] = "held") -> Array:
        """Return the whole tensor, put together by shardviz and not by torch.

        Sums that are pending are taken.

        Args:
            by: Where each shard goes: where its ids, or its values in a reference, say that it belongs; or where its
                placements claim that it does, which is what torch's `full_tensor()` gives. What has no ids (a step's
                results) goes where the ids of its parameter say, and otherwise where its placements do.

        Raises:
            DumpError: Elements are on no rank that was read, ranks hold different values of one, nothing says where a
                shard belongs, or the dump has no values.
        """
        if by not in BY:
            raise DumpError(f"by={by!r} is not a way to put a tensor together", "by='held' or by='claimed'")
        record = self._values
        if self.claimed is not None and self.claimed.flat is not None:
            shape: tuple[int, ...] = self.claimed.index_shape
        else:
            shape = self.shape
        values = self._reduce({rank: self.shards[rank] for rank in record.shards})
        held = self._held_by_ids() if by == "held" else {}
        parts = {}
        for rank, array in values.items():
            place = held.get(rank)
            if place is None or place.shape != array.shape:
                place = self._claimed_place(record.shards[rank], array.shape)
            parts[rank] = place, array
        absent = [rank for rank in self._dump.files.missing_ranks if rank in self.mesh]
        return assembled(self.name, shape, parts, absent).reshape(self.shape)

    def _held_by_ids(self) -> Mapping[int, Place]:
        """Return where shards belong by their ids, or their weight's ids; empty without ids."""
        is_of_weight = self.role in (*WEIGHTS, "grad", "optim") or self._record.moment == "stamped"
        held = self._places(self._weight) if is_of_weight else {}
        is_known = any(place.size if isinstance(place, Region) else (place > 0).any() for place in held.values())
        return held if is_known else {}

    def _reduce(self, values: dict[int, Array]) -> dict[int, Array]:
        """Return values after the reductions that are pending; a group with a rank missing has none."""
        for axis, op in self.claimed.partial if self.claimed is not None else ():
            if op not in REDUCTIONS:
                raise DumpError(f"{printable(self.name)}: shardviz cannot compute a pending {op} over {axis}")
            values = over(axis, op, values, self.mesh)
        return values

    def _claimed_place(self, shard: Shard, local: tuple[int, ...]) -> Region:
        if shard.layout is not None and shard.rank in shard.layout.mesh:
            return shard.layout.region_of_rank(shard.rank)
        if local != self.shape:
            what = f"which part of {list(self.shape)} rank {shard.rank} holds is unknown; it has {list(local)}"
            raise DumpError(f"{printable(self.name)}: {what}", "`.shards` has each rank's own")
        return Region.whole(local)

    @property
    def findings(self) -> tuple[FindingOfRun, ...]:
        """What the check of the run found about it."""
        return self.run.check().of(self.name)

    @cached_property
    def _subject(self) -> Subject:
        return of_tensor(self._dump, self._record, self.name, self.run.check().judged)

    def lines(self, terminal: Terminal) -> list[Text]:
        """Return which rank holds which part, as `shardviz show` prints it."""
        from shardviz.picture.text.page import page_lines
        from shardviz.picture.text.ranks import rank_lines
        from shardviz.picture.text.terminal import line

        return [*page_lines(self._subject, terminal), line(""), *rank_lines(self._subject, terminal)]

    def markup(self) -> Mapping[str, str]:
        """Return which rank holds which part, as `shardviz show -o FILE.svg` draws it."""
        return {SVG: self.svg()}

    def svg(self) -> str:
        """Return the picture as an SVG file."""
        from shardviz.picture.svg.page import svg

        return svg(self._subject)

    @property
    def title(self) -> str:
        """What it is, in a line."""
        role = "" if self.role == "param" else f" {self.role}"
        return f"Tensor {printable(self.name)}: {self.dtype}{self.layout}{role} on mesh {self.mesh}"


def _place_text(place: Place) -> str:
    return str(place) if isinstance(place, Region) else f"{place.size:,} scattered elements"


def _values_of(dump: Dump, shard: Shard, name: str) -> Array:
    """Return a shard's values in its own dtype, mapped from the file if they are large.

    Raises:
        DumpError: The dump does not have them.
    """
    body = shard.body
    if body.dense and body.moment != "stamped":
        return dump.dense(shard, name)
    if body.values is None:
        raise DumpError(*_no_values(dump, shard, name))
    dtype = "float32" if body.dtype == "bfloat16" else body.dtype
    try:
        return dump.values(shard, name).astype(dtype)
    except TypeError:  # one that numpy does not have
        return dump.values(shard, name)


def _shard_text(shard: Shard, dtype: str) -> str:
    """Write a shard in a few characters."""
    is_kept = shard.body.values is not None or (shard.body.dense and shard.body.moment != "stamped")
    return f"{dtype}{list(shard.body.local_shape)}{'' if is_kept else ' not kept'}"


def _no_values(dump: Dump, shard: Shard, name: str) -> tuple[str, str]:
    """Say why a shard has no values, and what there is instead."""
    if dump.files.planned is not None:
        return f"{printable(name)}: a plan has no values", "`shardviz probe` runs the same file on ranks"
    if shard.body.moment == "stamped":
        return f"{printable(name)}: the dump has the ids of rank {shard.rank}, but no values", "`.ids` has them"
    what = f"{printable(name)}: the dump has only a hash of rank {shard.rank}'s values"
    if not dump.files.run.probe:
        return what, "a job's dump keeps values of small tensors only; `shardviz.load` reads a checkpoint of the job"
    return what, "`shardviz probe --values N` writes those of shards of up to N elements"


class DumpRun(Run[TensorOfRun]):
    """The run of a dump or a plan.

    Attributes:
        dump: The dump as shardviz reads it.
        damaged: Why the files of some ranks could not be read, by rank.
    """

    mesh: Mesh

    def __init__(self, dump: Dump) -> None:
        """Take a dump that was read."""
        files = dump.files
        self.dump, self.path, self.mesh, self.num_ranks = dump, files.path, files.mesh, files.run.num_ranks
        self.damaged: Mapping[int, str] = files.damaged
        self._records: dict[str, Record] = {}
        for record in captured(dump):
            for name in record.names:
                self._records.setdefault(name, record)
        self.tensors = Tensors(self._records, lambda name: TensorOfRun(self, self._records[name], name), "the dump")
        self.tensors.num_results = max(len(self.tensors) - self._num_tensors, 0)

    @cached_property
    def _report(self) -> ReportOfRun:
        report = report_on(self.dump)
        return ReportOfRun(self, report, why_not=nothing_checked(self.dump, report))

    @cached_property
    def laid_out(self) -> LaidOut:
        """What ranks hold of each stamped tensor, laid out when it is asked for."""
        return LaidOut(self.dump)

    def page(self) -> str:
        """Return the run as an HTML page: what `shardviz show -o run.html` writes."""
        from shardviz.picture.html.page import html

        return html(self.dump, self._report.judged)

    def report_page(self, finding: Finding | None = None) -> str:
        """Return its findings as an HTML page, or one of them alone."""
        from shardviz.picture.html.page import findings_html

        return findings_html(self.dump, self._report.judged, finding)

    def lines(self, terminal: Terminal) -> list[Text]:
        """Return its mesh, and a line for each tensor."""
        from shardviz.picture.text.report import table_lines
        from shardviz.picture.text.terminal import line

        return [line((self.title, "bold")), *table_lines(self.dump, None, terminal)]

    def report_lines(self, terminal: Terminal, finding: Finding | None = None) -> list[Text]:
        """Return its report as text, or one of its findings with the table that it is seen by."""
        from shardviz.picture.exhibits.of_finding import exhibit_of
        from shardviz.picture.text.ranks import exhibit_lines
        from shardviz.picture.text.report import findings_lines, report_lines
        from shardviz.picture.text.terminal import line

        report = self._report.judged
        if finding is None:
            return report_lines(self.dump, report, terminal)
        table = exhibit_of(self.dump, finding, report.laid_out)
        rows = [line(""), *exhibit_lines(table, terminal)] if table is not None else []
        return [*findings_lines([finding], terminal), *rows]

    @property
    def title(self) -> str:
        """What it is, in a line."""
        kind = "Plan" if self.dump.files.planned is not None else "Run"
        tensors = counted(self._num_tensors, "tensor")
        return f"{kind} {self.path.resolve().name}: {tensors} on {counted(self.num_ranks, 'rank')}, mesh {self.mesh}"

    @property
    def _num_tensors(self) -> int:
        """The tensors of the model."""
        return num_of_model(self.dump) or len(self.tensors)
