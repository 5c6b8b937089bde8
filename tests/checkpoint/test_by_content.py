"""Two checkpoints whose names have nothing in common: which tensor is which is found by what is in them."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from tests.checkpoint.maps import HEADS, KV, LAYERS, SETTINGS, both, meta, permuted, save, to_hf, weight
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


def renamed(tensors):
    """Return a Llama by names of which none is like Meta's, each tensor as it is."""
    words = {"attention.": "mixer.", "feed_forward.": "ffn.", "layers.": "blocks.", "norm.weight": "ln.scale"}
    found = {}
    for name, one in tensors.items():
        for word, other in words.items():
            name = name.replace(word, other)
        found[f"net.{name.replace('.weight', '.kernel')}"] = one
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


def rotated(found):
    """Return q and k of each layer in Hugging Face's order."""
    sizes = (32 * 2, 16, 16)
    for at in range(LAYERS):
        name = f"transformer.h.{at}.attn.qkv.weight"
        q, k, v = found[name].split(sizes)
        found[name] = torch.cat([permuted(q, HEADS), permuted(k, KV), v])
    return found


def in_groups(found):
    """Return q, k and v in turns, one group of heads after the other, as Megatron has them."""
    for at in range(LAYERS):
        name = f"transformer.h.{at}.attn.qkv.weight"
        parts = [part.chunk(KV) for part in found[name].split((64, 16, 16))]
        found[name] = torch.cat([block for group in zip(*parts, strict=True) for block in group])
    return found


def with_rows(found, rows):
    more = torch.randn(rows, 32, generator=torch.Generator().manual_seed(9))
    return {**found, "transformer.embed.table": torch.cat([found["transformer.embed.table"], more])}


RIGHT = {
    "fused": lambda found: found,
    "rotated": rotated,
    "in groups": in_groups,
    "bfloat16": lambda found: {name: one.bfloat16() for name, one in found.items()},
    "float16": lambda found: {name: one.half() for name, one in found.items()},
    "padded": lambda found: with_rows(found, 8),
    "transposed": lambda found: {name: one.t() if one.ndim == 2 else one for name, one in found.items()},
    "layers stacked": lambda found: stacked(found, "transformer.h.*."),
    "counted from 1": lambda found: counted_from(found, 1),
    "in stages": lambda found: {
        name.replace("h.2.", "s.1.h.0.").replace("r.h.", "r.s.0.h."): one for name, one in found.items()
    },
    "two in one": lambda found: (
        {name: one for name, one in found.items() if "head" not in name}
        | {"transformer.head": found["transformer.head.kernel"].t()}
    ),
}


def stacked(found, pattern):
    before, after = pattern.split("*")
    names = sorted(name for name in found if name.startswith(before))
    left = {name: one for name, one in found.items() if name not in names}
    kinds = {name.split(".", before.count(".") + 1)[-1] for name in names}
    return left | {
        f"stack.{kind}": torch.stack([found[f"{before}{at}{after}{kind}"] for at in range(LAYERS)]) for kind in kinds
    }


def counted_from(found, first):
    return {
        ".".join(str(int(part) + first) if part.isdigit() else part for part in name.split(".")): one
        for name, one in found.items()
    }


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", RIGHT)
def test_what_a_conversion_made_is_equal(tmp_path, case, turned):
    sides = meta(), RIGHT[case](fused(meta()))
    found = difference(tmp_path, *sides[:: -1 if turned else 1])
    assert verdicts(found) == {}
    assert found.map


def exchanged(found, one, other):
    return {**found, one: found[other], other: found[one]}


def changed(found, name, change):
    return {**found, name: change(found[name].clone())}


def a_row(w):
    w[3] = 0
    return w


H = "transformer.h."
BUGS = {
    "two layers exchanged": (
        lambda f: exchanged(f, f"{H}0.mlp.down.weight", f"{H}1.mlp.down.weight"),
        [f"layers.{at}.feed_forward.w2.weight" for at in (0, 1)],
    ),
    "layers in reverse": (
        lambda f: {name.replace(".0.", ".x.").replace(".2.", ".0.").replace(".x.", ".2."): w for name, w in f.items()},
        [f"{H}{at}.{name}.weight" for at in (0, 2) for name in ("mlp.gate_up", "attn.qkv")],
    ),
    "gate and up exchanged in one layer": (
        lambda f: changed(f, f"{H}1.mlp.gate_up.weight", lambda w: torch.cat(w.chunk(2)[::-1])),
        [f"{H}1.mlp.gate_up.weight"],
    ),
    "one layer transposed": (
        lambda f: changed(square(f), f"{H}2.sq", lambda w: w.t()),
        ["layers.2.square"],
    ),
    "one row zero": (lambda f: changed(f, "transformer.embed.table", a_row), ["tok_embeddings.weight"]),
    "one value": (
        lambda f: changed(f, f"{H}0.mlp.down.weight", lambda w: plus(w, (3, 3), 1)),
        ["layers.0.feed_forward.w2.weight"],
    ),
    "one step later": (
        lambda f: changed(f, "transformer.head.kernel", lambda w: w + 1e-3 * torch.randn_like(w)),
        ["output.weight"],
    ),
    "halved": (lambda f: changed(f, f"{H}1.attn.out.weight", lambda w: w / 2), ["layers.1.attention.wo.weight"]),
    "a head halved": (lambda f: changed(f, "transformer.head.kernel", lambda w: w / 2), ["output.weight"]),
    "another tensor": (
        lambda f: changed(f, f"{H}1.attn.out.weight", lambda w: torch.randn_like(w)),
        ["layers.1.attention.wo.weight"],
    ),
    "rows of q not reordered in one layer": (
        lambda f: {**rotated(dict(f)), f"{H}2.attn.qkv.weight": f[f"{H}2.attn.qkv.weight"]},
        [f"{H}2.attn.qkv.weight"],
    ),
    "not in groups in one layer": (
        lambda f: {**in_groups(dict(f)), f"{H}1.attn.qkv.weight": f[f"{H}1.attn.qkv.weight"]},
        [f"{H}1.attn.qkv.weight"],
    ),
    "k of another layer": (
        lambda f: changed(
            f, f"{H}1.attn.qkv.weight", lambda w: torch.cat([w[:64], f[f"{H}2.attn.qkv.weight"][64:80], w[80:]])
        ),
        [f"{H}1.attn.qkv.weight"],
    ),
    "a layer lost": (
        lambda f: {name: w for name, w in f.items() if f"{H}2" not in name},
        ["layers.2.feed_forward.w2.weight"],
    ),
    "one norm all ones": (
        lambda f: changed(f, f"{H}1.ln1.scale", torch.ones_like),
        ["layers.1.attention_norm.weight"],
    ),
    "all norms ones": (
        lambda f: {name: torch.ones_like(w) if "ln1" in name else w for name, w in f.items()},
        ["layers.1.attention_norm.weight"],
    ),
}


def plus(w, place, more):
    w[place] += more
    return w


def square(found):
    return found | {f"{H}{at}.sq": weight(16, 16, seed=70 + at) for at in range(LAYERS)}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", BUGS)
def test_a_bug_is_a_difference_and_is_not_mapped_around(tmp_path, case, turned):
    broken, names = BUGS[case]
    source = meta() | {
        f"layers.{at}.square": weight(16, 16, seed=70 + at) for at in range(LAYERS) if "transposed" in case
    }
    sides = source, broken(fused(meta()))
    found = difference(tmp_path, *sides[:: -1 if turned else 1])
    wrong = verdicts(found)
    sources = {name: line for line in found.map for name in names}
    assert wrong, found.map
    for name in names:
        parts = name.split(".")
        assert any(_is_about(one, name, found) for one in wrong), (wrong, found.map, parts, sources)
    assert len(wrong) <= 2 * max(len(names), 4) or "lost" in case or "reverse" in case


def _is_about(outcome, name, found):
    """Whether an outcome is of a tensor, or of what the map makes of it or makes it of."""
    if outcome == name:
        return True
    stars = ".".join("*" if part.isdigit() else part for part in name.split("."))
    own = ".".join("*" if part.isdigit() else part for part in outcome.split("."))
    number = [part for part in name.split(".") if part.isdigit()] == [
        part for part in outcome.split(".") if part.isdigit()
    ]
    return number and any(stars in line and own in line for line in found.map)


EXPERTS = 3


def mixture():
    """Return layers of experts, each by itself, with a router and biases that no step has changed."""
    found = {}
    for at in range(LAYERS):
        to, seed = f"model.layers.{at}.", 100 * at
        found[f"{to}mlp.router.weight"] = weight(EXPERTS, 16, seed=seed)
        for expert in range(EXPERTS):
            for number, (name, shape) in enumerate({"gate": (24, 16), "up": (24, 16), "down": (16, 24)}.items()):
                found[f"{to}mlp.experts.{expert}.{name}_proj.weight"] = weight(
                    *shape, seed=seed + 3 * expert + number + 1
                )
        for name in ("q", "k", "v"):
            found[f"{to}attn.{name}.weight"] = weight(16, 16, seed=seed + 50 + ord(name))
            found[f"{to}attn.{name}.bias"] = torch.zeros(16)
    return found


def grouped(found, order=range(EXPERTS)):
    """Return the same with experts in one tensor, gate above up, and q, k, v in one."""
    made = {}
    for at in range(LAYERS):
        own, to = layer(found, at), f"decoder.{at}."
        made[f"{to}moe.gate.kernel"] = own["mlp.router.weight"]
        experts = [
            [own[f"mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")] for expert in order
        ]
        made[f"{to}moe.w13"] = torch.stack([torch.cat(each[:2]) for each in experts])
        made[f"{to}moe.w2"] = torch.stack([each[2].t() for each in experts])
        for leaf in ("weight", "bias"):
            made[f"{to}wqkv.{leaf}"] = torch.cat([own[f"attn.{part}.{leaf}"] for part in "qkv"])
    return made


@pytest.mark.parametrize("turned", [False, True])
def test_experts_and_untouched_biases_are_found(tmp_path, turned):
    found = difference(tmp_path, *[mixture(), grouped(mixture())][:: -1 if turned else 1])
    assert verdicts(found) == {}
    experts = "model.layers.*.mlp.experts.*."
    assert f"decoder.*.moe.w13 = stack(cat({experts}gate_proj.weight, {experts}up_proj.weight))" in found.map
    assert f"decoder.*.moe.w2 = stack(transpose({experts}down_proj.weight))" in found.map
    bias = "cat(model.layers.*.attn.q.bias, model.layers.*.attn.k.bias, model.layers.*.attn.v.bias)"
    assert f"decoder.*.wqkv.bias = {bias}  # as that of its module" in found.map


def test_experts_in_another_order_are_a_difference(tmp_path):
    found = difference(tmp_path, mixture(), grouped(mixture(), [0, 2, 1]))
    assert set(verdicts(found)) == {f"decoder.{at}.moe.{name}" for at in range(LAYERS) for name in ("w13", "w2")}
    assert all("the experts come in the order 0 2 1" in one.why for one in found.outcomes if one.verdict == "permuted")


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


def test_twins_are_told_apart_by_what_they_are_and_else_are_ambiguous(tmp_path):
    twins = {"tok_embeddings.weight": weight(16, 8), "output.weight": weight(16, 8)}
    again = {"m.wte.weight": weight(16, 8), "m.lm_head.weight": weight(16, 8)}
    found = difference(tmp_path / "embeddings", twins, again)
    assert {line.partition("  #")[0] for line in found.map} == {
        "tok_embeddings.weight = m.wte.weight",
        "output.weight = m.lm_head.weight",
    }
    rest = {"w": weight(4, 8, seed=3)}, {"u": weight(4, 8, seed=3)}
    found = difference(
        tmp_path / "any",
        {"a": weight(8, 8), "b": weight(8, 8), **rest[0]},
        {"x": weight(8, 8), "y": weight(8, 8), **rest[1]},
    )
    assert found.map == ("w = u",)
    assert verdicts(found) == dict.fromkeys("abxy", "not-compared")


def test_tensors_of_one_shape_and_other_values_are_not_taken_for_each_other(tmp_path, capsys):
    other = {name: weight(*one.shape, seed=500 + at) for at, (name, one) in enumerate(renamed(meta()).items())}
    paths = both(tmp_path, meta(), other)
    assert main(["diff", *map(str, paths)]) == 2
    assert "by its name or its values" in capsys.readouterr().err
    some = {**renamed(meta()), "net.tok_embeddings.kernel": weight(40, 32, seed=99)}
    found = difference(tmp_path / "one", meta(), some)
    assert verdicts(found) == {"tok_embeddings.weight": "missing", "net.tok_embeddings.kernel": "added"}


def test_another_step_of_all_tensors_is_compared_with_its_own(tmp_path):
    later = {name: one + 1e-2 * torch.randn_like(one) for name, one in renamed(meta()).items()}
    found = difference(tmp_path, meta(), later)
    assert verdicts(found) == dict.fromkeys(meta(), "other")


def test_most_names_alike_leave_a_renamed_tensor_a_difference(tmp_path):
    other = {("layers.0.w" if name == "layers.0.ffn_norm.weight" else name): one for name, one in meta().items()}
    found = difference(tmp_path, meta(), other)
    assert found.map == ()
    assert verdicts(found) == {"layers.0.w": "moved"}


def gate_up(at):
    """Return a Llama whose w1 and w3 are one tensor; in layer `at` they are the other way round."""
    tensors = meta()
    for layer in range(LAYERS):
        own = f"layers.{layer}.feed_forward."
        parts = [tensors.pop(f"{own}{name}.weight") for name in ("w1", "w3")]
        tensors[f"{own}w13.weight"] = torch.cat(parts[:: -1 if layer == at else 1])
    return tensors


@pytest.mark.parametrize("turned", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("odd", [None, 0, 2])
def test_names_left_over_are_mapped_as_most_layers_show(tmp_path, odd, turned):
    found = difference(tmp_path, *(meta(), gate_up(odd))[:: -1 if turned else 1])
    assert found.map == (
        "layers.*.feed_forward.w13.weight = cat(layers.*.feed_forward.w1.weight, layers.*.feed_forward.w3.weight)",
    )
    assert verdicts(found) == ({} if odd is None else {f"layers.{odd}.feed_forward.w13.weight": "permuted"})


def test_two_layers_or_a_new_name_alone_show_no_map(tmp_path):
    few = [{name: one for name, one in side.items() if "layers.2" not in name} for side in (meta(), gate_up(None))]
    found = difference(tmp_path / "few", *few)
    assert found.map == ()
    assert verdicts(found) == {f"layers.{at}.feed_forward.w13.weight": "moved" for at in range(2)}
    found = difference(tmp_path / "name", meta(), {name.replace("w2", "down"): one for name, one in meta().items()})
    assert found.map == ()
    assert verdicts(found) == {f"layers.{at}.feed_forward.down.weight": "moved" for at in range(3)}


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


def of_one_letter(found):
    """Return a checkpoint with its projections called as in Hugging Face's, by names that no map knows."""
    words = {"layers.": "h.", "attention.w": "attn.w_", "feed_forward.": "ff."}
    for word, new in words.items():
        found = {name.replace(word, new): one for name, one in found.items()}
    return found


@pytest.mark.parametrize("groups", [1, KV, 4 * KV])
@pytest.mark.parametrize("has_settings", [False, True])
def test_groups_of_heads_are_as_many_as_the_settings_say(tmp_path, groups, has_settings):
    made = fused(meta())
    for at in range(LAYERS):
        name = f"transformer.h.{at}.attn.qkv.weight"
        parts = [part.chunk(groups) for part in made[name].split((64, 16, 16))]
        made[name] = torch.cat([block for group in zip(*parts, strict=True) for block in group])
    one = save(tmp_path / "one", of_one_letter(meta()), SETTINGS if has_settings else None)
    found = compare_checkpoints(open_checkpoint(one), open_checkpoint(save(tmp_path / "other", made)))
    if has_settings and groups == 4 * KV:
        assert verdicts(found) == {f"transformer.h.{at}.attn.qkv.weight": "permuted" for at in range(LAYERS)}
        assert {one.cause_id for one in found.outcomes if one.verdict == "permuted"} == {"wrong-map-number"}
    else:
        assert verdicts(found) == {}
    is_sure = has_settings and groups > 1
    assert set(found.guessed) == {"cat", "transpose", *([] if is_sure or groups == 1 else ["interleave"])}


def test_equality_under_a_map_of_the_values_alone_is_said_to_be_that(tmp_path, capsys):
    paths = [str(path) for path in both(tmp_path, meta(), fused(meta()))]
    assert main(["diff", *paths]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "? 21 tensors compared, all equal under a map that the values suggest: check" in told
    assert main(["diff", *paths, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["guessed"] == ["cat", "transpose"]


def megatron(tensors, tp=1, groups=KV):
    """Return a Llama as Megatron-Core has it; with tp, as the shards of its fused weights are joined by mistake."""
    hf = to_hf(tensors)
    found = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for at in range(LAYERS):
        own, to = layer(hf, at), f"decoder.layers.{at}."
        parts = [own[f"self_attn.{part}_proj.weight"].chunk(groups) for part in "qkv"]
        halves = [own[f"mlp.{part}_proj.weight"].chunk(tp) for part in ("gate", "up")]
        found |= {
            f"{to}self_attention.linear_qkv.weight": torch.cat([x for each in zip(*parts, strict=True) for x in each]),
            f"{to}self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
            f"{to}self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
            f"{to}mlp.linear_fc1.weight": torch.cat([x for each in zip(*halves, strict=True) for x in each]),
            f"{to}mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
            f"{to}mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
        }
    return found


FUSED = ("self_attention.linear_qkv", "mlp.linear_fc1")


@pytest.mark.parametrize(
    ("how", "wrong"), [({}, None), ({"groups": 1}, 0), ({"groups": 8}, 0), ({"tp": 2}, 1)], ids=str
)
def test_megatron_reads_its_fused_weights_in_one_order(tmp_path, how, wrong):
    one = save(tmp_path / "one", to_hf(meta()), SETTINGS)
    other = save(tmp_path / "other", megatron(meta(), **how))
    for sides in ((one, other), (other, one)):
        found = compare_checkpoints(*map(open_checkpoint, sides))
        names = [f"decoder.layers.{at}.{FUSED[wrong]}.weight" for at in range(LAYERS)] if wrong is not None else []
        assert verdicts(found) == dict.fromkeys(names, "permuted")
        assert "names: --map megatron knows them, and is used" in found.notes
        assert found.guessed == ()


def test_megatron_has_the_layers_of_torch_dist_in_one_tensor(tmp_path):
    made = megatron(meta())
    left = {name: one for name, one in made.items() if ".layers." not in name}
    kinds = {name.split(".", 3)[3] for name in made if ".layers." in name}
    pile = {
        f"decoder.layers.{kind}": torch.stack([made[f"decoder.layers.{at}.{kind}"] for at in range(LAYERS)])
        for kind in kinds
    }
    one, other = save(tmp_path / "one", to_hf(meta()), SETTINGS), save(tmp_path / "other", left | pile)
    found = compare_checkpoints(open_checkpoint(one), open_checkpoint(other))
    assert verdicts(found) == {}
    assert "names: --map megatron knows them, and is used" in found.notes


def test_a_number_that_only_the_values_suggest_is_said(tmp_path, capsys):
    one, other = save(tmp_path / "one", to_hf(meta())), save(tmp_path / "other", megatron(meta(), groups=1))
    assert main(["diff", str(one), str(other)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "all equal under a map that the values suggest: check kv_heads = 1 in it" in told
