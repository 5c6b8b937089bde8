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
