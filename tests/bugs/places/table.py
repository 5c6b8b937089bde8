"""All faults and all right programs."""

from __future__ import annotations

from tests.bugs.places import by_hand, convolution, experts, sequence, stages, transformer

FAULTS = (
    *transformer.FAULTS,
    *transformer.POSITIONS,
    *by_hand.FAULTS,
    *experts.FAULTS,
    *convolution.FAULTS,
    *stages.FAULTS,
    *sequence.FAULTS,
)
PROGRAMS = tuple(dict.fromkeys(fault.program for fault in FAULTS))

LOST_IN_BFLOAT16 = {
    "tokens put back in another order": "found and placed; rounding allows more than rows differ by",
    "weights of the router in another order than tokens": "the output may be off by more, as rounding moves tokens",
    "tokens beyond a rank's capacity dropped": "the same",
    "batch statistics of each rank's own images": "the layer is named: the norm is off by less than its rounding",
    "batch statistics over one axis of two": "not found: less than rounding",
    "a variance around each rank's own mean": "not found: less than rounding",
    "batch statistics that nothing flows back through": "the norm before it is named",
    "gradients of a layer divided once more": "gloo has no such sum of bfloat16: the step raises",
}
"""Faults whose place or cause is not found in bfloat16, and why."""
