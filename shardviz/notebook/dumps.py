"""The run of a dump or a plan: its tensors by name, its report, its pages."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.check.order.case import LaidOut
from shardviz.check.run import report_on
from shardviz.check.verdicts import captured, nothing_checked, num_of_model
from shardviz.notebook.dump_tensors import TensorOfRun
from shardviz.notebook.runs import Run, Tensors
from shardviz.notebook.verdicts import ReportOfRun
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.text import Text

    from shardviz.dump.dump import Dump
    from shardviz.dump.dump import Tensor as Record
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.text.terminal import Terminal


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
        from shardviz.picture.text.findings import findings_lines
        from shardviz.picture.text.ranks import exhibit_lines
        from shardviz.picture.text.report import report_lines
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
