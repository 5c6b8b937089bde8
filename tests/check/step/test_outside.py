"""An output whose gradient comes from outside of modules: what the lines around it leave as its cause."""

from types import SimpleNamespace

import pytest

from shardviz.check.step.lines.naming import without_exchange
from shardviz.explain.step.gradients import WrongOutside


@pytest.mark.parametrize(
    ("module", "collectives", "may_exchange"),
    [("moe", (False, False), False), ("moe", (False, True), True), ("", (False,), True), ("moe", (), True)],
)
def test_code_without_a_collective_is_no_cause_of_a_gradient_that_comes_from_outside(module, collectives, may_exchange):
    """The lines of a different module, or none, say nothing."""
    finding = WrongOutside("output[1] of moe", "moe", is_sent=False).finding(
        "w", (0,), "it is wrong", kind="wrong-value"
    )
    calls = [SimpleNamespace(is_collective=is_collective) for is_collective in collectives]
    lines = SimpleNamespace(module=module, sharded={0: SimpleNamespace(lines=calls)})
    cause = without_exchange(finding, [lines]).explanation
    assert cause.may_exchange == may_exchange
    assert ("collective" in cause.advice) == may_exchange
