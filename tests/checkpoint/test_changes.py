"""What became of values and parts between two checkpoints, and what only looks like it."""

from __future__ import annotations

import pytest
import torch

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.maps.language import parse_rules
from shardviz.checkpoint.open import open_checkpoint
from tests.checkpoint.test_diff import files, weight

FUSED = "qkv = cat(q, k, v)"


def became(tmp_path, before, after, rules=""):
    """Return the outcomes that are not equal, by name."""
    one, other = map(open_checkpoint, files(tmp_path, before, after))
    found = compare_checkpoints(one, other, parse_rules(rules, "my.map") if rules else ())
    return {outcome.name: outcome for outcome in found.outcomes if outcome.verdict != "equal"}


def only(tmp_path, before, after, rules=""):
    (found,) = became(tmp_path, before, after, rules).values()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("factor", [0.125, -1.0, 8**-0.5, 3.0])
def test_a_factor_is_named_with_the_one_that_undoes_it(tmp_path, dtype, factor):
    w = weight(24, 16).to(dtype)
    found = only(tmp_path, {"w": w}, {"w": w * factor})
    assert found.verdict == "other"
    assert found.why.startswith("every value of the second is ")
    named = float(found.why.split()[6])
    assert named == pytest.approx(factor, rel=0.01)
    undone = float(found.fix.split()[2])
    assert undone * factor == pytest.approx(1, rel=0.02)


def test_the_one_that_is_added_to_a_norm_is_named(tmp_path):
    w = 1 + weight(64) / 10
    found = only(tmp_path, {"w": w}, {"w": w - 1})
    assert found.why == "every value of the second is 1 less than in the first"
    assert found.fix == "add 1 in the conversion"


NO_FACTOR = {
    "noise": lambda w: w + weight(24, 16, seed=1) / 100,
    "a step of training in bfloat16": lambda w: (1 + w / 1000).bfloat16(),
    "one value that is not": lambda w: torch.cat([2 * w[:23], 3 * w[23:]]),
    "other values": lambda w: weight(24, 16, seed=2),
    "zeros": lambda w: w * 0,
    "infinite ones": lambda w: w * float("inf"),
}


@pytest.mark.parametrize("change", NO_FACTOR)
def test_other_changes_are_no_factor(tmp_path, change):
    w = weight(24, 16)
    before = (1 + w / 1000 + 0.03).bfloat16() if "training" in change else w
    found = only(tmp_path, {"w": before}, {"w": NO_FACTOR[change](w)})
    assert "every value" not in found.why
    assert found.cause == ""


def test_heads_that_were_repeated_are_not_padding_and_padding_is(tmp_path):
    k = weight(16, 8)
    one_by_one = only(tmp_path, {"k": k}, {"k": k.view(2, 8, 8).repeat_interleave(4, 0).reshape(64, 8)})
    assert "every 8 indices of dim 0 4 times" in one_by_one.why
    tiled = only(tmp_path, {"k": k}, {"k": k.repeat(4, 1)})
    assert "every 16 indices of dim 0 4 times" in tiled.why
    assert tiled.fix.startswith("take one of each 4")
    assert only(tmp_path, {"k": k}, {"k": torch.cat([k, torch.zeros(48, 8)])}).verdict == "padded"
    longer = only(tmp_path, {"k": k}, {"k": torch.cat([k, weight(48, 8, seed=1)])})
    assert longer.cause.endswith("or extended with new rows")


def test_a_cast_that_made_values_infinite_says_so(tmp_path):
    w = weight(8, 8)
    w[2, 3], w[5, 5] = 1e5, -7e4
    found = only(tmp_path, {"w": w}, {"w": w.half()})
    assert found.verdict == "cast"
    assert "2 of 64 values are too large for float16 and became infinite" in found.why
    assert "infinite" not in only(tmp_path, {"w": w}, {"w": w.bfloat16()}).why
    w[2, 3], w[5, 5] = float("inf"), 6e4
    assert "infinite" not in only(tmp_path, {"w": w}, {"w": w.half()}).why


@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_of_one_dim_that_were_joined_along_another_are_named(tmp_path, pieces):
    w = weight(16, 16)
    found = only(tmp_path, {"w": w}, {"w": torch.cat(w.chunk(pieces, 1)).reshape(16, 16)})
    assert f"{pieces} pieces of dim 1 are joined along dim 0" in found.why
    rows = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    assert "pieces" not in only(tmp_path, {"w": w}, {"w": w.reshape(-1)[rows].view(16, 16)}).why


PARTS = {
    "rotary": (lambda k: k.view(2, 4, 2, 8).transpose(1, 2).reshape(16, 8), "dim 0 is in the order of", "permuted"),
    "rounded": (lambda k: k.bfloat16().float(), "it has float32 values that were rounded to bfloat16", "cast"),
    "scaled": (lambda k: k / 2, "every value of it is 0.5 times that of the map's", "other"),
    "other values": (lambda k: k + 1e-3 * weight(16, 8, seed=5), "128 of 128 elements differ", "other"),
}


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("change", PARTS)
def test_what_became_of_one_part_of_a_fused_tensor_is_named(tmp_path, change, part):
    done, words, verdict = PARTS[change]
    own = {name: weight(16, 8, seed=at) for at, name in enumerate("qkv")}
    fused = {"qkv": torch.cat([done(one) if name == part else one for name, one in own.items()])}
    found = only(tmp_path, own, fused, FUSED)
    assert found.verdict == verdict
    assert f"1 of its 3 parts differs: {part}: " in found.why
    assert words in found.why


@pytest.mark.parametrize("ranks", [2, 4])
def test_fused_shards_put_behind_each_other_are_named_with_the_number_of_ranks(tmp_path, ranks):
    own = {"q": weight(32, 8), "k": weight(8, 8, seed=1), "v": weight(8, 8, seed=2)}
    shards = [torch.cat([one.chunk(ranks)[rank] for one in own.values()]) for rank in range(ranks)]
    found = only(tmp_path, own, {"qkv": torch.cat(shards)}, FUSED)
    assert found.cause.startswith(f"The conversion concatenates the fused shards of {ranks} ranks")
    assert not became(tmp_path, own, {"qkv": torch.cat([*own.values()])}, FUSED)


def layers(order, names=("up", "down")):
    return {
        f"h.{at}.{name}": weight(8, 8, seed=10 * own + names.index(name))
        for at, own in enumerate(order)
        for name in names
    }


def test_layers_that_are_numbered_otherwise_are_one_finding(tmp_path):
    found = became(tmp_path, layers([0, 1, 2]), layers([1, 2, 0]))
    assert {one.why for one in found.values()} == {"h 0 1 2 of the second are h 1 2 0 of the first"}
    assert {one.fix for one in found.values()} == {"number h as the first checkpoint does"}


def test_a_single_tensor_of_another_layer_is_no_numbering(tmp_path):
    before = layers([0, 1, 2])
    after = before | {"h.2.up": before["h.1.up"], "h.1.up": before["h.2.up"]}
    found = became(tmp_path, before, after)
    assert set(found) == {"h.1.up", "h.2.up"}
    assert {one.cause for one in found.values()} == {""}


def experts(order):
    names = ((layer, at, own, name) for layer in range(2) for at, own in enumerate(order) for name in ("w1", "w2"))
    return {
        f"h.{layer}.experts.{at}.{name}": weight(8, 8, seed=100 * layer + 10 * own + (name == "w2"))
        for layer, at, own, name in names
    }


def test_experts_of_all_layers_that_are_numbered_otherwise_are_one_finding(tmp_path):
    found = became(tmp_path, experts([0, 1, 2, 3]), experts([0, 2, 1, 3]))
    assert len(found) == 8
    assert {one.why for one in found.values()} == {"experts 1 2 of the second are experts 2 1 of the first"}


def test_experts_that_every_rank_counts_from_nought_are_there_twice(tmp_path):
    found = became(tmp_path, experts([0, 1, 2, 3]), experts([0, 1, 0, 1]))
    assert {one.why for one in found.values()} == {
        "experts 2 3 of the second are experts 0 1 of the first, which it has elsewhere, too"
    }
    assert {one.fix for one in found.values()} == {"number experts over all ranks"}


WORDS = {
    "a shard that was not loaded": (
        lambda w: torch.cat([w[:16], 0 * w[16:]]),
        "the first at [16, 0]: all of [16:32, 0:16]; all values of the second there are 0",
    ),
    "columns of another run": (
        lambda w: torch.cat([w[:, :8], w[:, 8:] + weight(32, 8, seed=2)], 1),
        "256 of 512 elements differ, the first at [0, 8]: all of [0:32, 8:16]",
    ),
    "zeros with signs": (lambda w: w * 0, "the first at [0, 0]; all values of the second are 0"),
    "some nan": (lambda w: torch.where(w > 1.5, torch.nan, w), " values of the second are nan or infinite"),
    "one shard on both ranks": (
        lambda w: w[:16].repeat(2, 1),
        "indices: 0-15 twice, 16-31 never, as when 2 ranks load the same shard",
    ),
    "a slice that begins one too early": (
        lambda w: torch.cat([w[:16], w[15:31]]),
        "has only 31 of its 32 indices: 15 twice, 31 never",
    ),
    "pairs to halves": (
        lambda w: w.view(4, 4, 2, 16).transpose(1, 2).reshape(32, 16),
        "as rotary embeddings' rows in heads of 8 go from pairs to halves",
    ),
    "halves to pairs": (
        lambda w: w.view(2, 2, 8, 16).transpose(1, 2).reshape(32, 16),
        "as rotary embeddings' rows in heads of 16 go from halves to pairs",
    ),
    "gate and up in turns": (lambda w: torch.stack(w.chunk(2), 1).reshape(32, 16), "as gate and up are put in turns"),
    "gate and up set apart": (lambda w: torch.cat([w[::2], w[1::2]]), "as if interleaved gate and up were separated"),
    "shards padded one by one": (
        lambda w: torch.cat([torch.cat([part, torch.zeros(4, 16)]) for part in w.chunk(2)]),
        "the second has 4 more indices of dim 0 behind every 16",
    ),
    "float16 on the way": (
        lambda w: w.half().bfloat16(),
        "the second has float32 values that were rounded to float16 on the way to bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", WORDS)
def test_what_became_of_values_is_in_words(tmp_path, change):
    done, words = WORDS[change]
    w = weight(32, 16) * 1.1
    assert words in only(tmp_path, {"w": w}, {"w": done(w)}).why


def test_rows_that_are_alike_do_not_hide_the_order_of_all(tmp_path):
    head = weight(2, 8, 16)
    one_by_one, tiled = (torch.cat([head[at] for at in order]) for order in ((0, 0, 1, 1), (0, 1, 0, 1)))
    found = only(tmp_path, {"k": one_by_one}, {"k": tiled})
    assert "its blocks of 8 come as 0 2 1 3" in found.why


def test_a_tie_that_one_side_lost_is_no_move(tmp_path):
    embed = {"embed_tokens.weight": weight(8, 8)}
    before = {**embed, "lm_head.weight": embed["embed_tokens.weight"].clone(), "q": weight(8, 8, seed=3)}
    found = only(tmp_path, before, {**before, "lm_head.weight": weight(8, 8, seed=1)})
    assert (found.name, found.verdict) == ("lm_head.weight", "other")
    assert found.why.endswith("in the first it is a copy of embed_tokens.weight, which did not change")


def test_a_layer_in_the_place_of_another_is_one_finding(tmp_path):
    names = ("up", "down", "norm")
    found = became(tmp_path, layers([0, 1, 2], names), layers([2, 1, 2], names))
    assert {one.why for one in found.values()} == {"h.0 of the second is h.2 of the first, which it has elsewhere, too"}


def test_layers_that_are_counted_from_one_are_none_lost_and_none_new(tmp_path):
    before = layers([0, 1, 2])
    after = {name.replace(f"h.{at}", f"h.{at + 1}"): one for name, one in before.items() for at in [int(name[2])]}
    found = became(tmp_path, before, after)
    assert {one.why for one in found.values()} == {"h 1 2 3 of the second are h 0 1 2 of the first"}


def test_numbers_that_are_equal_only_as_integers_are_not_the_same(tmp_path):
    scales = {name: 1e-3 * weight(8, seed=at).abs() for at, name in enumerate(("a.scale", "b.scale"))}
    before, after = ({**scales, "a.zero": torch.zeros(8, dtype=dtype)} for dtype in (torch.float32, torch.int64))
    before["a.zero"] += 1e-4 * torch.arange(8)
    found = became(tmp_path, before, after)
    assert {name: one.verdict for name, one in found.items()} == {"a.zero": "other"}
