"""Arguments that differ, and tensors that are such an argument."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from shardviz.check.step.lines.faults import is_argument
from shardviz.check.step.trace.arguments import differing_arguments
from shardviz.check.step.trace.joins import check_joined
from shardviz.dump.records.trace import ArgumentRecord
from shardviz.layout.mesh import Mesh

MESH = Mesh(("cp",), (2,))
DOCUMENTS = ArgumentRecord("attn", 0, "docs", (0, 1), 0.0, 2.0, 3, 8)


@pytest.mark.parametrize(
    ("whole", "held", "is_shifted"),
    [
        ([0, 1, 2, 3, 4, 5], [0, 1, 2], True),
        ([1, 1, 2, 3, 4, 5], [1, 2, 3], True),
        ([0, 1, 2, 3, 4, 5], [2, 3, 4], False),
        ([0, 0, 1, 0, 0, 0], [1, 1, 1], False),
    ],
)
def test_an_argument_is_shifted_by_what_the_ranks_before_have_counted(whole, held, is_shifted):
    argument = "attn", 0, "docs"
    kept = {rank: SimpleNamespace(values=np.array(row, float), dtype="int64") for rank, row in enumerate([whole, held])}
    first = SimpleNamespace(values=np.array(whole[:3], float), dtype="int64")
    differing = differing_arguments({argument: kept[0]}, {0: {argument: first}, 1: {argument: kept[1]}}, MESH)
    assert [(rank, record.is_shifted) for rank, (record,) in differing.items()] == [(1, is_shifted)]


@pytest.mark.parametrize(
    ("held", "is_same"),
    [
        ([[1, 0, 2, 2], [1, 2, 0, 0]], True),
        ([[1, 0, 2, 2], [1, 2, 2, 0]], False),
        ([[1, 2, 2, 2], [0, 2, 0, 0]], False),
        ([[1, 0], [2, 2], [1, 2], [0, 0]], False),
        ([[1], [0], [2], [2], [1], [2], [0], [0]], False),
    ],
)
def test_a_tensor_is_an_argument_if_it_differs_in_the_same_place_as_often(held, is_same):
    whole = np.array([[0, 0, 0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 1, 2, 2, 2]], float)
    states = SimpleNamespace(
        held=lambda _value: {1: np.array(held, float)}, reference_of=lambda _value: whole, mesh=MESH
    )
    assert is_argument(states, (), {1: DOCUMENTS}) is is_same


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((3,), "the 2 nearest ranks before along cp is joined right: coordinates 0-2 are right.*so coordinate 3 is"),
        ((2, 3), "the rank just before along cp is joined right: coordinates 0-1 are right.*so coordinates 2-3 are"),
    ],
)
def test_what_is_joined_from_near_ranks_is_told_as_far_as_it_is_known(wrong, words):
    values = np.arange(8.0).reshape(4, 2)
    reduced = {rank: values[rank : rank + 1] + (rank in wrong) for rank in range(4)}
    wanted = {rank: values[rank : rank + 1] for rank in range(4)}
    compared = SimpleNamespace(
        mesh=Mesh(("cp",), (4,)), wrong=wrong, reduced=reduced, wanted=values, wanted_of=wanted.get, tolerance=0.0
    )
    cause = check_joined(compared, "attn", "cp")
    assert cause is not None
    assert re.search(words, cause.likeliest[0])
