"""What functions of torch's compute on the way, of tensors of every shape, and what a router's gradient is off by."""

from __future__ import annotations

import numpy as np
import pytest

from shardviz.check.step.jobs.loss_weights import numbers_of
from shardviz.check.step.lines.composed import steps_of

LOGITS = np.random.default_rng(1).normal(size=(6, 5))


def test_a_cross_entropy_of_merged_rows_has_its_steps_by_row_and_before_rows_were_merged():
    steps = list(steps_of("cross_entropy", [LOGITS, np.arange(6.0) % 5], [(2, 3), (6,), (4, 2)]))
    total = np.exp(LOGITS - LOGITS.max(-1, keepdims=True)).sum(-1)
    assert any(step.shape == (6,) and np.allclose(step, total) for step in steps)
    assert any(step.shape == (2, 3) and np.allclose(step.ravel(), total) for step in steps)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        ("gather", [LOGITS]),
        ("gather", [LOGITS, np.zeros((6, 0))]),
        ("gather", [LOGITS, np.full((6, 1), np.nan)]),
        ("mse_loss", [LOGITS]),
        ("layer_norm", [np.zeros(())]),
        ("cross_entropy", [np.zeros((0, 4)), np.zeros(0)]),
        ("relu", [LOGITS]),
    ],
)
def test_what_a_function_is_not_given_has_no_steps(function, given):
    assert list(steps_of(function, given, [(2, 3)])) == []


def test_labels_that_are_no_numbers_or_as_long_as_logits_leave_the_steps_of_a_softmax():
    for labels in (np.full(6, np.nan), LOGITS):
        assert len(list(steps_of("cross_entropy", [LOGITS, labels], []))) >= len(
            list(steps_of("softmax", [LOGITS], []))
        )


def test_a_router_has_one_number_for_each_expert_if_its_gradient_is_finite():
    slopes = np.exp(-LOGITS) / (1 + np.exp(-LOGITS)) ** 2
    assert np.allclose(numbers_of(LOGITS, slopes * np.arange(5)), np.arange(5))
    assert numbers_of(LOGITS, np.full((6, 5), np.nan)) is None
    with np.errstate(all="raise", under="ignore"):
        assert numbers_of(1e4 * LOGITS, LOGITS) is None
