"""What became of all ranks' parts of a tensor, judged together."""

import pytest

from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.explain.checkpoints.conversion import ForgottenFactor
from shardviz.testing.trips.judging import PartOutcome, TransferOutcome


@pytest.mark.parametrize(
    ("factors", "dtype", "is_single"),
    [
        ((0.12344999, 0.12345001), "float32", True),  # their texts differ: 0.1234 and 0.1235
        ((0.12340, 0.12344), "float32", False),  # their texts are equal
        ((3.0, 3.012), "bfloat16", True),
        ((3.0, 3.012), "float32", False),
        ((3.0, None), "float32", False),
    ],
)
def test_ranks_whose_factors_differ_by_rounding_alone_have_one_change(factors, dtype, is_single):
    outcomes = [
        factor and Outcome("w", "", "other", f"{factor:.4g} times", explanation=ForgottenFactor("", factor))
        for factor in factors
    ]
    parts = [PartOutcome(rank, "other", change=change, dtype=dtype) for rank, change in enumerate(outcomes)]
    received = TransferOutcome({"w": [*parts, PartOutcome(2, "right")]}, {"w": "param"}, (), "sync", "the source")
    assert received.change("w") == (outcomes[0] if is_single else None)
