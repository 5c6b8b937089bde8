"""Settings with which two jobs made the module that goes wrong: an eps, a flag, a scale, an activation function."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.explain.step.modules import AveragedForward, RepeatedForwardSum, UnexplainedModule
from shardviz.explain.step.two_jobs import OtherModuleSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.explain.finding import Finding


def with_module_settings(finding: Finding, reference: WholeJob, job: WholeJob) -> Finding:
    """Return an unexplained finding about a module with the settings that are not the other job's, if there are any.

    A factor between two results, the size of an axis, is explained only by a number that differs by it.
    """
    explanation = finding.explanation
    is_scaled = isinstance(explanation, AveragedForward | RepeatedForwardSum)
    if not is_scaled and not isinstance(explanation, UnexplainedModule):
        return finding
    there, here = (_settings_of(finding.module, each) for each in (reference, job))
    others = {key: (here[key], there[key]) for key in there if key in here and here[key] != there[key]}
    texts = tuple(
        f"{key} is {ours} in {job.name} and {theirs} in {reference.name}"
        for key, (ours, theirs) in others.items()
        if not _is_local_size(theirs, ours, job) and (not is_scaled or _differ_by_size(theirs, ours, job))
    )
    return finding.because(OtherModuleSettings(finding.module, texts)) if texts else finding


def _settings_of(module: str, job: WholeJob) -> Mapping[str, str]:
    records = (record.module_settings for record in job.records.values())
    return next((settings[module] for settings in records if module in settings), {})


def _is_local_size(wanted: str, given: str, job: WholeJob) -> bool:
    """Whether two numbers may be sizes of a whole and of a rank's part."""
    if not (wanted.isdecimal() and given.isdecimal()):
        return False
    small, large = sorted((int(wanted), int(given)))
    return small > 0 and large % small == 0 and job.mesh.size % (large // small) == 0


def _differ_by_size(wanted: str, given: str, job: WholeJob) -> bool:
    """Whether one number is the other's times the size of an axis, or divided by it."""
    try:
        ratio = float(given) / float(wanted)
    except (ValueError, ZeroDivisionError):
        return False
    sizes = [job.mesh.axis_size(axis) for axis in job.mesh.long_axes]
    return any(math.isclose(ratio, way) for size in sizes for way in (size, 1 / size))
