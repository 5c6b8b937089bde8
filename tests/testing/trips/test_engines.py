"""What loaders of serving engines get wrong is named by the tensor and by what was done; right ones are quiet."""

import pytest

from shardviz.errors import NotationError
from shardviz.testing import ShardAssertionError, assert_transferred, spmd
from tests.lanes import at_night
from tests.testing.trips.engines import FAULTS, LAYOUTS, MAP, pair, send

OFTEN = ["q, k, v cut in one piece", "one more", "gate and up not in turns"]
RARE = [one for one in FAULTS if one not in OFTEN]


def text_of(mesh, fault):
    source, target = pair(mesh)
    try:
        done = assert_transferred(
            source, target, lambda: send(source, target, mesh, fault), map=MAP, layouts=LAYOUTS, mesh=mesh, strict=True
        )
    except ShardAssertionError as error:
        return str(error)
    assert done.compared == 33
    return ""


@spmd(mesh={"dp": 2, "tp": 2}, timeout=300)
@pytest.mark.parametrize("faults", [OFTEN, *at_night([RARE])])
def test_what_a_loader_did_is_named(mesh, faults):
    assert text_of(mesh, "") == ""
    for fault in faults:
        _, tensor, words = FAULTS[fault]
        text = text_of(mesh, fault)
        assert text.startswith(f"layers.1.{tensor}"), (fault, text)
        assert words in text, (fault, text)


@spmd(mesh={"dp": 1, "tp": 2})
def test_a_layout_that_does_not_fit_is_named_with_its_tensor(mesh):
    source, target = pair(mesh)
    wrong = {**LAYOUTS, "*.qkv.bias": "[*/tp, *]"}
    with pytest.raises(NotationError, match=r"layers\.0\.qkv\.bias: layout \[\*/tp, \*\] does not fit"):
        assert_transferred(source, target, map=MAP, layouts=wrong, mesh=mesh)
