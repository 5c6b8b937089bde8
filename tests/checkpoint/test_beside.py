"""A job's dump beside a checkpoint: equal is quiet, and differences are named with ranks and rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.checkpoint.beside.compare import compare_with_job
from shardviz.checkpoint.beside.job import job_of
from shardviz.checkpoint.maps.language import parse_rules
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from shardviz.dump.digests import hash_of_bytes
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.relate.casts import cast
from tests.checkpoint import jobs
from tests.checkpoint.jobs import Held, job
from tests.lanes import recorded

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


@recorded
@pytest.mark.parametrize("name", ["dcp", "flat", "hf", "whole"])
def test_a_real_job_is_what_it_saved_in_any_format(saved, name, capsys):
    assert main(["diff", str(saved / "job.shardviz"), str(saved / name)]) == 0
    assert "4 tensors compared, all equal" in capsys.readouterr().out
    assert main(["diff", str(saved / name), str(saved / "job.shardviz")]) == 0


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


@pytest.mark.parametrize(
    ("claimed", "held"),
    [
        ("[24/fsdp/tp, 16]", "[24/tp/fsdp, 16]"),
        ("[24/tp, 16]", "[24/3/tp, 16]"),
        ("[24/3/tp, 16]", "[24/tp, 16]"),
        ("[24/tp, 16]", "[24/fsdp, 16]"),
        ("[16/tp, 16/fsdp]", "[16/fsdp, 16/tp]"),
        ("[24/fsdp/tp, 16]", "[24/2/fsdp/tp, 16]"),
    ],
)
def test_another_layout_is_named_by_hashes_alone(tmp_path, claimed, held):
    whole = weight(*map(int, ("16", "16") if claimed.startswith("[16") else ("24", "16")))
    _, odd = compared(tmp_path, {"w": Held(whole, claimed, held)}, {"w": whole})
    assert odd["w"].verdict == "permuted"
    assert f"the job claims {claimed}, and holds {held} of the checkpoint" in odd["w"].why
    assert odd["w"].fix.endswith("if the job is right, write the checkpoint again")
    assert odd["w"].ranks


def test_shards_of_two_ranks_that_are_exchanged_are_named_with_their_ranks(tmp_path):
    whole = weight(24, 16)
    swapped = {0: whole[6:12], 1: whole[:6]}
    _, odd = compared(tmp_path, {"w": Held(whole, "[24/fsdp/tp, 16]", of_rank=swapped)}, {"w": whole})
    assert odd["w"].verdict == "permuted"
    assert odd["w"].ranks == (0, 1)
    assert odd["w"].why.endswith("ranks 2-3 have what the checkpoint has")


def test_one_wrong_copy_is_named_and_the_right_ones_are_too(tmp_path):
    whole = weight(24, 16)
    other = whole[12:].copy()
    other[0, 0] += 1
    for values, words in ((False, "rank 3 in [12:24, 0:16] holds other values"), (True, "1 of 192 elements on rank 3")):
        held = Held(whole, "[24/tp, 16]", of_rank={3: other}, values=values)
        _, odd = compared(tmp_path, {"w": held}, {"w": whole})
        assert odd["w"].verdict == "other"
        assert words in odd["w"].why
        assert odd["w"].ranks == (3,)
        assert "ranks 0-2 have what the checkpoint has" in odd["w"].why


def test_a_layer_that_is_anothers_is_moved(tmp_path):
    layers = {f"layers.{at}.w": weight(24, 16, seed=at) for at in range(3)}
    held = {name: Held(one, "[24/fsdp/tp, 16]") for name, one in layers.items()}
    held["layers.1.w"] = Held(layers["layers.2.w"], "[24/fsdp/tp, 16]")
    _, odd = compared(tmp_path, held, layers)
    assert odd.keys() == {"layers.1.w"}
    assert odd["layers.1.w"].verdict == "moved"
    assert "hold the checkpoint's layers.2.w" in odd["layers.1.w"].why


def test_one_rank_that_was_not_loaded_again_is_stale(tmp_path):
    old, new = weight(24, 16, seed=1), weight(24, 16)
    save_file({"w": old}, tmp_path / "step-1.safetensors")
    also = [open_checkpoint(tmp_path / "step-1.safetensors")]
    held = Held(new, "[24/fsdp/tp, 16]", of_rank={2: old[12:18]})
    _, odd = compared(tmp_path, {"w": held, "v": Held(new)}, {"w": new, "v": new}, also=also)
    assert odd["w"].verdict == "stale"
    assert odd["w"].ranks == (2,)
    assert "rank 2 in [12:18, 0:16] has what" in odd["w"].why


def test_a_shard_of_one_number_was_never_loaded(tmp_path):
    whole = weight(24, 16)
    held = Held(whole, "[24/fsdp/tp, 16]", of_rank={1: np.zeros((6, 16), np.float32)})
    _, odd = compared(tmp_path, {"w": held}, {"w": whole})
    assert odd["w"].why.startswith("rank 1 holds a single number throughout, the checkpoint does not")


def test_a_job_in_a_narrower_type_is_a_cast_and_a_wider_one_is_compared_where_it_has_values(tmp_path):
    whole = weight(24, 16)
    half = cast(whole.view("u4"), "float32", "bfloat16")
    one = Held(half, "[24/tp, 16]", dtype="bfloat16")
    assert compared(tmp_path, {"w": one}, {"w": whole})[1]["w"].verdict == "cast"
    narrow = whole.astype(np.float16)
    for values, verdict in ((True, "cast"), (False, "not-compared")):
        _, odd = compared(tmp_path, {"w": Held(whole, "[24/tp, 16]", values=values)}, {"w": narrow})
        assert odd["w"].verdict == verdict
    assert "the dump has hashes of the job's values only" in odd["w"].why
    exact = Held(narrow.astype(np.float32), "[24/tp, 16]")
    assert compared(tmp_path, {"w": exact}, {"w": narrow})[1]["w"].verdict == "cast"


def test_values_that_went_through_a_narrower_type_are_named(tmp_path):
    whole = weight(24, 16)
    _, odd = compared(tmp_path, {"w": Held(whole.astype(np.float16).astype(np.float32), "[24/tp, 16]")}, {"w": whole})
    assert odd["w"].verdict == "cast"
    assert "rounded to float16 on the way" in odd["w"].why


@pytest.mark.parametrize(
    ("held", "saved", "verdict", "words"),
    [
        (lambda w: w.T, lambda w: w, "permuted", "permute(1, 0)"),
        (lambda w: np.pad(w, ((0, 8), (0, 0))), lambda w: w, "padded", "the job has 8 more, all zero"),
        (lambda w: w, lambda w: np.pad(w, ((0, 8), (0, 0))), "padded", "the checkpoint has 8 more"),
        (lambda w: w.reshape(48, 8), lambda w: w, "permuted", "in the same order"),
        (lambda w: w[:, :12], lambda w: w + 1, "other", "[24, 12] in the job"),
    ],
)
def test_another_shape_is_explained(tmp_path, held, saved, verdict, words):
    whole = weight(24, 16)
    mine = np.ascontiguousarray(held(whole))
    claimed = f"[{mine.shape[0]}/fsdp/tp, {mine.shape[1]}]"
    _, odd = compared(tmp_path, {"w": Held(mine, claimed)}, {"w": saved(whole)})
    assert odd["w"].verdict == verdict
    assert words in odd["w"].why


def test_plain_parts_cut_by_hand_are_found_and_a_foreign_one_is_not_compared(tmp_path):
    whole = weight(24, 16)
    parts = {rank: whole[rank * 6 : rank * 6 + 6] for rank in range(4)}
    assert not compared(tmp_path, {"w": Held(whole, of_rank=parts)}, {"w": whole})[1]
    parts[2] = weight(6, 16, seed=5)
    _, odd = compared(tmp_path, {"w": Held(whole, of_rank=parts)}, {"w": whole})
    assert odd["w"].verdict == "not-compared"
    assert odd["w"].ranks == (2,)


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


def test_parts_that_a_map_leaves_out_are_not_compared(tmp_path):
    whole = weight(24, 16)
    _, odd = compared(tmp_path, {"qk": Held(whole, "[24/tp, 16]")}, {"q": whole[:12]}, "q = split(qk, 2, 0)")
    assert odd["qk"].verdict == "not-compared"
    assert "192 of its 384 elements are in no tensor of the checkpoint" in odd["qk"].why


@pytest.mark.parametrize("rest", ["zeros", "others"])
def test_padding_of_a_job_is_no_difference(tmp_path, rest):
    small, more = weight(22, 16), np.zeros((2, 16), np.float32) if rest == "zeros" else weight(2, 16, seed=1)
    held = {"w": Held(np.concatenate([small, more]), "[24/tp, 16]")}
    found, odd = compared(tmp_path, held, {"w": small}, "w = pad(w, 24)")
    assert {name: one.verdict for name, one in odd.items()} == ({} if rest == "zeros" else {"w": "not-compared"})
    assert "w: padded: rows 22 to 23 are not compared" in found.notes


def test_padding_of_a_checkpoint_is_not_compared(tmp_path):
    small = weight(22, 16)
    padded = np.concatenate([small, weight(2, 16, seed=1)])
    found, odd = compared(tmp_path, {"w": Held(small, "[22/tp, 16]")}, {"w": padded}, "w = pad(w, 24)")
    assert odd == {}
    assert "w: padded: rows 22 to 23 are not compared" in found.notes


def test_what_one_side_lacks_is_a_difference_but_buffers_that_are_not_saved_are_a_note(tmp_path):
    whole = weight(24, 16)
    held = {"w": Held(whole), "only": Held(weight(4)), "inv_freq": Held(weight(8), role="buffer")}
    found, odd = compared(tmp_path, held, {"w": whole, "more": weight(5)})
    assert {name: one.verdict for name, one in odd.items()} == {"only": "missing", "more": "added"}
    assert any("1 buffer that only the job has" in note for note in found.notes)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_tie_of_which_one_is_saved_is_no_difference(tmp_path, is_tied):
    whole = weight(24, 16)
    held = {"embed": Held(whole, "[24/tp, 16]"), "head": Held(whole, "[24/tp, 16]"), "v": Held(weight(3))}
    saved = {"embed": whole, "v": weight(3)}
    options = {"tied": (("embed", "head"),)} if is_tied else {}
    _, odd = compared(tmp_path, held, saved, **options)
    assert odd["head"].verdict == ("tied" if is_tied else "missing")


def test_a_tied_head_that_differs_is_found(tmp_path):
    whole = weight(24, 16)
    held = {"embed": Held(whole, "[24/tp, 16]"), "head": Held(whole + 1, "[24/tp, 16]"), "v": Held(weight(3))}
    _, odd = compared(tmp_path, held, {"embed": whole, "v": weight(3)}, tied=(("embed", "head"),))
    assert odd["head"].verdict == "other"


def test_ranks_that_the_dump_lacks_are_not_passed_over(tmp_path, capsys):
    whole = weight(24, 16)
    folder = job(tmp_path / "job", MESH, {"w": Held(whole, "[24/fsdp/tp, 16]"), "v": Held(whole, "[24/fsdp, 16]")})
    (folder / "rank_00003.json").unlink()
    save_file({"w": whole, "v": whole}, tmp_path / "c.safetensors")
    assert main(["diff", str(folder), str(tmp_path / "c.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "the dump has no rank 3; what the others hold is what the checkpoint has" in out
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


def test_strangers_are_refused_with_names_of_both(tmp_path, capsys):
    folder = job(tmp_path / "job", MESH, {"a": Held(weight(4))})
    save_file({"b": weight(4)}, tmp_path / "c.safetensors")
    assert main(["diff", str(folder), str(tmp_path / "c.safetensors")]) == 2
    assert "by its name: the first has a, the second b" in capsys.readouterr().err
