"""Padding that a map says is there: not compared, and said so; what is wrong beside it is found as without it."""

import pytest
import torch

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.maps.language import parse_rules
from shardviz.checkpoint.open import open_checkpoint
from tests.checkpoint.maps import both, compared, weight

ROWS, ALL = 30, 32
MAP = f"head = pad(head, {ALL})\nembed = pad(embed, {ALL})"
NOTE = "rows 30 to 31 are not compared"


def padded(tensor, rest=None):
    return torch.cat([tensor, weight(ALL - ROWS, *tensor.shape[1:], seed=9) if rest is None else rest])


def weights():
    return {"head": weight(ROWS, 8, seed=1), "embed": weight(ROWS, 8, seed=2)}


def test_what_a_slice_leaves_out_is_noted(tmp_path):
    small = weights()
    one, other = both(tmp_path, {name: padded(one) for name, one in small.items()}, small)
    rules = parse_rules(f"head = slice(head, 0, {ROWS})\nembed = slice(embed, 0, {ROWS})", "my.map")
    found = compare_checkpoints(open_checkpoint(one), open_checkpoint(other), rules)
    assert not found.differs
    told = [f"{name}: rows 30 to 31 are in nothing that the map makes, and not compared" for name in ("embed", "head")]
    assert sorted(found.notes) == told
    one, other = both(tmp_path / "whole", {"qk": padded(small["head"])}, {"q": weight(1), "k": weight(1)})
    rules = parse_rules("q = slice(qk, 0, 20)\nk = slice(qk, 20, 32)", "my.map")
    assert compare_checkpoints(open_checkpoint(one), open_checkpoint(other), rules).notes == ()


def changed(tmp_path, change):
    small = weights()
    big = {name: padded(one) for name, one in small.items()}
    change(big, small)
    return compared(*both(tmp_path, big, small), MAP)


def test_a_rows_value_is_found_beside_the_padding(tmp_path):
    def change(big, small):
        big["head"][29] += 1

    words = "8 of 240 elements differ, the first at [29, 0]: all of [29:30, 0:8]"
    assert changed(tmp_path, change) == {"head": ("other", words, "")}


def test_rows_that_were_compared_are_not_noted_as_left_out(tmp_path):
    small = weights()
    big = {"head": torch.cat([padded(half)[:16] for half in small["head"].chunk(2)]), "embed": padded(small["embed"])}
    one, other = both(tmp_path, big, small)
    found = compare_checkpoints(open_checkpoint(one), open_checkpoint(other), parse_rules(MAP, "a map"))
    assert {outcome.name: outcome.verdict for outcome in found.outcomes} == {"head": "padded", "embed": "equal"}
    assert found.notes == (f"embed: padded: {NOTE}",)


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
