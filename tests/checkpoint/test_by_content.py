"""Two checkpoints whose names have nothing in common: which tensor is which is found by what is in them."""

from __future__ import annotations

import json
import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from tests.checkpoint.maps import LAYERS, both, meta, permuted, weight
from tests.lanes import cases
from tests.picture.golden import check_golden


def layer(tensors, at):
    return {name.partition(f"layers.{at}.")[2]: one for name, one in tensors.items() if f"layers.{at}." in name}


def fused(tensors):
    """Return a Llama by the names of another library: q, k and v in one, gate above up, the head transposed."""
    found = {
        "transformer.embed.table": tensors["tok_embeddings.weight"],
        "transformer.final.scale": tensors["norm.weight"],
        "transformer.head.kernel": tensors["output.weight"].t(),
    }
    for at in range(LAYERS):
        own, to = layer(tensors, at), f"transformer.h.{at}."
        found |= {
            f"{to}attn.qkv.weight": torch.cat([own[f"attention.w{part}.weight"] for part in "qkv"]),
            f"{to}attn.out.weight": own["attention.wo.weight"],
            f"{to}mlp.gate_up.weight": torch.cat([own["feed_forward.w1.weight"], own["feed_forward.w3.weight"]]),
            f"{to}mlp.down.weight": own["feed_forward.w2.weight"],
            f"{to}ln1.scale": own["attention_norm.weight"],
            f"{to}ln2.scale": own["ffn_norm.weight"],
        }
    return found


def difference(tmp_path, one, other):
    return compare_checkpoints(*map(open_checkpoint, both(tmp_path, one, other)))


def verdicts(found):
    return {one.name: one.verdict for one in found.outcomes if one.verdict not in ("equal", "cast")}


def test_the_map_is_printed_and_kept_and_says_the_same_again(tmp_path, capsys):
    one, other = both(tmp_path, meta(), fused(meta()))
    kept = tmp_path / "my.map"
    assert main(["diff", str(one), str(other), "--save-map", str(kept)]) == 0
    check_golden("by_content", capsys.readouterr().out)
    assert main(["diff", str(one), str(other), "--map", str(kept)]) == 0
    assert "21 tensors compared, all equal" in capsys.readouterr().out
    assert main(["diff", str(other), str(one), "--format", "json"]) == 0
    lines = json.loads(capsys.readouterr().out)["map"]
    assert (
        "transformer.h.*.mlp.gate_up.weight = cat(layers.*.feed_forward.w1.weight, layers.*.feed_forward.w3.weight)"
        in lines
    )


def plus(w, place, more):
    w[place] += more
    return w


def test_what_is_all_ones_is_which_only_where_nothing_else_is(tmp_path, capsys):
    names = [("a.*.first", "b.*.x"), ("a.*.second", "b.*.y"), ("a.norm", "b.final")]
    one, other = {"a.w": weight(8, 8), "a.v": weight(8, 8, seed=1)}, {"b.q": weight(8, 8), "b.k": weight(8, 8, seed=1)}
    for mine, theirs in names:
        for at in range(2):
            one[mine.replace("*", str(at))] = torch.ones(8)
            other[theirs.replace("*", str(at))] = torch.ones(8)
    paths = both(tmp_path, one, other)
    assert main(["diff", *map(str, paths)]) == 0
    told = capsys.readouterr().out
    assert "a.norm = b.final  # all 1, the only one of its shape and numbers" in told
    assert "which tensor it is: it is all 1, and so are b.*.x, b.*.y" in told
    assert main(["diff", *map(str, paths), "--strict", "--save-map", str(tmp_path / "my.map")]) == 1
    assert "# a.0.first: which tensor it is: it is all 1" in (tmp_path / "my.map").read_text()


def test_a_map_that_is_given_is_not_written_again(tmp_path, capsys):
    paths = [str(path) for path in both(tmp_path, meta(), meta())]
    assert main(["diff", *paths, "--save-map", str(tmp_path / "x.map")]) == 2
    assert "x.map was not written: names or the given map match the tensors" in capsys.readouterr().err
    assert main(["diff", *paths, "--map", "llama", "--save-map", str(tmp_path / "x.map")]) == 2
    assert not (tmp_path / "x.map").exists()


MADE = {
    "same": lambda parts: {"one": parts[0]},
    "turned": lambda parts: {"one": parts[0].t()},
    "joined": lambda parts: {"all": torch.cat(parts)},
    "beside": lambda parts: {"all": torch.cat(parts, 1)},
    "in turns": lambda parts: {"all": torch.stack(parts, 1).reshape(-1, parts[0].shape[1])},
    "rotary": lambda parts: {"one": permuted(parts[0], 2)},
}


@st.composite
def conversions(draw):
    """Return layers by two names, made of each other in ways that are drawn, and one change of the second."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    layers, one, other = draw(st.integers(2, 5)), {}, {}
    for block in range(draw(st.integers(1, 4))):
        way = draw(st.sampled_from(sorted(MADE)))
        rows, columns = 8 * rng.randint(1, 3), 8 * rng.randint(1, 3)
        many = 1 if way in ("same", "turned", "rotary") else rng.randint(2, 3)
        for at in range(layers):
            parts = [weight(rows, columns, seed=rng.randrange(10**9)) for _ in range(many)]
            one |= {f"layers.{at}.m{block}.p{number}": part for number, part in enumerate(parts)}
            other |= {f"h.{at}.{chr(97 + block)}.{name}": made for name, made in MADE[way](parts).items()}
    if draw(st.booleans()):
        other = {name: made.bfloat16() for name, made in other.items()}
    return one, other, rng.choice(sorted(other))


@cases(150)
@given(conversions(), st.sampled_from(["none", "value", "rows", "scale"]), st.booleans())
def test_whatever_was_renamed_and_joined_is_found_and_one_wrong_tensor_is_named(tmp_path_factory, case, change, turned):
    one, other, name = case
    if change == "value":
        other[name] = plus(other[name].clone(), (0, 0), 1)
    elif change == "rows":
        other[name] = other[name].roll(1, 0)
    elif change == "scale":
        other[name] = other[name] * 2
    found = difference(tmp_path_factory.mktemp("drawn"), *[one, other][:: -1 if turned else 1])
    wrong = verdicts(found)
    assert bool(wrong) == (change != "none"), (found.map, wrong)
    assert len({each.split(".")[1] for each in wrong}) <= 1, (found.map, wrong)
    assert not {"missing", "added"} & set(wrong.values()), (found.map, wrong)


def test_equality_under_a_map_of_the_values_alone_is_said_to_be_that(tmp_path, capsys):
    paths = [str(path) for path in both(tmp_path, meta(), fused(meta()))]
    assert main(["diff", *paths]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "? 21 tensors compared, all equal under a map that the values suggest: check" in told
    assert main(["diff", *paths, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["guessed"] == ["cat", "transpose"]
