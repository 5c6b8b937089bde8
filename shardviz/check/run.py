"""All checks of a dump: each family over each tensor, and what they found, worst first.

Tensors that hold what they claim are passed by; a check that cannot be made says why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.asclaimed import is_as_claimed
from shardviz.check.case import Case, cases_of
from shardviz.check.finding import Finding, NotChecked, Report
from shardviz.check.foreign import check_foreign
from shardviz.check.places import check_places
from shardviz.check.shapes import check_global_shape, check_label
from shardviz.dump.read import read_dump
from shardviz.dump.tensors import model_of
from shardviz.errors import ShardvizError
from shardviz.names import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardviz.dump.tensors import Model, Tensor

Result = Finding | NotChecked
OF_IDS = ("missing", "duplicated", "foreign", "name-collision")
"""Kinds that say more than a wrong label does."""


def check(path: Path | str) -> Report:
    """Read a dump and check it; damaged files become findings.

    Raises:
        DumpError: The folder is no dump.
    """
    return check_model(model_of(read_dump(path, strict=False)))


def check_model(model: Model) -> Report:
    """Return every disagreement between what a dump's ranks claim, hold and are meant to hold."""
    results = [result for tensor in model.stage("stamped") for result in _check_stamped(model, tensor)]
    findings = [result for result in results if isinstance(result, Finding)]
    order = {name: index for index, name in enumerate(model.stamps)}
    findings.sort(key=lambda finding: _rank_of_finding(finding, order))
    return Report(
        num_ranks=model.dump.run.num_ranks,
        num_tensors=len({name for tensor in model.tensors for name in tensor.names}),
        findings=tuple(findings),
        not_checked=tuple(dict.fromkeys(result for result in results if isinstance(result, NotChecked))),
    )


def _rank_of_finding(finding: Finding, order: dict[str, int]) -> tuple[object, ...]:
    """Sort errors first, then as the model has its tensors."""
    position = order.get(finding.tensor, len(order))
    return finding.severity != "error", position, natural_key(finding.tensor), finding.kind


def _check_stamped(model: Model, tensor: Tensor) -> Iterator[Result]:
    """Check a fold once, and say what is found of every name in it."""
    if is_as_claimed(model, tensor):
        return
    try:
        found: list[Result] = [*check_global_shape(model, tensor)]
        if not found:
            for case in cases_of(model, tensor):
                found += _check_case(case)
    except ShardvizError as error:
        yield from (NotChecked(name, error.message) for name in tensor.names)
        return
    dense = any(shard.body.dense for shard in tensor.shards.values())
    for name in tensor.names:
        yield from (replace(result, tensor=name) for result in found if not dense or result.tensor == name)


def _check_case(case: Case) -> list[Result]:
    """Run the families on one case: what is the cause of something else is looked at first, and alone."""
    if case.as_claimed and len({shard.layout for shard in case.shards.values()}) == 1:
        return []
    if case.claimed is not None and case.claimed.partial and case.held is not case.claimed:
        return [NotChecked(case.name, f"a sum over {_pending(case)} is pending, so what ranks hold are no ids")]
    labels = list(check_label(case))
    found = list(check_foreign(case)) or list(check_places(case))
    return [*labels, *(finding for finding in found if not labels or finding.kind in OF_IDS)]


def _pending(case: Case) -> str:
    assert case.claimed is not None
    return ", ".join(axis for axis, _ in case.claimed.partial)
