"""Padding that a map says is there: not compared, and said so; what is wrong beside it is found as without it."""

import pytest
import torch

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.open import open_checkpoint
from tests.checkpoint.maps import both, compared, weight


@pytest.mark.parametrize("turned", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize(("dim", "call"), [(0, "pad(NAME, 12)"), (1, "pad(NAME, 10, 1)")])
def test_the_map_that_a_fix_names_makes_padding_at_the_end_expected(tmp_path, dim, call, turned):
    short = weight(9, 7)
    long = torch.cat([short, torch.zeros(3, 7) if dim == 0 else torch.zeros(9, 3)], dim)
    sides = ({"head": short, "w": weight(4, 4)}, {"head": long, "w": weight(4, 4)})
    paths = both(tmp_path, *sides[:: -1 if turned else 1])
    (padded,) = [one for one in compare_checkpoints(*map(open_checkpoint, paths)).outcomes if one.verdict != "equal"]
    if not turned:
        assert padded.fix.endswith(f"; if it is meant, say so in a map: NAME = {call}")
    assert compared(*paths, f"head = {call.replace('NAME', 'head')}") == {}
