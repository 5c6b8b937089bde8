"""Conversions with one slip: each is named, from either side; right ones are quiet, whatever the types and names."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardviz.checkpoint.comparing.all_tensors.odd_files import siblings
from shardviz.cli import main
from tests.checkpoint.maps import SETTINGS, both, compared, meta, save, to_hf, weight
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


def test_the_steps_beside_a_checkpoint(tmp_path):
    for name in ("step-9/model", "step-10/model", "step-11/model", "step-x/model", "other-12/model", "step-12"):
        save(tmp_path / name, {"w": weight(2)})
    (tmp_path / "step-13").mkdir()
    names = [path.relative_to(tmp_path).as_posix() for path in siblings(tmp_path / "step-10" / "model")]
    assert sorted(names) == ["step-11/model", "step-9/model"]
    assert siblings(tmp_path / "step-x" / "model") == []
