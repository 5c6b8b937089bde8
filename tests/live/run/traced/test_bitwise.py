"""A job whose step is followed computes what it computes without: every bit of it."""

import torch

from tests.lanes import nightly
from tests.live.run.jobs import ON_FOUR, run, run_plain
from tests.live.run.test_harmless import FIFTY, flat


@nightly
def test_fifty_steps_with_a_trace_are_bitwise_the_plain_jobs(tmp_path):
    plain = run_plain(tmp_path, FIFTY, ON_FOUR, ["plain"])
    ran = run(tmp_path, FIFTY, "--trace", "--trace-step", "3", command=ON_FOUR, words=["watched"])
    assert (plain.code, ran.code) == (0, 0), plain.err + ran.err
    assert "traced a step" in ran.err
    for rank in range(4):
        one, other = (
            list(flat(torch.load(tmp_path / f"{who}-{rank}.pt", weights_only=True))) for who in ("plain", "watched")
        )
        assert len(one) == len(other) > 20
        assert [name for (name, a), (_, b) in zip(one, other, strict=True) if not torch.equal(a, b)] == []
