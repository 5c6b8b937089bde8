"""Adam, AdamW and SGD with momentum, fused and foreach, on shards: right, and with one wrong thing done to the step."""

from functools import cache

import pytest

from tests.bugs.pairs.running import reports_on
from tests.bugs.running import lines_of, prose
from tests.lanes import nightly
from tests.live.probing import HEAD

KINDS = {
    "Adam": "torch.optim.Adam(params, lr=0.05, {how})",
    "AdamW": "torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, {how})",
    "SGD": "torch.optim.SGD(params, lr=0.05, momentum=0.9, {how})",
}
HOW = ("foreach=True", "fused=True", "foreach=False")
TEXT = """
from torch import distributed
from torch.distributed.tensor import DTensor


def is_sharded(params):
    return any(isinstance(one, DTensor) for one in params)


def moments(made):
    for state in made.state.values():
        for name in ("exp_avg", "momentum_buffer"):
            if isinstance(state.get(name), DTensor):
                yield state[name].to_local()


def given(named):
    return list(named.values())


def spoiled(made):
    return made


def optimizer(model, mesh):
    params = given(dict(model.named_parameters()))
    return spoiled({kind})
"""
STEPPED = """

def spoiled(made):
    step = made.step

    def stepped():
        step()
        for local in moments(made):
            {how}

    made.step = stepped
    return made
"""
WRONG = {
    "": "",
    "moments of the neighbor's shard": STEPPED.format(
        how="parts = [torch.empty_like(local) for _ in range(2)]\n"
        "            distributed.all_gather(parts, local.contiguous())\n"
        "            local.copy_(parts[1 - distributed.get_rank()])"
    ),
    "moments in another order": STEPPED.format(how="local.copy_(local.flip(0).clone())"),
    "a parameter left out": """

def given(named):
    return [one for name, one in named.items() if name != "2.bias" or not is_sharded(named.values())]
""",
}
SAID = {
    "moments of the neighbor's shard": "another coordinate|other coordinate|another rank|of rank",
    "moments in another order": "order",
    "a parameter left out": "2.bias",
}
ALL = [(kind, how, wrong) for kind in KINDS for how in HOW for wrong in WRONG]
NOT_OF_TORCH = ("SGD", "fused=True")
"""Torch has no sharding strategy for the step of fused SGD: it raises where the unsharded model's does not."""
DAILY = ("AdamW", "fused=True")


def source_of(kind, how, wrong):
    return HEAD + TEXT.replace("{kind}", KINDS[kind].format(how=how)) + WRONG[wrong]


@cache
def reports(*cases):
    found = reports_on([(source_of(*case), "dp=2") for case in cases])
    return {cases[number]: report for number, report in found}


def judge(case, report):
    assert not isinstance(report, str), report
    said = "\n".join(line for line in lines_of(report) if line)
    if case[:2] == NOT_OF_TORCH:
        assert {finding.kind for finding in report.findings} == {"raised"}, said
        return
    if not case[2]:
        assert (report.findings, report.not_checked) == ((), ()), said
        return
    assert report.findings, case
    assert any(word in prose(one) for one in report.findings for word in SAID[case[2]].split("|")), said


@pytest.mark.parametrize("wrong", WRONG, ids=[name or "right" for name in WRONG])
def test_an_update_is_quiet_where_it_is_right_and_named_where_it_is_not(wrong):
    cases = tuple((*DAILY, one) for one in WRONG)
    judge((*DAILY, wrong), reports(*cases)[(*DAILY, wrong)])


@nightly
@pytest.mark.parametrize("case", [case for case in ALL if case[:2] != DAILY], ids=lambda case: ", ".join(case))
def test_so_is_one_of_any_kind(case):
    judge(case, reports(*ALL)[case])
