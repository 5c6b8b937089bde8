"""All cases, by family."""

from __future__ import annotations

from tests.bugs import (
    accumulation,
    adapters,
    arguments,
    attention_parts,
    backward,
    blamed_beside,
    branches,
    buffers,
    canceling,
    composed,
    context_parallel,
    cut_and_scaled,
    cut_by_hand,
    decided,
    denominators,
    experts,
    first_rows,
    flat_buffers,
    gradients,
    hooks,
    joins,
    kept_aside,
    kept_tensors,
    loads,
    logs,
    loss_terms,
    losses,
    lost_on_the_way,
    norms,
    one_change,
    optimizer,
    order,
    outputs,
    own_functions,
    own_indices,
    own_numbers,
    own_part,
    own_reductions,
    own_rows,
    parallel_by_hand,
    permutations,
    pipeline,
    proven,
    random_numbers,
    read_elsewhere,
    residual,
    right_sums,
    ring_attention,
    scaled_steps,
    scans,
    sent_back,
    sequence_parallel,
    sharded_losses,
    shared_parts,
    strange_parts,
    taken_apart,
    training_loops,
    unequal_parts,
    untrue_causes,
    vocabulary,
    ways_back,
    written_anew,
)
from tests.bugs.case import Bug, Healthy

WEIGHTS = (order, permutations, loads, buffers, random_numbers)
STEPS = (gradients, accumulation, backward, losses, logs, norms, outputs, optimizer, own_part)
AXES = (pipeline, context_parallel, experts, first_rows, hooks, cut_by_hand)

LAYERS = (residual, sequence_parallel, shared_parts, adapters, branches, vocabulary, attention_parts)
LOOPS = (loss_terms, sharded_losses, scaled_steps, training_loops, right_sums, own_numbers, canceling)
OTHERS = (*LOOPS, denominators, lost_on_the_way, untrue_causes, parallel_by_hand, decided, taken_apart)
PROBES = (flat_buffers, kept_tensors, arguments, joins, written_anew, own_indices, own_functions, composed)
BY_HAND = (cut_and_scaled, kept_aside, read_elsewhere, sent_back, own_reductions, own_rows)
NEWEST = (strange_parts, one_change, unequal_parts, ring_attention, scans, ways_back, proven, blamed_beside, *PROBES)


_ALL = (*WEIGHTS, *STEPS, *AXES, *LAYERS, *OTHERS, *NEWEST, *BY_HAND)
FAMILIES = {module.__name__.rpartition(".")[2]: module.CASES for module in _ALL}

BUGS = [case for cases in FAMILIES.values() for case in cases if isinstance(case, Bug)]
HEALTHY = [case for cases in FAMILIES.values() for case in cases if isinstance(case, Healthy)]
