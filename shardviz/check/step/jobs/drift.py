"""How far apart rounding alone takes the weights of two jobs in optimizer steps.

Adam divides a gradient by its own size, so that rounding decides in which direction it moves an element whose gradient
is nearly zero: a few of any weight in a narrow dtype, and all of a key's bias, whose gradient is rounding alone. The
moments that the optimizers keep show whether the gradients of the steps before were the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import weight_of
from shardviz.check.step.jobs.optimizers import RATES, options_of
from shardviz.check.step.jobs.starts import moves_apart
from shardviz.check.step.jobs.states import kind_of_state, states_of
from shardviz.relate.tolerance import MOST_NOISE, NARROW_TERMS, OPPOSITE, ROUNDINGS_OF_ROLE
from shardviz.relate.values import magnitude, root_mean_square

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.assembly import Weights
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Weight

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What optimizers keep that divide a gradient by its own size."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What the moments that two jobs' optimizers keep of a weight say of its gradients in the steps before.

    Attributes:
        agree: Whether they were the same but for rounding.
        are_noise: Whether they were rounding alone.
    """

    agree: bool
    are_noise: bool

    def allow(self, apart: Iterable[NDArray[np.float64]], moved: float) -> bool:
        """Whether rounding may take elements so far apart.

        Args:
            apart: How far each is, by parts.
            moved: How far steps may have moved an element.
        """
        every = np.concatenate([part.ravel() for part in apart])
        is_rounding = self.agree and magnitude(every) <= OPPOSITE * moved
        return is_rounding and (self.are_noise or root_mean_square(every) <= MOST_NOISE * moved)


def moments_of(reference: WholeJob, job: WholeJob, weights: Weights) -> dict[str, Moments]:
    """Return what is known of the gradients of weights that Adam moved in the steps before, by weight."""
    kinds = {}
    for states in states_of(reference, job, weights)[0] if job.steps_before else ():
        # Of a gradient whose terms cancel, rounding leaves less than it may take one from the other.
        narrowed = replace(states, noise=states.noise * NARROW_TERMS / ROUNDINGS_OF_ROLE["grad"])
        kinds[kind_of_state(states.states[0])] = narrowed
    if not kinds.keys() >= set(MOMENTS):
        return {}
    first, second = (kinds[kind] for kind in MOMENTS)
    agreeing = {weight_of("optim", state.name) for state in second.states if not second.wrong(state)}
    moments = {}
    for state in first.states:
        name = weight_of("optim", state.name)
        moments[name] = Moments(name in agreeing and not first.wrong(state), magnitude(state.wanted) <= first.noise)
    return moments


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
    moved = steps * max(_largest_rate(reference), _largest_rate(job))
    drifts = {}
    for name in (name for name in names if name in weights.moments):
        whole = weights.params[name]
        apart = moves_apart(whole, parts[name], weights.belongings.get(name))
        if apart is not None and whole.values is not None and weights.moments[name].allow([apart], moved):
            drifts[name] = root_mean_square(apart) / (root_mean_square(whole.values.values) or 1.0)
    return drifts


def _largest_rate(job: WholeJob) -> float:
    """Return the largest learning rate with which a job is known to have stepped a weight; 0 if none is."""
    rates = (values[rate] for values in options_of(job).values() for rate in RATES if rate in values)
    return max(map(float, rates), default=0.0)
