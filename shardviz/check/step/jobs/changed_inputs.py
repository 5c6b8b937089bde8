"""Inputs, and settings of a module, that differ: rows normalized by ranks' own, rounded inputs, an eps or a flag.

Rounding a batch takes what modules return as far as narrow numbers are apart. It takes the sine of a timestep, or a
position's angle, anywhere: a bfloat16 has no 275.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.trace.calls import is_within
from shardviz.check.step.trace.judging import BAD
from shardviz.check.step.trace.traces import in_both
from shardviz.explain.step.batches import NormalizedByOwnRows
from shardviz.explain.step.modules import AveragedForward, RepeatedForwardSum, RoundedInput, UnexplainedModule
from shardviz.explain.step.two_jobs import OtherModuleSettings
from shardviz.explain.templates import number
from shardviz.groups import the_only
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Partial, Shard, StridedShard
from shardviz.relate.casts import is_narrower, rounded
from shardviz.relate.tolerance import FEW, LEAST_STATISTIC
from shardviz.relate.values import farthest, magnitude

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.judging import Judging
    from shardviz.check.step.trace.traces import Kept
    from shardviz.dump.records.trace import Place
    from shardviz.explain.finding import Finding
    from shardviz.layout.placements import Placement

    Pairs = Mapping[int, tuple[NDArray[np.float64], NDArray[np.float64]]]


COARSE = 0.25
"""An angle that is rounded by as much is another one."""

FAR = 3.0
"""So many times as far off as narrow numbers may be: no rounding of results."""
MOST_GAIN = 16.0
"""A result that is off by more than so many times what its input was rounded by is wrong for another reason."""


def rounded_input(evidence: Evidence, judging: Judging, job: WholeJob) -> Finding | None:
    """Return that a module is given rounded inputs of which it makes something else; None if no module is.

    If the forward goes wrong before such a module, or in a module that isn't in it, that comes first.
    """
    first = evidence.divergence
    for place in judging.judgments:
        finding = _of_input(judging, job, place) if place.what == "input" else None
        if finding is not None:
            is_in_it = first is not None and (first.module == place.module or is_within(first.module, place.module))
            return finding if first is None or first.direction == "backward" or is_in_it else None
    return None


def _of_input(judging: Judging, job: WholeJob, place: Place) -> Finding | None:
    """Return the finding of an input that is the other job's but for rounding, if what is computed of it isn't."""
    whole, parts = judging.whole[place], judging.held(place)
    dtypes = {part.dtype for part in parts.values()}
    if whole.values is None or whole.needs_grad or "float" not in whole.values.dtype or len(dtypes) != 1:
        return None
    # What the model itself is given was kept before FSDP casts it.
    casts_to = the_only({wrapper.casts_to for wrapper in job.wrappers}) if not place.module else None
    narrow = casts_to or dtypes.pop()
    layout = judging.judgments[place].layout
    if (
        layout is None
        or not is_narrower(narrow, whole.values.dtype)
        or any(isinstance(each, Partial) for each in layout)
    ):
        return None
    pairs = _pairs(judging, place, layout)
    if casts_to:
        pairs = {rank: (wanted, rounded(held, casts_to)) for rank, (wanted, held) in pairs.items()}
    cast = {rank: np.array_equal(held, rounded(wanted, narrow)) for rank, (wanted, held) in pairs.items()}
    if not pairs or not all(cast.values()) or all(np.array_equal(*pair) for pair in pairs.values()):
        return None
    inside = {each.module for each in judging.judgments if is_within(each.module, place.module)} | {place.module}
    own = [each for each in judging.judgments if not each.is_gradient and each.module in inside]
    results = (each for each in own if each.call == place.call and (each.module, each.what) != (place.module, "input"))
    ordered = sorted(results, key=lambda each: judging.whole[each].order)
    if casts_to:  # the model may use what is rounded after other modules: then a module is given what is far off
        is_coarse = any(farthest(held, wanted) >= COARSE for wanted, held in pairs.values())
        ordered = [each for each in ordered if is_coarse and set(judging.judgments[each].state.values()) & set(BAD)]
    first = next(iter(ordered), None)
    if first is None or not set(judging.judgments[first].state.values()) & set(BAD):
        return None
    if casts_to and first.what != "input":
        return None
    near = judging.judgments[first].near
    off = {rank: farthest(held, wanted) for rank, (wanted, held) in _pairs(judging, first, layout).items()}
    ranks = tuple(rank for rank, far in off.items() if FAR * near < far < math.inf)
    if not ranks or not near:
        return None
    wanted, held = max(pairs.values(), key=lambda pair: magnitude(pair[1] - pair[0]))
    at = np.unravel_index(np.argmax(np.abs(held - wanted)), wanted.shape)
    if max(off[rank] for rank in ranks) > MOST_GAIN * abs(float(held[at] - wanted[at])):
        return None
    sentence = (
        f"what it is given is rounded to {narrow}, such as {wanted[at]:g} to {held[at]:g}, and what it computes of it "
        f"is off by up to {max(off.values()):.3g} (rounding of results allows {near:.2g})"
    )
    is_fsdp = any(wrapper.kind == "fsdp" for wrapper in job.wrappers)
    name = place.module or "the model itself"
    return RoundedInput(narrow, is_fsdp).finding(name, ranks, sentence, kind="wrong-value", module=place.module)


def _pairs(judging: Judging, place: Place, layout: tuple[Placement, ...]) -> Pairs:
    """Return what one process has of each rank's part at a place that is split as an input is, and the part.

    Nothing if it lacks a dim that the input is split along.
    """
    whole = judging.whole[place].values
    if whole is None or len(whole.shape) == 0:
        return {}
    if any(isinstance(each, Shard | StridedShard) and each.dim >= len(whole.shape) for each in layout):
        return {}
    split = Layout.from_placements(judging.mesh, whole.shape, layout)
    pairs = {}
    for rank, part in judging.held(place).items():
        region = split.region_of_rank(rank)
        pair = in_both(whole, part, region) if region.shape == part.shape else None
        if pair is not None:
            pairs[rank] = pair
    return pairs


def normalized_rows(whole: Kept, given: Mapping[int, Kept]) -> tuple[str, NormalizedByOwnRows] | None:
    """Say that ranks have the other job's rows with another factor and offset for each column, and why; None if not.

    The rows that a rank has are then not known by their values. Ranks have runs of rows, or every so many.
    """
    if not all(each.is_whole and "float" in each.dtype for each in (whole, *given.values())):
        return None
    shares = list({part.values.tobytes(): part.values for part in given.values()}.values())
    size, rest = divmod(len(whole.values), len(shares))
    if rest or len(shares) < 2 or any(share.shape != (size, *whole.shape[1:]) for share in shares):
        return None
    for every in (np.split(whole.values, len(shares)), [whole.values[at :: len(shares)] for at in range(len(shares))]):
        for dim in sorted({1, whole.values.ndim - 1} & {*range(1, whole.values.ndim)}):
            pairs = zip(every, shares, strict=True)
            fits = [fit for rows, share in pairs if (fit := _fit_of_columns(rows, share, dim)) is not None]
            if len(fits) == len(shares):
                is_own = any(not np.allclose(fit, fits[0], LEAST_STATISTIC, LEAST_STATISTIC) for fit in fits)
                return _normalized_text(fits, dim, given), NormalizedByOwnRows(is_own)
    return None


def _normalized_text(fits: Sequence[NDArray[np.float64]], dim: int, given: Mapping[int, Kept]) -> str:
    """Say what ranks have of the other job's rows, with the numbers of the first two that differ."""
    at = int(np.argmax(np.abs(fits[0] - fits[1]).max(axis=0)))
    first = min(given)
    rank = next((rank for rank, part in given.items() if not np.array_equal(part.values, given[first].values)), first)
    texts = [
        f"{number(factors[at])} times the other job's {'+' if offsets[at] >= 0 else '-'} {number(abs(offsets[at]))} on "
        f"rank {which}"
        for which, (factors, offsets) in zip((first, rank), fits, strict=False)
    ]
    place = f"index {at} of dim {dim}"
    return f"its ranks were given the other job's rows, scaled and shifted: {place} is {' and '.join(texts)}"


def _fit_of_columns(rows: NDArray[np.float64], share: NDArray[np.float64], dim: int) -> NDArray[np.float64] | None:
    """Return factors and offsets along a dim that make a rank's rows of the other job's; None if none do.

    A column of two different numbers has such a factor by chance; more of them prove it. Statistics of other rows have
    another mean, too: factors alone come from something else.
    """
    columns, held = (np.moveaxis(values, dim, 0).reshape(values.shape[dim], -1) for values in (rows, share))
    centered, held_centered = (values - values.mean(1, keepdims=True) for values in (columns, held))
    squares = np.sum(centered**2, 1)
    factors = np.divide(np.sum(centered * held_centered, 1), squares, out=np.zeros_like(squares), where=squares > 0)
    off = np.abs(held_centered - factors[:, None] * centered).max(initial=0.0)
    num_proofs = sum(max(len(np.unique(column)) - 2, 0) for column in columns)
    if num_proofs < FEW or np.any(factors < 0) or off > LEAST_STATISTIC * np.abs(held_centered).max(initial=0.0):
        return None
    offsets = held.mean(1) - factors * columns.mean(1)
    is_shifted = np.any(np.abs(offsets) > LEAST_STATISTIC * np.abs(held).max(initial=0.0))
    return np.stack([factors, offsets]) if is_shifted else None


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
