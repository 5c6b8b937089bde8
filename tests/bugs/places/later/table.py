"""All faults and right programs of this room."""

from __future__ import annotations

from tests.bugs.places.later import halo, llama, ring, shared_experts, small, stages
from tests.bugs.places.later.twins import TWINS

FAULTS = (*llama.FAULTS, *halo.FAULTS, *shared_experts.FAULTS, *stages.FAULTS, *ring.FAULTS, *small.FAULTS)
PROGRAMS = (*dict.fromkeys(fault.program for fault in FAULTS), *TWINS)

LOST_IN_BFLOAT16 = {
    "the last block left out": "found; the projection that reads it is named, not what it is made of",
    "a shared expert that every rank adds to the sum": "the loss is named: the output may be off by as much as it is",
    "gates that do not sum to 1": "a gradient is named: the output may be off by as much as it is",
}
"""Faults whose place or cause is not found in bfloat16, and why."""
