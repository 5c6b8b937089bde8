"""What optimizer steps before the traced one make of two jobs' weights: rounding alone, or why they differ.

Optimizers such as Adam divide a gradient by its size, so that rounding decides in which direction they move an element
whose gradient is nearly zero: a few of any weight in a narrow dtype, and all of a key's bias, whose gradient is
rounding alone. What the optimizers keep shows whether the gradients of the steps before were the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import weight_of
from shardviz.check.step.jobs.optimizers import RATE, RATES, Options, different_options, options_of
from shardviz.check.step.jobs.starts import OtherWeight, moves_apart
from shardviz.check.step.jobs.states import kind_of_state, states_of
from shardviz.check.step.trace.traces import Weight, coarsest_of
from shardviz.explain.step.two_jobs import DifferentSettings, EarlierStepsDiffer, Gradients, StepsInNarrowDtype
from shardviz.groups import the_only
from shardviz.relate.casts import is_narrower
from shardviz.relate.tolerance import DRIFT, DRIFT_OF_STEPS, EPSILON, MOST_NOISE, NARROW_TERMS, OPPOSITE, UPDATE_OF_JOB
from shardviz.relate.values import magnitude, root_mean_square

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.assembly import Weights
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.explain.cause import Cause

MOMENTS = frozenset(("exp_avg", "exp_avg_sq"))
"""What Adam and its kind keep of a weight: no step of theirs moves an element by much more than the learning rate."""


@dataclass(frozen=True, slots=True)
class History:
    """What two jobs' optimizers keep of a weight says of its gradients in the steps before.

    Attributes:
        part: How far rounding may take an element, relative to how far steps move it, as norms.
        kinds: What is kept, such as `exp_avg`.
        agrees: Whether all of it is the same but for rounding.
        is_noise: Whether one of the states, such as the squares of the gradients, is rounding alone. What is divided
            by it, such as RMSprop's momentum, may then differ.
    """

    part: float
    kinds: frozenset[str] = frozenset()
    agrees: bool = True
    is_noise: bool = False

    def allow(self, apart: Iterable[NDArray[np.float64]], moved: float) -> bool:
        """Whether rounding may take elements so far apart.

        Args:
            apart: How far each is, by parts.
            moved: How far steps may have moved an element.
        """
        every = np.concatenate([part.ravel() for part in apart])
        is_rounding = (self.agrees or self.is_noise) and magnitude(every) <= OPPOSITE * moved
        return is_rounding and (self.is_noise or root_mean_square(every) <= self.part * moved)


def histories_of(reference: WholeJob, job: WholeJob, weights: Weights) -> dict[str, History]:
    """Return what is known of the gradients of weights in the steps before, by weight; nothing if there were none."""
    coarsest = coarsest_of((reference.job, job.job))
    usual = MOST_NOISE if EPSILON[coarsest] > EPSILON["float32"] else UPDATE_OF_JOB
    unknown = History(DRIFT_OF_STEPS.get(coarsest, usual))
    histories = dict.fromkeys(weights.params if job.steps_before else (), unknown)
    for states in states_of(reference, job, weights)[0] if histories else ():
        # Of a gradient whose terms cancel, rounding leaves less than it may take one from the other.
        of_all = max(magnitude(state.wanted) for state in states.states)
        narrow = NARROW_TERMS * states.narrowest
        narrowed = replace(states, noise=narrow * of_all)
        for state in states.states:
            name = weight_of("optim", state.name)
            history = histories.get(name, unknown)
            is_square = bool(np.all(state.wanted >= 0))
            most = (narrow**2 if is_square else narrow) * of_all
            is_noise = all(magnitude(values) <= most for values in (state.wanted, *state.reduced.values()))
            histories[name] = History(
                history.part,
                history.kinds | {kind_of_state(state)},
                history.agrees and not narrowed.wrong(state),
                is_noise or history.is_noise,
            )
    return histories


def drifts_of(
    names: Iterable[str],
    reference: WholeJob,
    job: WholeJob,
    weights: Weights,
    parts: Mapping[str, Mapping[int, Weight]],
) -> dict[str, float]:
    """Return how far weights are apart that rounding may have taken so far before the step, relative to their size.

    Args:
        names: The weights that differ.
        weights: Those of the reference.
        parts: What ranks of the job have of each.
    """
    steps = max(reference.steps_before, job.steps_before)
    rate = max(_largest_rate(reference), _largest_rate(job))
    drifts = {}
    for name in (name for name in names if name in weights.histories):
        whole, history = weights.params[name], weights.histories[name]
        apart = moves_apart(whole, parts[name], weights.belongings.get(name))
        moved = steps * (rate if history.kinds >= MOMENTS else DRIFT * _moved(whole, weights.updated.get(name)))
        if apart is not None and whole.values is not None and history.allow([apart], moved):
            drifts[name] = root_mean_square(apart) / (root_mean_square(whole.values.values) or 1.0)
    return drifts


def _moved(before: Weight, after: Weight | None) -> float:
    """Return how far a step moves an element of a weight at most; 0 if that is not known."""
    if after is None or before.values is None or after.values is None:
        return 0.0
    return magnitude(after.values.values - before.values.values)


def _largest_rate(job: WholeJob) -> float:
    """Return the largest learning rate with which a job is known to have stepped a weight; 0 if none is."""
    rates = (values[rate] for values in options_of(job).values() for rate in RATES if rate in values)
    return max(map(float, rates), default=0.0)


def cause_of_steps(
    others: Sequence[OtherWeight],
    weights: Weights,
    parts: Mapping[str, Mapping[int, Weight]],
    jobs: tuple[WholeJob, WholeJob],
    steps: int,
) -> Cause:
    """Return why so many steps before the traced one moved weights differently."""
    options = options_of(jobs[0]), options_of(jobs[1])
    if different := different_options(options, jobs):
        return DifferentSettings(different)
    rate = the_only({values[RATE] for of_job in options for values in of_job.values() if RATE in values})
    histories = (weights.histories.get(weight.name) for weight in others)
    agree = [history.agrees for history in histories if history is not None and history.kinds]
    gradients: Gradients = "equal" if agree and all(agree) else "other" if agree and steps == 1 else ""
    unknown = EarlierStepsDiffer(steps, rate if rate and all(options) else "", gradients)
    dtypes = _narrow_steps(weights.params, parts, jobs, options)
    if dtypes is None:
        return unknown
    rounding = (steps + 1) * EPSILON[dtypes[0]] / 2
    is_rounding = all(weight.apart <= rounding for weight in others)
    return StepsInNarrowDtype(*dtypes, steps, None if is_rounding else unknown)


def _narrow_steps(
    params: Mapping[str, Weight],
    parts: Mapping[str, Mapping[int, Weight]],
    jobs: tuple[WholeJob, WholeJob],
    options: tuple[Options, Options],
) -> tuple[str, str, str] | None:
    """Return the dtypes of weights that one job's optimizer steps in fewer bits, and that job's name; else None.

    What an optimizer steps is in its groups: a copy in more bits has another name there.
    """
    for name, weight in params.items():
        shard = next(iter(parts.get(name, {}).values()), None)
        if shard is None or shard.values is None or weight.values is None:
            continue
        dtypes = weight.values.dtype, shard.values.dtype
        for at in (0, 1):
            narrow, wide = dtypes[at], dtypes[1 - at]
            if narrow != wide and is_narrower(narrow, wide) and name in options[at]:
                return narrow, wide, jobs[at].name
    return None
