"""All faults and right programs of this room."""

from __future__ import annotations

from tests.bugs.places.unseen import dense, others, state_space
from tests.bugs.places.unseen.twins import TWINS

FAULTS = (*dense.FAULTS, *others.FAULTS, *state_space.FAULTS)
PROGRAMS = (*dict.fromkeys(fault.program for fault in FAULTS), *TWINS)

LOST_IN_BFLOAT16 = {
    "tokens put back one place too far": "found and placed; rows are too alike to say which stands where",
}
"""Faults whose place or cause is not found in bfloat16, and why."""
