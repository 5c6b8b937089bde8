"""Conversions with one slip: each is named, from either side; right ones are quiet, whatever the types and names."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardviz.checkpoint.comparing.steps import siblings
from shardviz.cli import main
from tests.checkpoint.maps import (
    DIM,
    HEADS,
    KV,
    LAYERS,
    SETTINGS,
    both,
    compared,
    meta,
    notes,
    permuted,
    save,
    to_hf,
    weight,
)
from tests.lanes import cases

Q, K = (f"model.layers.{{}}.self_attn.{name}_proj.weight" for name in "qk")
GATE, UP = (f"model.layers.{{}}.mlp.{name}_proj.weight" for name in ("gate", "up"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama") / "meta", meta())


def changed(**new):
    return {**to_hf(meta()), **new}


def unpermuted(w):
    return w.view(HEADS, 2, -1, DIM).transpose(1, 2).reshape(w.shape)


def in_all(pattern, change):
    hf = to_hf(meta())
    return hf | {pattern.format(at): change(hf, at) for at in range(LAYERS)}


@pytest.mark.parametrize("settings", [SETTINGS, None], ids=["settings", "no settings"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_right_conversion_is_quiet(tmp_path, source, settings, dtype):
    hf = save(tmp_path / "hf", {name: one.to(dtype) for name, one in to_hf(meta()).items()}, settings)
    for pair in ((source, hf), (hf, source)):
        found = compared(*pair, "llama")
        assert {verdict for verdict, _, _ in found.values()} <= ({"cast"} if dtype == torch.bfloat16 else set())


def test_a_number_that_no_settings_have_is_reported(tmp_path, source):
    hf = save(tmp_path / "hf", to_hf(meta()))
    words = "head_dim is taken to be 8: no config.json next to either says, and it fits the contents"
    assert notes(source, hf, "llama") == (words,)


SLIPS = {
    "rotary left out": (
        lambda: in_all(Q, lambda hf, at: meta()[f"layers.{at}.attention.wq.weight"]),
        Q, "permuted", "it is layers.*.attention.wq.weight, where the map makes rotary(", "left out rotary",
    ),
    "rotary the other way round": (
        lambda: in_all(Q, lambda hf, at: unpermuted(meta()[f"layers.{at}.attention.wq.weight"])),
        Q, "permuted", "it is unrotary(", "the other way around",
    ),
    "rotary with other heads": (
        lambda: in_all(Q, lambda hf, at: permuted(meta()[f"layers.{at}.attention.wq.weight"], HEADS // 2)),
        Q, "permuted", "it is rotary(layers.*.attention.wq.weight, 16)", "rotary with a different number",
    ),
    "a layer's v for its k": (
        lambda: changed(**{K.format(1): permuted(meta()["layers.1.attention.wv.weight"], KV)}),
        K.replace("{}", "1"), "permuted",
        "it has layers.*.attention.wv.weight where the map puts layers.*.attention.wk",
        "a different tensor",
    ),
    "a layer's v for its k, as it is": (
        lambda: changed(**{K.format(1): meta()["layers.1.attention.wv.weight"]}),
        K.replace("{}", "1"), "moved", "layers.*.attention.wv.weight", "",
    ),
    "another layer's q": (
        lambda: changed(**{Q.format(1): to_hf(meta())[Q.format(2)]}),
        Q.replace("{}", "1"), "permuted",
        "it has layers.2.attention.wq.weight where the map puts layers.1.attention.wq",
        "a different tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("turned", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_named(tmp_path, source, slip, dtype, turned):
    made, name, verdict, words, cause = SLIPS[slip]
    hf = save(tmp_path / "hf", {one: value.to(dtype) for one, value in made().items()}, SETTINGS)
    found = compared(*(source, hf)[:: -1 if turned else 1], "llama")
    odd = {name: told for name, told in found.items() if told[0] != "cast"}
    wanted = {name.format(at) for at in range(LAYERS)} if "{}" in name else {name}
    assert {*odd} == wanted
    for seen, why, because in odd.values():
        assert seen == verdict
        assert words in why
        assert cause in because


def test_gate_and_up_exchanged_are_named(tmp_path, source, capsys):
    hf = to_hf(meta())
    for at in range(LAYERS):
        hf[GATE.format(at)], hf[UP.format(at)] = hf[UP.format(at)], hf[GATE.format(at)]
    assert main(["diff", str(source), str(save(tmp_path / "hf", hf, SETTINGS)), "--map", "llama"]) == 1
    out = capsys.readouterr().out
    assert (
        "≠ moved  layers.[0-2].feed_forward.w1.weight\n  the second has here the first's layers.*.feed_forward.w3"
        in out
    )


def test_a_head_that_is_lost_is_no_tie(tmp_path, source):
    hf = to_hf(meta())
    del hf["lm_head.weight"]
    found = compared(source, save(tmp_path / "hf", hf, SETTINGS), "llama")
    assert found["output.weight"][0] == "missing"
    assert "it is not a copy of tok_embeddings.weight, which has its shape" in found["output.weight"][1]


def test_a_tied_head_that_one_side_saves_once_is_quiet(tmp_path):
    tied = meta() | {"output.weight": meta()["tok_embeddings.weight"]}
    hf = to_hf(tied)
    del hf["lm_head.weight"]
    found = compared(*both(tmp_path, tied, hf, SETTINGS), "llama")
    assert {verdict for verdict, _, _ in found.values()} == {"tied"}


def test_a_padded_vocabulary_is_named(tmp_path, source):
    hf = to_hf(meta())
    hf["lm_head.weight"] = torch.cat([hf["lm_head.weight"], torch.zeros(24, DIM)])
    verdict, why, cause = compared(source, save(tmp_path / "hf", hf, SETTINGS), "llama")["output.weight"]
    assert (verdict, why) == ("padded", "equal in the first 40 indices of dim 0; the second has 24 more, all zero")
    assert "as a vocabulary" in cause


def test_an_end_that_was_cut_off_is_named(tmp_path):
    one, other = both(tmp_path, {"w": weight(8, 4)}, {"w": weight(8, 4)[:6]})
    assert compared(one, other)["w"][1:] == (
        "equal in the first 6 indices of dim 0; the first has 2 more, not alike",
        "The end of the dim was cut off",
    )


def test_a_round_trip_that_cancels_out_is_caught_in_the_file_that_was_exported(tmp_path, source):
    """Export and import share one mistake: the trip is exact, and what others load is wrong."""
    wrong = meta()
    exported = to_hf(wrong) | {K.format(at): wrong[f"layers.{at}.attention.wk.weight"] for at in range(LAYERS)}
    imported = {**wrong, **{f"layers.{at}.attention.wk.weight": exported[K.format(at)] for at in range(LAYERS)}}
    assert compared(source, save(tmp_path / "imported", imported)) == {}
    found = compared(source, save(tmp_path / "exported", exported, SETTINGS), "llama")
    assert {name: cause for name, (_, _, cause) in found.items()} == {
        K.format(at): "The conversion left out rotary" for at in range(LAYERS)
    }


def test_without_a_map_the_one_that_knows_the_names_is_used(tmp_path, source, capsys):
    hf = save(tmp_path / "hf", to_hf(meta()), SETTINGS)
    assert main(["diff", str(source), str(hf)]) == 0
    assert "? names: --map llama knows them, and is used" in capsys.readouterr().out
    strange = save(tmp_path / "strange", {f"a.{name}": one for name, one in meta().items() if "layers" in name})
    rest = {name: one for name, one in to_hf(meta()).items() if "layers" in name}
    plain = {
        name: one.reshape(-1, 8, one.shape[1])[:, [0, 2, 4, 6, 1, 3, 5, 7]]
        for name, one in rest.items()
        if "k_proj" in name
    }
    wrong = save(tmp_path / "rest", rest | {name: one.reshape(-1, one.shape[-1]) for name, one in plain.items()})
    assert main(["diff", str(strange), str(wrong)]) == 1
    told = capsys.readouterr().out
    assert "--map llama knows them" in told
    assert "k_proj.weight" in told


def test_names_that_no_map_knows_get_a_hint_at_how_to_write_one(tmp_path, capsys):
    weights = {f"{name}.weight": torch.randn(4, 4) for name in ("q", "k", "v", "o")}
    qkv = torch.cat([weights[f"{name}.weight"] for name in "qkv"]).bfloat16()
    fused = {"qkv.weight": qkv, "o.weight": weights["o.weight"]}
    assert main(["diff", str(save(tmp_path / "apart", weights)), str(save(tmp_path / "fused", fused))]) == 1
    assert "? say how names correspond, with --map FILE" in capsys.readouterr().out


def test_a_tensor_that_a_map_names_and_the_conversion_lost_is_looked_for_where_it_should_be(tmp_path, capsys):
    old = save(tmp_path / "old", {"a.weight": torch.randn(4, 4), "norm.weight": torch.randn(4)})
    new = save(tmp_path / "new", {"b.weight": torch.randn(4, 4)})
    (tmp_path / "my.map").write_text("b.weight = a.weight\nfinal.weight = norm.weight\n")
    assert main(["diff", str(old), str(new), "--map", str(tmp_path / "my.map")]) == 2
    told = capsys.readouterr().err
    assert f"line 2: no tensor of {new} fits final.weight" in told
    assert told.rstrip().endswith("Write final.weight ?= ... if it may be missing")


def test_values_that_lost_digits_on_the_way_are_named(tmp_path):
    w = weight(8, 16)
    cut = (w.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    found = compared(*both(tmp_path / "cut", {"w": w}, {"w": cut}))["w"]
    assert found[:2] == ("cast", "the second has float32 cut off to bfloat16, where torch rounds")
    for at, narrow in enumerate((torch.bfloat16, torch.float16)):
        pair = both(tmp_path / str(at), {"w": w}, {"w": w.to(narrow).float()})
        name = str(narrow).removeprefix("torch.")
        assert compared(*pair)["w"][1] == f"the second has float32 values that were rounded to {name} on the way"
        assert compared(*pair[::-1])["w"][1] == f"the first has float32 values that were rounded to {name} on the way"
    assert compared(*both(tmp_path / "other", {"w": w}, {"w": w + 1}))["w"][0] == "other"


def test_heads_that_are_there_several_times_are_named(tmp_path):
    w = weight(8, 16)
    heads = w.view(2, 1, 4, 16).expand(2, 3, 4, 16).reshape(24, 16)
    verdict, why, _ = compared(*both(tmp_path, {"w": w}, {"w": heads}))["w"]
    words = (
        "float32[8, 16] became float32[24, 16]: the second has every 4 indices of dim 0 3 times, one after the other"
    )
    assert (verdict, why) == ("other", words)


def test_layers_that_are_off_by_one_are_one_line(tmp_path, capsys):
    layers = {
        f"layers.{at}.{name}": weight(8, 4, seed=2 * at + (name == "w")) for at in range(12) for name in ("w", "proj")
    }
    after = {
        f"layers.{(at + 1) % 12}.{name}": layers[f"layers.{at}.{name}"] for at in range(12) for name in ("w", "proj")
    }
    assert main(["diff", *map(str, both(tmp_path, layers, after))]) == 1
    out = capsys.readouterr().out
    assert "moved  layers.[0-11].proj, layers.[0-11].w\n" in out
    assert "layers 0 1 2 3 4 5 6 7, ... of the second are layers 11 0 1 2 3 4 5 6, ... of the first" in " ".join(
        out.split()
    )
    assert out.count("moved") == 2


def test_what_is_other_everywhere_is_one_line(tmp_path, capsys):
    layers = {f"layers.{at}.w": weight(8, 4 + at % 2, seed=at) for at in range(12)}
    after = {name: one + (torch.arange(len(one)) > at % 7)[:, None] for at, (name, one) in enumerate(layers.items())}
    assert main(["diff", *map(str, both(tmp_path, layers, after))]) == 1
    out = capsys.readouterr().out
    words = "28 of 32 elements differ, the first at [1, 0]: all of [1:8, 0:4]; so the others"
    assert f"other  layers.[0-11].w\n  layers.0.w: {words}\n" in out.replace("\n  so", " so")


# Experts


EXPERTS = 12
JOINED = "up = stack(cat(experts.*.w1, experts.*.w3))\ndown = stack(transpose(experts.*.w2))"


def experts():
    sizes = {"w1": (6, 8), "w2": (8, 6), "w3": (6, 8)}
    names = [(at, name) for at in range(EXPERTS) for name in sizes]
    return {f"experts.{at}.{name}": weight(*sizes[name], seed=seed) for seed, (at, name) in enumerate(names)}


def joined(parts, order=range(EXPERTS)):
    return {
        "up": torch.stack([torch.cat([parts[f"experts.{at}.w1"], parts[f"experts.{at}.w3"]]) for at in order]),
        "down": torch.stack([parts[f"experts.{at}.w2"].t() for at in order]),
    }


def exchanged(parts):
    up = [torch.cat([parts[f"experts.{at}.w3"], parts[f"experts.{at}.w1"]]) for at in range(EXPERTS)]
    return joined(parts) | {"up": torch.stack(up)}


def interleaved(parts):
    up = [torch.stack([parts[f"experts.{at}.w1"], parts[f"experts.{at}.w3"]], 1).flatten(0, 1) for at in range(EXPERTS)]
    return joined(parts) | {"up": torch.stack(up)}


OF_EXPERTS = {
    "as text": (
        lambda parts: joined(parts, sorted(range(EXPERTS), key=str)),
        "up",
        "its parts come in another order: the experts are in the order of their numbers as text: 0 1 10 11 2 3 4 5",
    ),
    "exchanged": (
        lambda parts: joined(parts, [1, 0, *range(2, EXPERTS)]), "down", "the experts come in the order 1 0 2 3",
    ),
    "gate and up exchanged": (exchanged, "up", "experts.*.w3 where the map puts experts.*.w1"),
    "gate and up in turns": (interleaved, "up", "it is stack(interleave(experts.*.w1, experts.*.w3, 0)), where"),
    "not transposed": (
        lambda parts: joined(parts) | {"down": torch.stack([parts[f"experts.{at}.w2"] for at in range(EXPERTS)])},
        "down", "it is stack(experts.*.w2",
    ),
    "one is another's": (
        lambda parts: joined(parts | {"experts.3.w1": parts["experts.5.w1"]}),
        "up", "it has experts.5.w1 where the map puts experts.3.w1 in 1 of its 24 parts",
    ),
    "one has other values": (
        lambda parts: joined(parts | {"experts.3.w1": parts["experts.3.w1"] + 1}),
        "up", "1 of its 24 parts differs: experts.3.w1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("turned", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("slip", OF_EXPERTS)
def test_a_slip_with_experts_is_named(tmp_path, slip, turned):
    made, name, words = OF_EXPERTS[slip]
    pair = both(tmp_path, experts(), made(experts()))
    found = compared(*pair[:: -1 if turned else 1], JOINED)
    assert words in found[name][1]


JOINS = {
    "one after the other": (lambda q, k, v: torch.cat([q, k, v]), "it is cat(q, k, v, 0), where the map makes"),
    "other groups": (
        lambda q, k, v: torch.cat([one.chunk(2)[at] for at in range(2) for one in (q, k, v)]),
        "it is interleave(q, k, v, 0, 2), where the map makes interleave(q, k, v, 0, kv_heads)",
    ),
}


@pytest.mark.parametrize("join", JOINS)
def test_a_fused_attention_that_is_joined_otherwise_is_named(tmp_path, join):
    parts = {name: weight(rows, 8, seed=rows) for name, rows in (("q", 32), ("k", 16), ("v", 8))}
    made, words = JOINS[join]
    pair = both(tmp_path, {"qkv": made(**parts)}, parts, {"num_attention_heads": 8, "num_key_value_heads": 4})
    found = compared(*pair, "qkv = interleave(q, k, v, 0, kv_heads)")["qkv"]
    assert found[0] == "permuted"
    assert words in found[1]


def test_parts_of_other_sizes_in_another_order_are_named(tmp_path):
    parts = {name: weight(rows, 8, seed=rows) for name, rows in (("q", 32), ("k", 16), ("v", 8))}
    pair = both(tmp_path, {"qkv": torch.cat([parts[name] for name in "kqv"])}, parts)
    found = compared(*pair, "qkv = cat(q, k, v)")["qkv"]
    assert found[:2] == ("permuted", "in the first, it is cat(k, q, v), where the map makes cat(q, k, v)")


def test_joined_experts_are_quiet(tmp_path):
    pair = both(tmp_path, experts(), joined(experts()))
    assert compared(*pair, JOINED) == compared(*pair[::-1], JOINED) == {}


def test_values_that_are_all_alike_are_not_explained(tmp_path):
    one, other = both(tmp_path, {"q": torch.ones(8, 4)}, {"wq": torch.zeros(8, 4)})
    assert compared(one, other, "q = rotary(wq, 4)")["q"][0] == "other"


@given(st.permutations(range(4)), st.sampled_from([0, 1]), st.integers(0, 1 << 16))
@cases(60)
def test_parts_in_any_order_are_named_or_quiet(tmp_path_factory, order, dim, seed):
    parts = [weight(4, 4, seed=seed + at) for at in range(4)]
    whole = torch.cat([parts[at] for at in order], dim)
    one, other = both(
        tmp_path_factory.mktemp("order"), {"w": whole}, {f"p.{at}": part for at, part in enumerate(parts)}
    )
    found = compared(one, other, f"w = cat(p.0, p.1, p.2, p.3, {dim})")
    if list(order) == sorted(order):
        assert found == {}
    else:
        assert found["w"][0] == "permuted"


# Steps


def steps(tmp_path, stale=()):
    """Write an exported step, and the step itself beside an older one."""
    old, new = meta(), {name: one + weight(*one.shape, seed=-1) for name, one in meta().items()}
    save(tmp_path / "run" / "checkpoint-100", old)
    save(tmp_path / "run" / "checkpoint-200", new)
    exported = to_hf({name: old[name] if name in stale else one for name, one in new.items()})
    return tmp_path / "run" / "checkpoint-200", save(tmp_path / "hf", exported, SETTINGS)


STALE = ("layers.1.attention.wq.weight", "layers.2.feed_forward.w1.weight")


@pytest.mark.parametrize("turned", [False, True], ids=["forth", "back"])
def test_tensors_of_an_older_step_are_named(tmp_path, turned):
    found = compared(*steps(tmp_path, STALE)[:: -1 if turned else 1], "llama")
    assert {verdict for verdict, _, _ in found.values()} == {"stale"}
    assert len(found) == 2
    which = "first" if turned else "second"
    assert all(
        why == f"the {which} has here what {tmp_path / 'run' / 'checkpoint-100'} has" for _, why, _ in found.values()
    )
    assert all("again after checkpoint-100" in cause for _, _, cause in found.values())


def test_an_older_step_elsewhere_is_looked_at_where_it_is_named(tmp_path, capsys):
    new, hf = steps(tmp_path, STALE)
    shutil.move(tmp_path / "run" / "checkpoint-100", tmp_path / "old")
    assert {verdict for verdict, _, _ in compared(new, hf, "llama").values()} == {"other"}
    assert main(["diff", str(new), str(hf), "--map", "llama", "--also", str(tmp_path / "old")]) == 1
    assert "28 equal, 2 stale" in capsys.readouterr().out


def series(tmp_path, **values):
    """Write steps of one run, each with a weight of its own beside `w`: the number that seeds it."""
    for at, (step, seed) in enumerate(values.items()):
        weights = {"w": weight(8, 8, seed=seed), "trained": weight(8, 8, seed=100 + at)}
        save(tmp_path / f"step-{step[1:]}", weights)
    return [tmp_path / f"step-{step[1:]}" for step in values]


def test_a_weight_that_was_frozen_for_some_steps_is_not_called_left_over(tmp_path):
    _, second, third = series(tmp_path, s100=1, s200=1, s300=2)
    verdict, why, cause = compared(second, third)["w"]
    assert (verdict, cause) == ("other", "")
    assert why.endswith("the first has it as step-100 does: it was frozen in between, or one is left over")


def test_a_later_step_is_not_what_a_weight_is_left_over_from(tmp_path):
    first, second, _ = series(tmp_path, s100=1, s200=2, s300=2)
    verdict, _, cause = compared(first, second)["w"]
    assert (verdict, cause) == ("other", "")


def test_a_step_that_differs_from_those_before_and_after_it_is_the_odd_one(tmp_path):
    _, second, third = series(tmp_path, s100=1, s200=2, s300=1)
    right = {"w": weight(8, 8, seed=1), "trained": weight(8, 8, seed=101)}
    for other in (third, save(tmp_path / "copy", right)):
        verdict, why, cause = compared(second, other)["w"]
        assert (verdict, cause) == ("other", "Only the first has different values")
        assert "step-100" in why
        assert why.endswith("have the same, before and after it")


@pytest.mark.parametrize(("third", "says"), [(3, "again after step-100"), (2, "only a third step would show that")])
def test_what_was_left_over_is_sure_where_a_third_step_shows_that_it_is_trained(tmp_path, third, says):
    steps = {"s100": 1, "s200": 2} | ({"s300": 3} if third == 3 else {})
    now = series(tmp_path, **steps)[1]
    copy = save(tmp_path / "copy", {"w": weight(8, 8, seed=1), "trained": weight(8, 8, seed=101)})
    verdict, _, cause = compared(now, copy)["w"]
    assert verdict == "stale"
    assert cause.endswith(says)


def test_an_export_of_a_later_step_is_named(tmp_path):
    first = series(tmp_path, s100=1, s200=2, s300=3)[0]
    copy = save(tmp_path / "copy", {"w": weight(8, 8, seed=3), "trained": weight(8, 8, seed=100)})
    assert compared(first, copy)["w"][2] == "It was taken from step-300, a later step"


def test_a_run_that_begins_with_another_ones_weights_has_nothing_left_over(tmp_path):
    first = series(tmp_path, s100=1, s200=2, s300=3)[1]
    fork = save(tmp_path / "fork", {"w": weight(8, 8, seed=1), "trained": weight(8, 8, seed=7)})
    assert compared(first, fork)["w"][0] == "other"


def test_right_exports_beside_older_steps_are_quiet(tmp_path):
    assert compared(*steps(tmp_path), "llama") == {}


def test_the_steps_beside_a_checkpoint(tmp_path):
    for name in ("step-9/model", "step-10/model", "step-11/model", "step-x/model", "other-12/model", "step-12"):
        save(tmp_path / name, {"w": weight(2)})
    (tmp_path / "step-13").mkdir()
    names = [path.relative_to(tmp_path).as_posix() for path in siblings(tmp_path / "step-10" / "model")]
    assert sorted(names) == ["step-11/model", "step-9/model"]
    assert siblings(tmp_path / "step-x" / "model") == []
