"""Conversions with one slip: each is named, from either side; right ones are quiet, whatever the types and names."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.comparing.series import siblings
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from tests.checkpoint.maps import (
    SETTINGS,
    both,
    compared,
    meta,
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


# Experts


def stacked_experts(transposed, size):
    """Return single experts of three layers by Qwen's names, and the same stacked, transposed in some layers."""
    single, stacked = {}, {}
    for layer in range(3):
        own = f"model.layers.{layer}.mlp.experts."
        parts = {
            kind: [weight(*shape, seed=100 * layer + 10 * at + which) for at in range(4)]
            for which, (kind, shape) in enumerate({"gate": size, "up": size, "down": size[::-1]}.items())
        }
        single |= {f"{own}{at}.{kind}_proj.weight": one for kind, some in parts.items() for at, one in enumerate(some)}
        both_kinds = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        for name, some in (("gate_up_proj", both_kinds), ("down_proj", parts["down"])):
            is_turned = layer in transposed
            stacked[f"{own}{name}"] = torch.stack(some).transpose(1, 2) if is_turned else torch.stack(some)
    return single, stacked


@pytest.mark.parametrize("turned", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("size", [(8, 8), (8, 16)], ids=["square", "wide"])
@pytest.mark.parametrize(("transposed", "odd"), [((), []), ((0, 1, 2), []), ((0, 2), [1]), ((1,), [1])])
def test_experts_are_transposed_as_in_most_layers(tmp_path, transposed, odd, size, turned, capsys):
    paths = both(tmp_path, *stacked_experts(transposed, size)[:: -1 if turned else 1])
    assert main(["diff", *map(str, paths)]) == bool(odd)
    out = capsys.readouterr().out
    assert ("most layers have experts transposed" in out) == (len(transposed) > 1)
    assert out.count("permuted  ") == 2 * len(odd)
    assert all(f"model.layers.{layer}.mlp.experts.down_proj\n" in out for layer in odd)


def test_a_matrix_that_all_layers_have_transposed_is_a_difference(tmp_path):
    found = {name: one.t() if "o_proj" in name else one for name, one in to_hf(meta()).items()}
    assert main(["diff", *map(str, both(tmp_path, meta(), found))]) == 1


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


# Merges of ranks


@pytest.mark.parametrize("turned", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize(
    ("what", "ranks", "cause"),
    [
        ("norm", 2, "summed-replicas"),
        ("norm", 8, "summed-replicas"),
        ("norm", 1.5, "forgotten-factor"),
        ("", 2, "forgotten-factor"),
        ("layers.1.ffn_norm", 2, "forgotten-factor"),
    ],
    ids=str,
)
def test_a_merge_that_sums_replicas_is_told_from_a_factor(tmp_path, what, ranks, cause, turned):
    merged = {name: one * ranks if what in name else one for name, one in meta().items()}
    found = compare_checkpoints(*map(open_checkpoint, both(tmp_path, *(meta(), merged)[:: -1 if turned else 1])))
    assert {one.cause_id for one in found.outcomes if one.verdict != "equal"} == {cause}
    if cause == "summed-replicas":
        told = next(one for one in found.outcomes if one.cause_id == cause)
        side = "first" if turned else "second"
        assert told.cause == (
            f"The merge of {ranks} ranks that made the {side} sums a tensor that every rank holds whole"
        )


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


def test_the_steps_beside_a_checkpoint(tmp_path):
    for name in ("step-9/model", "step-10/model", "step-11/model", "step-x/model", "other-12/model", "step-12"):
        save(tmp_path / name, {"w": weight(2)})
    (tmp_path / "step-13").mkdir()
    names = [path.relative_to(tmp_path).as_posix() for path in siblings(tmp_path / "step-10" / "model")]
    assert sorted(names) == ["step-11/model", "step-9/model"]
    assert siblings(tmp_path / "step-x" / "model") == []
