"""Assertions about where numbers are. Every rank calls them, and every rank fails alike; or they are given a dump.

They build what the dump's reader builds and run the checks that `shardviz check` runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardviz.check.hiding import is_of_places
from shardviz.check.run import report_on
from shardviz.dump.dump import Dump, dump_of
from shardviz.dump.read import DumpFiles, read_files
from shardviz.errors import ShardvizError
from shardviz.testing.assertions.message import ShardAssertionError, raise_for

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.check.finding import Finding, NotChecked
    from shardviz.dump.records import Role
    from shardviz.live.capture.stamp import Stamped
    from shardviz.testing.assertions.subjects import Subject

AnyDump = DumpFiles | Path | str


def assert_clean(dump: AnyDump) -> None:
    """Assert that a check of a dump finds nothing.

    Raises:
        ShardAssertionError: It finds something.
        DumpError: The folder is no dump.
        ShardvizError: It is a module.
    """
    __tracebackhide__ = True
    if not isinstance(dump, DumpFiles | Path | str):
        raise ShardvizError(
            f"assert_clean is about a dump, not a {type(dump).__name__}",
            "give it what shardviz.capture wrote; assert_ordered and assert_layout take a module",
        )
    model = _read(dump)
    report = report_on(model)
    raise_for(model, report.findings, report.laid_out)


def assert_ordered(
    model: nn.Module | AnyDump,
    *,
    mesh: DeviceMesh | None = None,
    stamps: Stamped | None = None,
    stage_axes: Sequence[str] = (),
) -> None:
    """Assert that every rank holds the elements that its placements say it holds.

    Args:
        model: A model that `shardviz.testing.stamp` filled before it was sharded and that has not been changed since,
            or a dump.
        mesh: The mesh of the job; by default the test's, or that of the model's DTensors.
        stamps: What `stamp` returned, where the weights have come from another model than this one.
        stage_axes: The mesh axes along which ranks have different layers, as a pipeline's stages do: `("pp",)`.

    Raises:
        MeshError: The mesh has no such axis.
        ShardAssertionError: It does not hold, or cannot be told, as where ids are not exact in a dtype.
        ShardvizError: The model was not stamped.
    """
    __tracebackhide__ = True
    seen = _read(model) if isinstance(model, AnyDump) else _gather_ids(model, mesh, stamps, stage_axes)
    if not seen.files.run.stamps:
        raise ShardvizError(f"{seen.files.path} has no ids", "write it with stamps=shardviz.stamp(model)")
    report = report_on(seen)
    wrong = [finding for finding in report.findings if is_of_places(finding) or finding.kind == "incomplete"]
    raise_for(seen, wrong, report.laid_out)
    _refuse(report.not_checked)


def assert_layout(
    subject: Subject | AnyDump, layouts: str | Mapping[str, str | None], *, mesh: DeviceMesh | None = None
) -> None:
    """Assert how tensors are laid out, by their placements.

    Every parameter of a module must be matched by a rule, and every rule must match something; of several rules that
    match a name, the first counts. Buffers are looked at by rules that match no parameter. A tensor without placements
    is where a layout that splits nothing wants it. Where a stamped module fails, what ranks hold is told too.

    Args:
        subject: A module, a tensor, an optimizer, tensors by name, or a dump.
        layouts: A layout in the notation for all tensors, or layouts by pattern over names:
            `{"layers.*.wq.weight": "[*/tp/fsdp, *]", "norm.*": None}`; None for any layout.
        mesh: The mesh of the job; by default the test's, or that of the DTensors.

    Raises:
        ShardAssertionError: A tensor is laid out in another way, or has no rule, or a rule no tensor.
        ShardvizError: A layout cannot be read, or does not fit the mesh or the tensor.
    """
    __tracebackhide__ = True
    from shardviz.testing.assertions import rules

    seen = _read(subject) if isinstance(subject, AnyDump) else _gather_values(subject, mesh)
    wanted = {"*": layouts} if isinstance(layouts, str) else dict(layouts)
    _raise_with_held(seen, rules.check_rules(seen, wanted), subject, mesh)


def assert_replicated(
    subject: Subject | AnyDump,
    axis: str,
    *,
    of: Collection[Role] = ("param", "buffer", "grad"),
    mesh: DeviceMesh | None = None,
) -> None:
    """Assert that ranks which differ only in their coordinate on an axis hold the same, bit by bit.

    Args:
        subject: A module, a tensor, an optimizer, tensors by name, or a dump. Plain tensors count too.
        axis: A mesh axis.
        of: What is looked at in a module.
        mesh: The mesh of the job; by default the test's, or that of the DTensors.

    Raises:
        ShardAssertionError: Copies differ, or a tensor is split or pending over the axis.
        MeshError: The mesh has no such axis.
    """
    __tracebackhide__ = True
    from shardviz.testing.assertions import copies

    seen = _read(subject) if isinstance(subject, AnyDump) else _gather_values(subject, mesh, of, compared=True)
    raise_for(seen, copies.check_axis(seen, axis))


def assert_reduced(model: nn.Module, axis: str | None = None, *, mesh: DeviceMesh | None = None) -> None:
    """Assert that copies of a gradient are equal, rounding apart: that nothing still waits to be summed.

    A gradient whose placements say that a sum is pending is not compared, nor one that is None. Gradients of plain
    tensors are taken for copies: of parameters that are cut by hand over one axis, name the axis of their copies.

    Args:
        model: A module, after its backward.
        axis: The mesh axis to look along; by default all of them.
        mesh: The mesh of the job; by default the test's, or that of the DTensors.

    Raises:
        MeshError: The mesh has no such axis.
        ShardAssertionError: Copies of a gradient differ, or there are no gradients at all.
    """
    __tracebackhide__ = True
    from shardviz.testing.assertions import reduced

    raise_for(*reduced.check_reduced(model, axis, mesh))


def assert_tied(model: nn.Module | AnyDump, first: str, *others: str, mesh: DeviceMesh | None = None) -> None:
    """Assert that parameters share their storage on every rank that has them.

    Args:
        model: A model or a dump.
        first: A parameter's name.
        others: Names of the parameters that it is tied to.
        mesh: The mesh of the job.

    Raises:
        ShardAssertionError: They do not, or a name is not there.
    """
    __tracebackhide__ = True
    from shardviz.testing.assertions import tied

    seen = _read(model) if isinstance(model, AnyDump) else _gather_values(model, mesh)
    raise_for(seen, tied.check_tied(seen, first, others))


def _read(dump: AnyDump) -> Dump:
    return dump_of(dump if isinstance(dump, DumpFiles) else read_files(dump, strict=False))


def _gather_ids(
    model: nn.Module, mesh: DeviceMesh | None, stamps: Stamped | None = None, stage_axes: Sequence[str] = ()
) -> Dump:
    from shardviz.live.capture.stamp import stamps_of
    from shardviz.testing.assertions.gathering import gather_ids
    from shardviz.testing.assertions.subjects import device_mesh_of

    stamps = stamps or stamps_of(model)
    if stamps is None:
        raise ShardvizError(
            f"the {type(model).__name__} was not stamped, so that nobody knows where its elements belong",
            "call shardviz.testing.stamp(model) before it is sharded, and where its weights go into another model, "
            "assert_ordered(other, stamps=...) with what stamp returned",
        )
    return gather_ids(model, device_mesh_of(model, mesh), stamps, stage_axes)


def _gather_values(
    subject: Any, mesh: DeviceMesh | None, of: Collection[Role] = ("param", "buffer"), *, compared: bool = False
) -> Dump:
    from torch import nn

    from shardviz.testing.assertions.gathering import gather
    from shardviz.testing.assertions.subjects import check_values, device_mesh_of, locals_of

    known = device_mesh_of(subject, mesh)
    locals_ = locals_of(subject, known, of)
    if compared:
        check_values(locals_)

    def add(seen: Any) -> None:
        if isinstance(subject, nn.Module):
            seen.add_ties(subject)
        for local in locals_:
            seen.add_values(local, "initial")

    return gather(add, known)


def _raise_with_held(seen: Dump, findings: list[Finding], subject: Any, mesh: DeviceMesh | None) -> None:
    """Raise for findings, with what ranks hold and a picture of it where the subject was stamped and has its ids."""
    __tracebackhide__ = True
    from shardviz.check.order.laid_out import LaidOut
    from shardviz.testing.assertions import held

    ids = seen if isinstance(subject, AnyDump) or not findings else _ids_of(subject, mesh)
    laid_out = LaidOut(ids) if ids is not None else None
    if laid_out is not None:
        findings = held.with_held(laid_out, findings)
    if laid_out is not None and any(finding.held for finding in findings):
        raise_for(laid_out.dump, findings, laid_out)
    raise_for(seen, findings)


def _ids_of(subject: Any, mesh: DeviceMesh | None) -> Dump | None:
    """Return the ids that ranks hold of a module; None where it was not stamped."""
    from torch import nn

    from shardviz.live.capture.stamp import stamps_of

    return _gather_ids(subject, mesh) if isinstance(subject, nn.Module) and stamps_of(subject) else None


def _refuse(not_checked: Iterable[NotChecked]) -> None:
    """Fail rather than pass tensors whose order was not looked at: masks and flags have none that could be."""
    __tracebackhide__ = True
    reasons = [one for one in not_checked if one.about == "order"]
    if reasons:
        lines = "\n".join(f"  {one.tensor}: {one.why}" for one in reasons)
        raise ShardAssertionError(
            f"whether {reasons[0].tensor} is in order cannot be told: {reasons[0].why}\n{lines}\n"
            "  fix       stamp a model whose dtypes hold every id, model.double() before it is stamped; or let "
            "shardviz.capture_sharding write them a digit a pass"
        )
