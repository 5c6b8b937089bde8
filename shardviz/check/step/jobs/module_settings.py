"""Settings with which two jobs made the module that goes wrong: an eps, a flag, a scale, an activation function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.explain.step.modules import AveragedForward, RepeatedForwardSum, UnexplainedModule
from shardviz.explain.step.two_jobs import OtherModuleSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.explain.finding import Finding


def with_module_settings(finding: Finding, reference: WholeJob, job: WholeJob) -> Finding:
    """Return an unexplained finding about a module with the settings that are not the other job's, if there are any.

    A factor between two results is explained only by a setting that is a fraction.
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
        if not _is_local_size(theirs, ours, job) and (not is_scaled or ("." in ours and "." in theirs))
    )
    return finding.because(OtherModuleSettings(finding.module, texts)) if texts else finding


def _settings_of(module: str, job: WholeJob) -> Mapping[str, str]:
    return next((record.module_settings.get(module, {}) for record in job.records.values()), {})


def _is_local_size(wanted: str, given: str, job: WholeJob) -> bool:
    """Whether two numbers may be sizes of a whole and of a rank's part."""
    if not (wanted.isdecimal() and given.isdecimal()):
        return False
    small, large = sorted((int(wanted), int(given)))
    return small > 0 and large % small == 0 and job.mesh.size % (large // small) == 0
