"""How far a value may be off: roundings of dtypes, bounds, every threshold of the judges.

The procedure, from the strictest case to the loosest:

1. What only moves data is compared bit by bit, and a cast by rounding the wanted values with `casts`: `Bound()`.
2. If noise was measured (the unsharded step once more, with weights and batch moved by one rounding), a value may be
   off by `NOISE` times that: `above_noise`. A root mean square is compared besides the largest element.
3. If nothing was measured, `rounding_of_sums` follows Higham and Mary for elements that are long sums, and `ELEMENT`
   and `NORM` have what right jobs were seen to differ by.

A threshold that stands here is a number that a verdict depends on. How much memory or how many lines something may take
stands where it is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}
"""The distance from 1 to the next number of each dtype: `torch.finfo(dtype).eps`."""

QUOTIENT = {
    "float64": 0.0,
    "float32": 2 * EPSILON["float32"],
    "float16": EPSILON["float16"],
    "bfloat16": EPSILON["bfloat16"],
}
"""By which part of itself a value over its scale may be off: either may have been rounded, and the quotient too."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes in which weights are computed with."""

ASSERT_CLOSE = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
}
"""The relative and absolute tolerances of `torch.testing.assert_close`; other dtypes must be equal."""

EXACT = 1e-9
"""Float64 results that differ only in the order of their sums, relative to the largest element."""

SINGLE = 1e-6
"""Numbers that were stored in float32 once, or worked out in a few float32 operations: 8 of its roundings."""

STEP = 1e-5
"""Float32 results of a whole step, relative to the largest, and numbers that ranks log. For a single operation torch's
`assert_close` has 1.3e-6."""

SMALLEST_FACTOR = 2.0**-126
"""The smallest normal number of float32. No code multiplies by less; memory that nothing wrote to has such numbers."""

LEAST_SINGULAR = 0.5
"""The smallest singular value of a matrix that an iteration made orthogonal, relative to the largest: Muon's five steps
leave 0.7 to 1.2."""

UPDATE_OF_JOB = 2e-2
"""How far the updates of two jobs may be apart, relative to the largest element of one: Muon rounds what it makes
orthogonal to bfloat16. An update of a part by itself is off by tenths; other settings are compared as numbers."""

OPPOSITE = 2.0
"""No rounding moves an element farther than the largest one in the opposite direction."""

EXPLAINED_UPDATE = 1e-4
"""How far an update may be from what explains it, relative to the largest of both."""

ELEMENT = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 1e-4}
"""How far one element of a right step may be off, relative to the largest, if nothing was measured; else `EXACT`. About
four roundings of a narrow dtype; in float32, what sums of some thousand terms lose."""

ELEMENT_OF_STEP = {**ELEMENT, "float8_e5m2": 0.125}
"""The same by the coarsest dtype of a step whose values are wider. Training in eight bits rounds gradients to e5m2, and
what each rank multiplies to e4m3 by a scale of its own rows: one rounding of that."""

TENSOR_FLOAT = "float16"
"""What float32 on a GPU is taken for, which may multiply in TF32: that has float16's ten digits."""

NORM = {"float64": EXACT, "float32": STEP, "float16": 4e-3, "bfloat16": 3e-2}
"""How far the norm of the difference may be off, relative to the norm, if nothing was measured."""

COARSEST_NORM = 0.1
"""The same for dtypes that are not in `NORM`, as float8."""

SAFETY = 16.0
"""How many times a bound that holds with high probability is allowed; how many roundings make a difference certain."""

NOISE = 4.0
"""How many times the measured effect of one rounding of all inputs is allowed. Of 2,530 points of right steps in
bfloat16 the farthest was 1.5 times as far off."""

CANCELED = 1e-2
"""Sums that are smaller than this, relative to their terms, may be rounding alone: it is measured in float64, too."""

SKETCH_NOISE = 6.0
"""`NOISE` for sketches, which know a distance to a third."""

NARROW_TERMS = 0.125
"""Which part of a rounding of the largest gradient any gradient may be off, as its terms may cancel. Of gradients of
right steps in bfloat16 that cancel to nothing, as that of a key's bias, the farthest was off by a hundredth of one."""

WIDE_TERMS = 16
"""The same for gradients in float32 and wider, whose terms are added in the dtype that they have: each of hundreds of
terms adds a rounding. Of a bias before a LayerNorm it was off by one to ten."""

KINKS = 1 / 16
"""Of a gradient in narrow numbers of which nothing was measured, this part of the elements may be farther off: where a
function has a kink, as ReLU at 0, rounding its input turns the gradient of an element on or off."""

MOST_OF_SLICE = 0.75
"""How much of the norm of a slice of such a gradient kinks may change: what is lost changes all of it."""

MOST_NOISE = 0.25
"""More noise than this, relative to the largest element, hides everything: what is farther off is wrong."""

MOST_SKETCH_NOISE = 0.3
"""The same for sketches."""

TYPICAL = 4.0
"""How many times the root mean square of the noise the difference's may be; the noise is that of the whole tensor."""

TYPICAL_POINT = 2.0
"""The same if the noise of each element is known. Of 2,530 points of right steps in bfloat16 the most was 0.95."""

DRIFT = 2.0
"""How many times the largest difference of all right points before a point may be off that follows them."""

MANY = 16
"""Of so many elements the root mean square tells more than the largest element, and a factor can be read off them."""

HUGE = 1e30
"""No result of a step is larger than this, unless it overflows or comes from memory that nothing was written to."""

FEW = 4
"""Fewer numbers than this are some multiple of others by chance: one independent number more than three parameters."""

LEAST_FACTOR = 0.002
"""Gradients whose factor is nearer to 1 than this have errors that happen to be proportional."""

LEAST_EXACT_FACTOR = 1e-4
"""The same if all values have it as precisely as float32 has numbers, so that errors of theirs are much smaller."""

LEAST_FACTOR_OF_MODULE = 0.01
"""The same for what a module returns, which drifts more than gradients do."""

LEAST_STATISTIC = 1e-3
"""The same for statistics of a rank's part, of which there are many: slices that have one factor each."""

LEAST_PART = 0.02
"""A part of a change must be so far from none and all of it to be one."""

EXPLAINED = 0.25
"""Numbers of each rank explain differences if they leave no more than this part of their squares."""

LEFT = 0.25
"""The same, relative to the largest difference, for one term or another part that values are near to."""

EXPLAINED_BY_LINE = 0.1
"""The same for a factor and an offset, relative to the largest difference; and for a factor of rounded values."""

SURE = 6.0
"""How many standard errors a factor must be from 1."""

TELLING = 1e4
"""How many times its tolerance a value must be for small parts of it to show."""

FITTED = 100
"""How many times their tolerance terms of a sum must be for their weights to show in many elements at once."""

BEYOND = 100
"""How many times further off than the noise of what it is made of a number must be for the noise not to explain it."""

POINT_EPSILON = 1e-2
"""The coarsest rounding of a module's output with which its causes are sought, bfloat16's rounded up: any explains what
is as coarse as float8."""

WHOLE_FACTOR = 1e-2
"""How near a factor must be to a whole number to be that number."""

ROUNDINGS_OF_ONE = 4
"""How many roundings a single result takes: inputs, product, sum and result."""

ROUNDINGS_OF_STEP = 100
"""How many roundings a whole step may take: a loss that the same model computes in two ways, an update of weights."""

ROUNDINGS_OF_RULE = 8.0
"""How many roundings a value may miss a rule by that says how it was made: a multiplication and a sum round."""

ROUNDINGS_OF_SCALE = 8
"""How many roundings an element may take that is multiplied by a norm: of the norm, a quotient and a product."""

ROUNDINGS_OF_SUM = 64
"""How many float32 roundings a copy may be off that each rank summed by itself."""

ROUNDINGS_OF_ROLE = {"grad": 16.0, "activation": 4.0, "optim": 4.0}
"""How many roundings an element may be off between two layouts, which add the same terms in different orders, relative
to the largest element; for a gradient, to that of any gradient. Measured on small language models: 12 in float32 and 16
in bfloat16."""

LOSS_IN_FLOAT64 = 1e-12
"""How far the loss may be off if the same model computes it twice in float64."""

COARSE = 0.02
"""How near values must be to have something in common at all, before it is looked at precisely."""

NEAR_STARTS = 0.5
"""How far weights of two jobs may differ, relative to the largest element, that were the same some steps ago: matrices
that were drawn with two seeds are further apart."""

DRIFT_OF_STEPS = {"float8_e4m3fn": 0.5, "float8_e5m2": 0.5}
"""How far rounding in steps may move two jobs' weights apart, as norms, relative to how far the steps move them; else
`MOST_NOISE`, or `UPDATE_OF_JOB` if nothing is narrow. In bfloat16 matrices of right jobs were apart by 0.11 of it, in
float8 by 0.4; those of jobs with other rows by 0.38 to 1.3 in bfloat16."""

ALIKE = 0.05
"""How far features of two parts may differ that are one, if its values were changed too."""

PROPORTIONAL = 0.99
"""The squared cosine of values that may be each other's times a number: an error of a tenth."""

LEAST_SLICE = 0.1
"""The smallest size that a slice counts as, relative to the typical one: rows near zero would alarm."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The relative error that rounding may cause; `Bound()` allows none, for ids and moved data.

    Attributes:
        limit: Above this error values differ.
        element: How far a single element may be off, absolute, if that is known; 0: the relative error decides.
    """

    limit: float = 0.0
    element: float = 0.0

    @classmethod
    def of_elements(cls, element: float, size: float) -> Bound:
        """Return the bound of values of which each element may be off by so much.

        Args:
            element: How far an element may be off, absolute.
            size: The root mean square of what is wanted.
        """
        limit = min(element / size, MOST_NOISE) if size else MOST_NOISE
        return cls(limit, element)


def rounding_of_sums(epsilon: float, terms: int) -> float:
    """Return how far rounding may move a sum of products, relative to the size of its terms.

    Rounding errors add like a random walk, so they grow with the root of the number of terms (Higham & Mary 2019,
    "A new approach to probabilistic rounding error analysis"). What is narrower than float32 is summed in float32, as
    torch does.

    Args:
        epsilon: The distance from 1 to the next number of the coarsest dtype.
    """
    return SAFETY * max(epsilon, min(epsilon, EPSILON["float32"]) * math.sqrt(terms))


def above_noise(noise: float, least: float, most: float = math.inf, times: float = NOISE) -> float:
    """Return how far a value may be off whose noise was measured.

    Args:
        noise: How far one rounding of all inputs takes it.
        least: What is allowed in any case: one rounding of the value itself.
        times: How many times the noise is allowed.
    """
    return min(most, max(times * noise, least))


def allowed_in_narrow(epsilon: float, largest: float, of_all: float, drift: float) -> float:
    """Return how far a gradient's element may be off in a step in narrow numbers of which nothing was measured.

    Of 2,000 gradients of right steps in bfloat16 the farthest was off by 2.2 roundings of the largest gradient, and by
    17 % of its own largest element if that is small beside it.

    Args:
        epsilon: The distance from 1 to the next number of the dtype.
        largest: The gradient's largest element.
        of_all: The largest element of any gradient.
        drift: How far what modules send back is off at most, relative to its largest element.
    """
    most = max(NOISE * epsilon, DRIFT * drift) * of_all
    return min(most, max(MOST_NOISE * largest, NARROW_TERMS * epsilon * of_all))


def noise_of_terms(epsilon: float) -> float:
    """Return which part of the largest gradient rounding leaves of one whose terms cancel.

    Example:
        >>> noise_of_terms(2**-8) > noise_of_terms(2**-23)
        True
    """
    return (NARROW_TERMS if epsilon > EPSILON["float32"] else WIDE_TERMS) * epsilon


def least_factor(epsilon: float) -> float:
    """Return how far from 1 a gradient's factor must be to be reported.

    bfloat16's rounding moves a factor of one third by half of a hundredth.
    """
    return max(LEAST_FACTOR, 1.5 * epsilon)


def near_ratio(epsilon: float) -> float:
    """Return how near a factor must be to a simple ratio to count as that ratio."""
    return max(SINGLE, epsilon)


LEAST_DECAY, MOST_DECAY = 3e-3, 0.5
"""How far from 1 a factor of matrices must be, and may be, that weight decay made in some steps."""

ALIKE_RATIOS = 0.3
"""How much such factors may vary among matrices, relative to how far they are from 1: training moves them too."""

LEAST_SHARE = 0.25
"""How much of the squared difference of each matrix such a factor explains."""

ALIKE_STEPS, UNLIKE_SIZES = 2.0, 4.0
"""By which ratio differences may vary among tensors that optimizer steps made, and sizes of these tensors must."""

LATER_OUTPUT = (1e-3, 0.1)
"""How far a sum over a row of a later step's output may be off, relative to its size: in float32, and if anything is
narrower."""
