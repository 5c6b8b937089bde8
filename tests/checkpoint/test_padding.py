"""Padding that a map says is there: not compared, and said so; what is wrong beside it is found as without it."""

import pytest
import torch

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.maps.language import parse_rules
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from tests.checkpoint.maps import both, compared, save, weight

ROWS, ALL = 30, 32
MAP = f"head = pad(head, {ALL})\nembed = pad(embed, {ALL})"
NOTE = "rows 30 to 31 are not compared"


def padded(tensor, rest=None):
    return torch.cat([tensor, weight(ALL - ROWS, *tensor.shape[1:], seed=9) if rest is None else rest])


def weights():
    return {"head": weight(ROWS, 8, seed=1), "embed": weight(ROWS, 8, seed=2)}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rest", [None, torch.zeros(2, 8)])
def test_a_padded_vocabulary_is_equal_whatever_its_padding_is(tmp_path, capsys, turned, rest):
    small = weights()
    one, other = both(tmp_path, {name: padded(one, rest) for name, one in small.items()}, small)
    one, other = (other, one) if turned else (one, other)
    assert compared(one, other, MAP) == {}
    (tmp_path / "pad.map").write_text(MAP)
    assert main(["diff", str(one), str(other), "--map", str(tmp_path / "pad.map")]) == 0
    out = capsys.readouterr().out
    assert f"head: padded: {NOTE}" in out
    assert f"embed: padded: {NOTE}" in out


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


def test_columns_and_parts_may_be_padded(tmp_path):
    gate, up = weight(6, 4, seed=1), weight(6, 4, seed=2)
    whole = torch.cat([torch.cat([gate, weight(2, 4)]), torch.cat([up, weight(2, 4)])])
    made = {"gate_up": whole, "down": torch.cat([gate.T, weight(4, 3)], 1)}
    one, other = both(tmp_path, made, {"gate": gate, "up": up})
    rules = "gate_up = cat(pad(gate, 8), pad(up, 8))\ndown = pad(transpose(gate), 9, 1)"
    assert compared(one, other, rules) == {}
    wrong = save(tmp_path / "wrong", {**made, "gate_up": torch.cat([whole[8:], whole[:8]])})
    assert compared(wrong, other, rules)["gate_up"][0] != "equal"


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


def test_exchanged_halves_are_named_without_the_padding(tmp_path):
    def change(big, small):
        big["head"] = padded(small["head"].roll(15, 0))

    assert changed(tmp_path, change)["head"][:2] == ("permuted", "dim 0's halves are exchanged")


def test_exchanged_tensors_are_named(tmp_path):
    def change(big, small):
        big["head"], big["embed"] = big["embed"], big["head"]

    assert {name: one[0] for name, one in changed(tmp_path, change).items()} == {"head": "moved", "embed": "moved"}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rules", [MAP, ""])
def test_padding_behind_each_ranks_rows_is_named(tmp_path, ranks, rules):
    small = weights()
    room = -(-ROWS // ranks) + 1
    parts = [torch.cat([part, weight(room - len(part), 8, seed=3)]) for part in small["head"].chunk(ranks)]
    big = {"head": torch.cat(parts), "embed": padded(small["embed"])}
    text = rules.replace(f"head, {ALL}", f"head, {len(big['head'])}") or ()
    verdict, why, cause = compared(*both(tmp_path, big, small), text)["head"]
    assert (verdict, why) == ("padded", f"the first has 1 more index of dim 0 behind every {room - 1}")
    assert cause.startswith(f"Each of {ranks} ranks padded its own part")


def test_rows_that_were_compared_are_not_noted_as_left_out(tmp_path):
    small = weights()
    big = {"head": torch.cat([padded(half)[:16] for half in small["head"].chunk(2)]), "embed": padded(small["embed"])}
    one, other = both(tmp_path, big, small)
    found = compare_checkpoints(open_checkpoint(one), open_checkpoint(other), parse_rules(MAP, "a map"))
    assert {outcome.name: outcome.verdict for outcome in found.outcomes} == {"head": "padded", "embed": "equal"}
    assert found.notes == (f"embed: padded: {NOTE}",)


def test_a_pad_that_was_left_out_is_named_and_one_that_is_too_short_refused(tmp_path, capsys):
    one, other = both(tmp_path, weights(), weights())
    found = compared(one, other, f"head = pad(head, {ALL})")
    assert found["head"][2] == "The conversion left out pad"
    (tmp_path / "pad.map").write_text("head = pad(head, 20)")
    assert main(["diff", str(one), str(other), "--map", str(tmp_path / "pad.map")]) == 2
    assert "line 1: pad(head, 20): dim 0 of [30, 8] is longer than 20" in capsys.readouterr().err
