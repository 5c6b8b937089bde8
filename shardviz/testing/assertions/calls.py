"""Assertions about layouts and values, called by every rank, or on a dump.

On ranks they fail on every rank. They build a `Dump` from all ranks and run the checks of `shardviz check`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardviz.check.report import is_of_places
from shardviz.check.run import report_on
from shardviz.check.verdicts import nothing_checked
from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.dump.dump import Dump, dump_of
from shardviz.dump.read import DumpFiles, read_files
from shardviz.errors import ShardvizError
from shardviz.testing.assertions.message import ShardAssertionError, raise_for, refuse_unchecked, refuse_unordered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.base import Role
    from shardviz.explain.finding import Finding
    from shardviz.live.capture.stamp import Stamped
    from shardviz.testing.assertions.subjects import Subject

AnyDump = DumpFiles | Path | str
Made = TypeVar("Made")

MOST_COMPARED = 1 << 14
"""Elements of a copy that are compared one by one if copies differ; of larger ones only digests are."""


def assert_clean(dump: AnyDump, *, strict: bool = False) -> None:
    """Assert that a check of a dump or a checkpoint finds nothing, as `shardviz check PATH` would report.

    Args:
        dump: A dump, its folder, or a checkpoint.
        strict: Fail if anything was not checked, too, as `shardviz check --strict` does.

    Raises:
        ShardAssertionError: The check has findings, or nothing in the dump could be checked.
        DumpError: The path is neither a dump nor a checkpoint.
        ShardvizError: `dump` is a module.

    Example:
        @spmd(mesh={"fsdp": 2, "tp": 2})
        def test_sharding_is_clean(mesh, shard_dump):
            shardviz.capture_sharding(build, parallelize, shard_dump, mesh=mesh)
            assert_clean(shard_dump)
    """
    __tracebackhide__ = True
    if not isinstance(dump, DumpFiles | Path | str):
        raise ShardvizError(
            f"assert_clean checks a dump, not a {type(dump).__name__}",
            "pass the folder that shardviz.capture wrote; assert_ordered and assert_layout take a module",
        )
    if not isinstance(dump, DumpFiles) and is_checkpoint(Path(dump)):
        _assert_clean_checkpoint(Path(dump), strict=strict)
        return
    checked_dump = _read(dump)
    report = report_on(checked_dump)
    raise_for(checked_dump, report.findings, report.laid_out)
    if why := nothing_checked(checked_dump, report):
        raise ShardAssertionError(f"{why}\n  fix       {TO_CHECK}")
    if strict:
        refuse_unchecked(report)


def _assert_clean_checkpoint(path: Path, *, strict: bool) -> None:
    """Assert the same of a checkpoint."""
    __tracebackhide__ = True
    report = _shown_in_the_test(lambda: check_checkpoint(open_checkpoint(path)))
    raise_for(None, report.findings)
    if not report.num_tensors:
        raise ShardAssertionError(f"{path} has no tensors\n  fix       save the model's state_dict in it")
    if strict:
        refuse_unchecked(report)


TO_CHECK = (
    "capture the model's weights, with stamps=shardviz.stamp(model) from before sharding or with reference=CHECKPOINT"
)


def assert_ordered(
    model: nn.Module | AnyDump,
    *,
    mesh: DeviceMesh | None = None,
    stamps: Stamped | None = None,
    stage_axes: Sequence[str] = (),
) -> None:
    """Assert that every rank holds the elements that its placements claim.

    Args:
        model: A model that `shardviz.testing.stamp` filled before it was sharded and that has not changed since, or a
            dump.
        mesh: The mesh of the job; by default the test's, or that of the model's DTensors.
        stamps: The value that `stamp` returned, if the weights were stamped in a different model than this one.
        stage_axes: The mesh axes along which ranks have different layers, as a pipeline's stages do: `("pp",)`.

    Raises:
        MeshError: The mesh has no such axis.
        ShardAssertionError: A rank does not hold its elements in order, or that cannot be checked: a dtype rounds ids.
        ShardvizError: The model was not stamped.

    Example:
        @spmd(mesh={"fsdp": 2, "tp": 2})
        def test_rows_are_where_they_belong(mesh):
            model = build()
            stamp(model)
            parallelize(model, mesh)
            assert_ordered(model)

        If FSDP2 over tensor parallel is labeled left to right, this fails on every rank:

            weight: 2 of 4 ranks do not hold the elements their placements claim: ...
              claimed   float32[12/fsdp/tp, 12]
              held      float32[12/tp/fsdp, 12]
    """
    __tracebackhide__ = True
    checked_dump = _read(model) if isinstance(model, AnyDump) else _gather_ids(model, mesh, stamps, stage_axes)
    if not checked_dump.files.run.stamps:
        raise ShardvizError(f"{checked_dump.files.path} has no ids", "capture it with stamps=shardviz.stamp(model)")
    report = report_on(checked_dump)
    wrong = [finding for finding in report.findings if is_of_places(finding) or finding.kind == "incomplete"]
    raise_for(checked_dump, wrong, report.laid_out)
    refuse_unordered(report)


def assert_layout(
    subject: Subject | AnyDump, layouts: str | Path | Mapping[str, str | None], *, mesh: DeviceMesh | None = None
) -> None:
    """Assert the layout of tensors, by their placements.

    Every parameter of a module must match a rule, and every rule must match a tensor; if several rules match a name,
    the first counts. Buffers are checked only by rules that match no parameter. A tensor without placements satisfies a
    layout that splits nothing. If a stamped module fails, the failure also shows the layout that ranks really hold.

    Args:
        subject: A module, a tensor, an optimizer, tensors by name, or a dump.
        layouts: A layout in the notation for all tensors, or layouts by pattern over names:
            `{"layers.*.wq.weight": "[*/tp/fsdp, *]", "norm.*": None}`; None for any layout. Or a lockfile,
            `layouts.lock`, that `shardviz plan --lock` wrote: its shapes, dtypes and the axes that split them
            are compared, and not how large the axes are, so that a lockfile of 2,048 ranks holds on 4.
        mesh: The mesh of the job; by default the test's, or that of the DTensors.

    Raises:
        ShardAssertionError: A tensor has a different layout or matches no rule, or a rule matches no tensor.
        ShardvizError: A layout cannot be read, or does not fit the mesh or the tensor.

    Example:
        @spmd(mesh={"fsdp": 2, "tp": 2})
        def test_weights_are_split_over_tp_then_fsdp(mesh):
            model = parallelize(build(), mesh)
            assert_layout(model, {"up.weight": "[*/tp/fsdp, *]", "*.bias": None})

        If FSDP2 is missing from `parallelize`, it fails with

            up.weight: 4 of 4 ranks claim float32[24/tp, 12], not the intended [*/tp/fsdp, *]
    """
    __tracebackhide__ = True
    from shardviz.testing.assertions import rules

    checked_dump = _read(subject) if isinstance(subject, AnyDump) else _gather_values(subject, mesh)
    lock = Path(layouts) if isinstance(layouts, str | Path) and str(layouts).endswith(".lock") else None
    if lock is not None:
        from shardviz.plan.lock import layouts_of

        layouts = layouts_of(lock)
    expected: dict[str, str | None] = {"*": str(layouts)} if isinstance(layouts, str | Path) else dict(layouts)
    try:
        _raise_with_held(checked_dump, rules.check_rules(checked_dump, expected), subject, mesh)
    except (ShardAssertionError, ShardvizError) as error:
        known = error if lock is None else rules.of_lock(error, lock, checked_dump)
        raise known.with_traceback(None) from None


def assert_replicated(
    subject: Subject | AnyDump, axis: str, *, of: Collection[Role] = ("param", "buffer"), mesh: DeviceMesh | None = None
) -> None:
    """Assert that ranks that differ only along an axis hold bitwise equal values.

    Gradients are compared if `of` has "grad". By default they are not: what a step leaves behind that was each rank's
    own, as between two averages of the weights, is no copy. `assert_reduced` compares gradients up to rounding.

    Args:
        subject: A module, a tensor, an optimizer, tensors by name, or a dump. Plain tensors count too.
        axis: A mesh axis.
        of: The roles of the tensors to compare in a module.
        mesh: The mesh of the job; by default the test's, or that of the DTensors.

    Raises:
        ShardAssertionError: Copies differ, or a tensor is split or pending over the axis.
        MeshError: The mesh has no such axis.

    Example:
        @spmd(mesh={"replicate": 2, "shard": 2})
        def test_replicas_start_equal(mesh):
            model = build()
            fully_shard(model, mesh=mesh)
            assert_replicated(model, "replicate")
    """
    __tracebackhide__ = True
    from shardviz.testing.assertions import copies

    checked_dump = _read(subject) if isinstance(subject, AnyDump) else _gather_values(subject, mesh, of, compared=True)
    raise_for(checked_dump, copies.check_axis(checked_dump, axis))


def assert_reduced(model: nn.Module, axis: str | None = None, *, mesh: DeviceMesh | None = None) -> None:
    """Assert that copies of each gradient are equal up to rounding: no all-reduce is missing.

    A gradient that is None, or whose placements declare a pending sum, is not compared. Gradients of plain tensors are
    taken as copies: for parameters that are split over one axis by hand, pass the axis of their copies.

    Args:
        model: A module, after its backward.
        axis: The mesh axis along which to compare; by default all of them.
        mesh: The mesh of the job; by default the test's, or that of the DTensors.

    Raises:
        MeshError: The mesh has no such axis.
        ShardAssertionError: Copies of a gradient differ, or there are no gradients at all.

    Example:
        @spmd(mesh={"dp": 2})
        def test_gradients_are_averaged_over_dp(mesh):
            model = DistributedDataParallel(build(), process_group=mesh.get_group("dp"))
            model(own_batch(mesh)).square().mean().backward()
            assert_reduced(model, "dp")

        If backward ran under `no_sync()`, it fails with a line such as

            0.weight: the gradient differs along dp: rank 0 and rank 1 are up to 0.21 apart
    """
    __tracebackhide__ = True
    from shardviz.testing.assertions import copies

    raise_for(*copies.check_reduced(model, axis, mesh))


def assert_tied(model: nn.Module | AnyDump, first: str, *others: str, mesh: DeviceMesh | None = None) -> None:
    """Assert that parameters share their storage on every rank that has them.

    Args:
        model: A model or a dump.
        first: A parameter's name.
        others: Names of the parameters that it is tied to.
        mesh: The mesh of the job.

    Raises:
        ShardAssertionError: They do not share storage on some rank, or no rank has a tensor of that name.

    Example:
        @spmd(mesh={"tp": 2})
        def test_head_and_embedding_stay_tied(mesh):
            model = parallelize(build(), mesh)
            assert_tied(model, "embed.weight", "head.weight")
    """
    __tracebackhide__ = True
    from shardviz.testing.assertions import copies

    checked_dump = _read(model) if isinstance(model, AnyDump) else _gather_values(model, mesh)
    raise_for(checked_dump, copies.check_tied(checked_dump, first, others))


def _read(dump: AnyDump) -> Dump:
    __tracebackhide__ = True
    return _shown_in_the_test(lambda: dump_of(dump if isinstance(dump, DumpFiles) else read_files(dump, strict=False)))


def _shown_in_the_test(function: Callable[[], Made]) -> Made:
    """Call a function; its errors for users lose the frames in which they were made, and point at the test's line."""
    __tracebackhide__ = True
    try:
        return function()
    except ShardvizError as error:
        raise error.with_traceback(None) from None


def _gather_ids(
    model: nn.Module, mesh: DeviceMesh | None, stamps: Stamped | None = None, stage_axes: Sequence[str] = ()
) -> Dump:
    from shardviz.live.capture.stamp import stamps_of
    from shardviz.testing.assertions.subjects import device_mesh_of, gather_ids

    stamps = stamps or stamps_of(model)
    if stamps is None:
        raise ShardvizError(
            "the model was not stamped, so its elements cannot be traced",
            "call stamps = shardviz.testing.stamp(model) before it is sharded; if its weights are loaded into another "
            "model, call assert_ordered(other, stamps=stamps)",
        )
    return gather_ids(model, device_mesh_of(model, mesh), stamps, stage_axes)


def _gather_values(
    subject: Any, mesh: DeviceMesh | None, of: Collection[Role] = ("param", "buffer"), *, compared: bool = False
) -> Dump:
    from torch import nn

    from shardviz.testing.assertions.subjects import check_values, device_mesh_of, gather, locals_of

    device_mesh = device_mesh_of(subject, mesh)
    locals_ = locals_of(subject, device_mesh, of)
    if compared:
        check_values(locals_)

    def add(capture: Any) -> None:
        if compared:
            capture.values_limit = MOST_COMPARED
        if isinstance(subject, nn.Module):
            capture.add_ties(subject)
        for local in locals_:
            capture.add_values(local, "initial")

    return gather(add, device_mesh)


def _raise_with_held(checked_dump: Dump, findings: list[Finding], subject: Any, mesh: DeviceMesh | None) -> None:
    """Raise for findings, with held layouts and a picture if the subject was stamped."""
    __tracebackhide__ = True
    from shardviz.check.order.case import LaidOut
    from shardviz.testing.assertions import copies

    ids = checked_dump if isinstance(subject, AnyDump) or not findings else _ids_of(subject, mesh)
    laid_out = LaidOut(ids) if ids is not None else None
    if laid_out is not None:
        findings = copies.with_held(laid_out, findings)
    if laid_out is not None and any(finding.held for finding in findings):
        raise_for(laid_out.dump, findings, laid_out)
    raise_for(checked_dump, findings)


def _ids_of(subject: Any, mesh: DeviceMesh | None) -> Dump | None:
    """Return the ids that ranks hold of a module; None if it was not stamped."""
    from torch import nn

    from shardviz.live.capture.stamp import stamps_of

    return _gather_ids(subject, mesh) if isinstance(subject, nn.Module) and stamps_of(subject) else None
