"""A job's dump beside a checkpoint: equal is quiet, and differences are named with ranks and rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.checkpoint.live_job.compare import compare_with_job
from shardviz.checkpoint.live_job.job import job_of
from shardviz.checkpoint.maps.language import parse_rules
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from shardviz.dump.digests import hash_of_bytes
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from tests.checkpoint import jobs
from tests.checkpoint.jobs import Held, job

MESH = "fsdp=2,tp=2"


def weight(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def compared(tmp_path, tensors, saved, rules="", mesh=MESH, also=(), **options):
    """Compare in both orders, which must agree, and return what is not equal."""
    folder = job(tmp_path / "job.shardviz", mesh, tensors, **options)
    path = tmp_path / "ckpt.safetensors"
    save_file({name: np.ascontiguousarray(one) for name, one in saved.items()}, path)
    sides = job_of(dump_of(read_files(folder))), open_checkpoint(path)
    lines = parse_rules(rules, "my.map") if rules else ()
    both = [compare_with_job(*pair, lines, also=also) for pair in (sides, sides[::-1])]
    turned = {"missing": "added", "added": "missing"}
    one, other = ({o.name: o for o in found.outcomes if o.verdict != "equal"} for found in both)
    assert sorted(o.verdict for o in one.values()) == sorted(turned.get(o.verdict, o.verdict) for o in other.values())
    return both[0], one


def test_a_real_job_beside_a_cast_and_a_permuted_checkpoint(saved, capsys):
    assert main(["diff", str(saved / "job.shardviz"), str(saved / "half")]) == 1
    assert "4 cast" in capsys.readouterr().out
    assert main(["diff", str(saved / "job.shardviz"), str(saved / "moved"), "--format", "json"]) == 1
    found = [one for one in json.loads(capsys.readouterr().out)["tensors"] if one["verdict"] != "equal"]
    assert [(one["name"], one["verdict"], one["ranks"]) for one in found] == [("0.weight", "permuted", [0, 1, 2, 3])]


def test_view_prints_what_diff_does(saved, capsys):
    assert main(["view", "--print", str(saved / "job.shardviz"), str(saved / "moved")]) == 0
    assert "permuted  0.weight" in capsys.readouterr().out


LAYOUTS = ["[24/fsdp/tp, 16]", "[24/tp, 16/fsdp]", "[24/fsdp, 16]", "[24, 16]", "[24/3/tp, 16]", "[24, 16/tp/fsdp]"]


@pytest.mark.parametrize("claimed", LAYOUTS)
@pytest.mark.parametrize("values", [False, True])
def test_what_every_rank_claims_is_equal(tmp_path, claimed, values):
    whole = weight(24, 16)
    found, odd = compared(tmp_path, {"w": Held(whole, claimed, values=values)}, {"w": whole})
    assert not odd
    assert found.compared == 1


def test_a_dump_of_an_earlier_version_has_the_hashes_of_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "hash_of", hash_of_bytes)
    whole = weight(24, 16)
    whole[::3] = -0.0
    assert not compared(tmp_path, {"w": Held(whole, "[24/tp, 16]")}, {"w": whole})[1]
    _, odd = compared(tmp_path, {"w": Held(whole, "[24/tp, 16]")}, {"w": whole + 1})
    assert odd["w"].verdict == "other"


def test_values_that_went_through_a_narrower_type_are_named(tmp_path):
    whole = weight(24, 16)
    _, odd = compared(tmp_path, {"w": Held(whole.astype(np.float16).astype(np.float32), "[24/tp, 16]")}, {"w": whole})
    assert odd["w"].verdict == "cast"
    assert "rounded to float16 on the way" in odd["w"].why


MAPS = {
    "renamed": ("layers.*.w = h.*.kernel", {"layers.0.w": "a"}, {"h.0.kernel": lambda t: t["a"]}),
    "made of the checkpoint's": (
        "qkv = cat(q, k)",
        {"qkv": lambda t: np.concatenate([t["a"], t["b"]])},
        {"q": lambda t: t["a"], "k": lambda t: t["b"]},
    ),
    "the checkpoint's made of it": (
        "qk = cat(q, k)",
        {"q": "a", "k": "b"},
        {"qk": lambda t: np.concatenate([t["a"], t["b"]])},
    ),
    "parts of it": (
        "q = split(qk, 2, 0)\nk = split(qk, 2, 1)",
        {"qk": "a"},
        {"q": lambda t: t["a"][:12], "k": lambda t: t["a"][12:]},
    ),
    "transposed": ("w = transpose(v)", {"w": "a"}, {"v": lambda t: t["a"].T}),
    "experts": (
        "up = stack(experts.*.up)",
        {"experts.0.up": "a", "experts.1.up": "b"},
        {"up": lambda t: np.stack([t["a"], t["b"]])},
    ),
}


@pytest.mark.parametrize("which", MAPS)
def test_a_map_is_followed_in_both_directions_and_finds_what_is_wrong(tmp_path, which):
    rules, mine, theirs = MAPS[which]
    made = {"a": weight(24, 16), "b": weight(24, 16, seed=1)}
    wholes = {name: made[how] if isinstance(how, str) else how(made) for name, how in mine.items()}
    held = {name: Held(one, f"[{one.shape[0]}/tp/fsdp, {one.shape[1]}]") for name, one in wholes.items()}
    saved = {name: how(made) for name, how in theirs.items()}
    found, odd = compared(tmp_path, held, saved, rules)
    assert not odd
    assert found.compared == len(wholes)
    name = next(iter(held))
    one = wholes[name]
    held[name] = Held(one, held[name].claimed, f"[{one.shape[0]}/fsdp/tp, {one.shape[1]}]")
    _, odd = compared(tmp_path, held, saved, rules)
    assert {name: one.verdict for name, one in odd.items()} == {name: "permuted"}


@pytest.mark.parametrize("rest", ["zeros", "others"])
def test_padding_of_a_job_is_no_difference(tmp_path, rest):
    small, more = weight(22, 16), np.zeros((2, 16), np.float32) if rest == "zeros" else weight(2, 16, seed=1)
    held = {"w": Held(np.concatenate([small, more]), "[24/tp, 16]")}
    found, odd = compared(tmp_path, held, {"w": small}, "w = pad(w, 24)")
    assert {name: one.verdict for name, one in odd.items()} == ({} if rest == "zeros" else {"w": "not-compared"})
    assert "w: padded: rows 22 to 23 are not compared" in found.notes


def test_ranks_that_the_dump_lacks_are_not_passed_over(tmp_path, capsys):
    whole = weight(24, 16)
    folder = job(tmp_path / "job", MESH, {"w": Held(whole, "[24/fsdp/tp, 16]"), "v": Held(whole, "[24/fsdp, 16]")})
    (folder / "rank_00003.json").unlink()
    save_file({"w": whole, "v": whole}, tmp_path / "c.safetensors")
    assert main(["diff", str(folder), str(tmp_path / "c.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "the dump has no rank 3; the other ranks match the checkpoint" in out
    assert "1 equal, 1 not-compared" in out
    assert main(["diff", str(folder), str(tmp_path / "c.safetensors"), "--strict"]) == 1


def test_a_dump_of_ids_and_a_plan_are_refused_in_a_line(tmp_path, capsys, saved):
    from shardviz.layout.mesh import parse_mesh
    from tests.dumps import make_dump

    stamped = make_dump(tmp_path / "s.shardviz", parse_mesh(MESH), {"0.weight": "[24/tp, 16]"})
    assert main(["diff", str(stamped), str(saved / "dcp")]) == 2
    err = capsys.readouterr().err
    assert "has no values to compare: its weights were stamped, and ids are not weights" in err
    assert "Hint: capture the job without stamps" in err
