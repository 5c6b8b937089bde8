"""Gradients of logits whose classes ranks split: what a loss takes of each rank's own classes alone."""

from types import SimpleNamespace

import numpy as np
import pytest

from shardviz.check.step.trace.classes import cause_of_gradient
from shardviz.explain.step.parts import LabelOutsidePart, SoftmaxOfPart, TermOfPartOfClasses
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.placements import Replicate, Shard
from shardviz.relate.values import part_of

ROWS, CLASSES = np.arange(8), (Shard(1),)
RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.standard_normal((8, 12)), RNG.integers(0, 12, 8)
PARTS = slice(0, 6), slice(6, 12)
POWERS = np.exp(LOGITS)


def gradient_of(softmax):
    is_label = np.zeros(softmax.shape)
    is_label[ROWS, LABELS] = 1
    return (softmax - is_label) / len(ROWS)


def with_own_sum():
    parts = [POWERS[:, part] for part in PARTS]
    return gradient_of(np.concatenate([part / part.sum(-1, keepdims=True) for part in parts], axis=1))


def with_own_maximum():
    parts = [POWERS[:, part] / POWERS[:, part].max(-1, keepdims=True) for part in PARTS]
    return gradient_of(np.concatenate(parts, axis=1) / sum(part.sum(-1, keepdims=True) for part in parts))


def with_labels_of_others():
    held = RIGHT.copy()
    for part in PARTS:
        held[(part.start > LABELS) | (part.stop <= LABELS), part.start] -= 1 / len(ROWS)
    return held


RIGHT = gradient_of(POWERS / POWERS.sum(-1, keepdims=True))
CAUSES = (
    (with_own_sum(), SoftmaxOfPart("tp", "sum")),
    (with_own_maximum(), SoftmaxOfPart("tp", "max")),
    (with_labels_of_others(), LabelOutsidePart("tp")),
    (RIGHT + 0.01, TermOfPartOfClasses("tp")),
)


def cause_of(held, mesh="tp=2", placements=CLASSES, ranks=None):
    layout = Layout.from_placements(parse_mesh(mesh), held.shape, placements)
    regions = dict(layout.regions())
    values = {rank: part_of(held, region) for rank, region in regions.items() if ranks is None or rank in ranks}

    def part(whole, rank):
        return part_of(whole, regions[rank])

    return cause_of_gradient(
        SimpleNamespace(
            claimed=layout,
            values=values,
            wanted=RIGHT,
            tolerance=1e-6,
            part=part,
            wanted_of=lambda rank: part(RIGHT, rank),
        )
    )


@pytest.mark.parametrize(("held", "cause"), CAUSES)
def test_a_loss_that_takes_a_ranks_own_classes_for_all_is_named(held, cause):
    assert cause_of(held) == cause
    assert cause_of(held, "dp=2,tp=2", (Shard(0), Shard(1))) == cause


@pytest.mark.parametrize(("held", "cause"), CAUSES)
def test_only_the_ranks_of_the_last_pipeline_stage_have_logits(held, cause):
    assert cause_of(held, "pp=2,tp=2", (Replicate(), Shard(1)), ranks=(2, 3)) == cause


@pytest.mark.parametrize("held", [held for held, _ in CAUSES[:3]])
def test_nothing_is_named_if_a_rank_is_missing_or_numbers_are_not_finite(held):
    assert cause_of(held, ranks=(0,)) is None
    for number in (np.nan, np.inf):
        odd = held.copy()
        odd[2, 3] = number
        assert cause_of(odd) is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("factors", [(1, 1), (2, 2), (1.3, 0.7), (1, 0), (-1, -1)])
def test_a_gradient_that_is_only_scaled_is_no_softmax_of_own_classes(factors):
    parts = [RIGHT[:, part] * times for part, times in zip(PARTS, factors, strict=True)]
    assert cause_of(np.concatenate(parts, axis=1)) is None
