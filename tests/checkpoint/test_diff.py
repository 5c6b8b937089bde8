"""Two checkpoints side by side: what is the same is quiet, and what was done to a tensor is named."""

from __future__ import annotations

import json
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.comparing.equality import equal
from shardviz.checkpoint.maps.language import parse_rules
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from shardviz.errors import ShardvizError
from shardviz.relate.casts import cast
from tests.lanes import at_night


def compared(one, other, names=None):
    lines = "".join(f"{left} = {right}\n" for left, right in (names or {}).items())
    rules = parse_rules(lines, "names") if lines else ()
    found = compare_checkpoints(open_checkpoint(one), open_checkpoint(other), rules)
    return {outcome.name: (outcome.verdict, outcome.why) for outcome in found.outcomes if outcome.verdict != "equal"}


def files(tmp_path, before, after):
    paths = []
    for name, tensors in (("before", before), ("after", after)):
        save_file({one: value.contiguous() for one, value in tensors.items()}, tmp_path / f"{name}.safetensors")
        paths.append(tmp_path / f"{name}.safetensors")
    return paths


def weight(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_map_renames(tmp_path, capsys):
    one, other = {"h.0.q": weight(4, 8), "h.1.q": weight(4, 8, seed=1)}, {}
    other = {"layers.0.wq": one["h.0.q"], "layers.1.wq": one["h.1.q"].flip(0)}
    paths = files(tmp_path, one, other)
    with pytest.raises(ShardvizError, match=r"no tensor of .* by its name or its values") as caught:
        compared(*files(tmp_path, one, {name: value + 100 for name, value in other.items()}))
    assert "--map FILE" in caught.value.hint
    paths = files(tmp_path, one, other)
    (tmp_path / "map").write_text("h.*.q = layers.*.wq\n")
    assert main(["diff", *map(str, paths), "--map", str(tmp_path / "map")]) == 1
    out = capsys.readouterr().out
    assert "h.1.q" in out
    assert "as layers.*.wq: dim 0 is reversed" in out
    assert "1 equal, 1 permuted" in out


def test_a_name_that_a_map_says_is_not_renamed(tmp_path):
    names = [f"layers.{layer}.{name}" for layer in range(4) for name in ("up", "gate")]
    before = {name: weight(4, 8, seed=seed) for seed, name in enumerate(names)}
    after = {name.replace("3.gate", "3.router"): tensor for name, tensor in before.items()}
    known = {"layers.3.gate": "layers.3.router"}
    paths = files(tmp_path, before, after)
    assert [verdict for verdict, _ in compared(*paths).values()] == ["moved"]
    assert compared(*paths, known) == compared(*reversed(paths), known) == {}
    after["layers.2._orig_mod.gate"] = after.pop("layers.2.gate")
    ((name, (verdict, _)),) = compared(*files(tmp_path, before, after), known).items()
    assert (name, verdict) == ("layers.2.gate", "renamed")


def test_a_folder_that_is_neither_a_dump_nor_a_checkpoint_is_refused(saved, tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    assert main(["diff", str(saved / "dcp"), str(tmp_path)]) == 2
    assert "run.json: no schema number" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int8", "bool"])
@pytest.mark.parametrize("to", ["float32", "float16", "bfloat16"])
def test_casts_round_as_torch_does(dtype, to):
    values = torch.cat([weight(1000) * 10.0**power for power in range(-8, 6, 2)])
    if getattr(torch, dtype).is_floating_point:
        values = torch.cat([values, torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.00390625])])
    own = values.to(getattr(torch, dtype))
    wanted = own.to(getattr(torch, to))
    bits = own.view(torch.uint8).numpy().view(f"u{own.element_size()}")
    found = cast(bits, dtype, to)
    kept = ~torch.isnan(wanted).numpy()
    assert np.array_equal(found[kept], wanted.view(torch.uint8).numpy().view(f"u{wanted.element_size()}")[kept])


@pytest.mark.parametrize("width", [1, 8, *at_night([2, 4])])
@pytest.mark.parametrize("shape", [(700, 1031), (4200, 1001), (513, 4)])
def test_matrices_that_lie_across_each_other_are_compared_to_the_last_element(width, shape):
    rng = np.random.default_rng(width)
    flat = rng.integers(0, 255, shape).astype(f"<u{width}")
    across = np.ascontiguousarray(flat.T).T
    padded = np.zeros((shape[1], shape[0] + 3), flat.dtype)
    padded[:, : shape[0]] = flat.T
    for other in (across, padded[:, : shape[0]].T):
        assert equal(flat, other)
        assert equal(other, flat)
    for place in [(0, 0), (shape[0] - 1, shape[1] - 1), (511, 2), *rng.integers(0, shape, (4, 2)).tolist()]:
        other = across.copy("K")
        other[tuple(place)] ^= other.dtype.type(1)
        assert not equal(flat, other)
        assert not equal(other, flat)


@pytest.mark.parametrize("dims", [(0, 2, 1), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_dims_in_any_order_are_compared_to_the_last_element(dims):
    rng = np.random.default_rng(0)
    shape = (9, 301, 130)
    flat = rng.integers(0, 1 << 16, shape).astype("<u2")
    turned = np.ascontiguousarray(flat.transpose(dims)).transpose(np.argsort(dims))
    assert equal(flat, turned)
    assert equal(turned, flat)
    wide = turned.astype("<u4") << np.uint32(16)
    assert equal(flat, wide, (lambda bits: bits, lambda bits: (bits >> np.uint32(16)).astype("<u2")))
    for place in [(0, 0, 0), (8, 300, 129), *rng.integers(0, shape, (4, 3)).tolist()]:
        other = turned.copy("K")
        other[tuple(place)] ^= other.dtype.type(1)
        assert not equal(flat, other)
        assert not equal(other, flat)


def test_strict_fails_where_anything_was_not_compared(tmp_path, capsys):
    one, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"v": weight(4), "w": weight(4)}, one)
    save_file({"v": weight(4), "w": weight(4).to(torch.float8_e4m3fnuz).view(torch.uint8)}, other)
    length, *_ = struct.unpack("<Q", (content := other.read_bytes())[:8])  # safetensors 0.7 writes no such dtype
    header = content[8 : 8 + length].replace(b'"U8"', b'"F8_E4M3FNUZ"')
    other.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    assert main(["diff", str(one), str(one), "--strict"]) == 0
    assert main(["diff", str(one), str(other)]) == 0
    assert "1 equal, 1 not-compared" in capsys.readouterr().out
    assert main(["diff", str(one), str(other), "--strict"]) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda _: weight(1024, 4096, seed=1), "differ"),
        (lambda own: own.roll(512, 0), "dim 0"),
        (lambda own: own.roll(512, 0).roll(1024, 1), "dim 1"),
        (lambda own: own.t().contiguous(), "permute(1, 0)"),
        (lambda own: own.view(4096, 1024).t().contiguous(), "its own view(4096, 1024).transpose(0, 1)"),
    ],
    ids=["trained", "shards exchanged", "rows and columns", "transposed", "read with its dims exchanged"],
)
def test_a_difference_is_named_in_the_memory_of_two_tensors(tmp_path, change, text):
    """Values are not looked up one by one where a few of them, or hashes of slices, show what became of them."""
    own = weight(1024, 4096)
    one, other = files(tmp_path, {"w": own}, {"w": change(own)})
    before, after = (open_checkpoint(path) for path in (one, other))
    tracemalloc.start()
    try:
        (outcome,) = compare_checkpoints(before, after).outcomes
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text in outcome.why
    assert peak < 2 * own.numel() * own.element_size()


@pytest.mark.parametrize(
    ("change", "text", "is_unrelated"),
    [
        (lambda w: w + 1e-3 * weight(*w.shape, seed=9), "the difference is 0.099% of the first's norm", False),
        (lambda w: weight(*w.shape, seed=9), "the values are unrelated (correlation up to 0.0", True),
        (lambda w: w * weight(*w.shape, seed=9).abs() * 50, " times of the first's norm", False),
        (torch.zeros_like, "the difference is 100% of the first's norm", False),
    ],
)
def test_a_difference_has_a_size(tmp_path, capsys, change, text, is_unrelated):
    paths = [str(path) for path in files(tmp_path, {"w": weight(64, 64)}, {"w": change(weight(64, 64))})]
    assert main(["diff", *paths]) == 1
    assert text in " ".join(capsys.readouterr().out.split())
    assert main(["diff", *paths, "--format", "json"]) == 1
    (outcome,) = json.loads(capsys.readouterr().out)["tensors"]
    assert outcome["distance"] > 0
    assert (outcome["correlation"] is not None and abs(outcome["correlation"]) < 0.2) is is_unrelated


def test_the_size_of_a_difference_is_left_out_where_it_says_nothing(tmp_path):
    before = {"w": weight(64, 64), "few": weight(4), "nan": weight(64, 64), "same": weight(64, 64)}
    after = before | {"w": weight(32, 64), "few": weight(4, seed=1), "nan": weight(64, 64) / 0}
    found = compare_checkpoints(*map(open_checkpoint, files(tmp_path, before, after)))
    assert {one.distance for one in found.outcomes} == {None}


def in_layers(numbers):
    """Return layers under other numbers, each with a norm of ones."""
    names = {"norm": torch.ones(8), "up": weight(4, 8), "down": weight(8, 4)}
    return {
        f"layers.{layer}.{name}": tensor.clone() if name == "norm" else tensor + at
        for layer, at in enumerate(numbers)
        for name, tensor in names.items()
    }


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([0, 1, 4, 5, 2, 3, 6, 7], "the 2 chunks of 2 layers of each of 2 stages one behind the other"),
        ([0, 2, 4, 6, 1, 3, 5, 7], "the 4 chunks of 1 layer of each of 2 stages one behind the other"),
        ([0, 3, 2, 1, 4, 5, 6, 7], "The conversion renumbers the layers"),
        ([0, 2, 1, 3], "The conversion renumbers the layers"),
    ],
)
def test_layers_that_change_places_are_said_once(tmp_path, capsys, numbers, words):
    assert main(["diff", *map(str, files(tmp_path, in_layers(sorted(numbers)), in_layers(numbers)))]) == 1
    assert words in " ".join(capsys.readouterr().out.split())


def test_layers_of_which_a_weight_stays_are_not_renumbered(tmp_path, capsys):
    before, numbers = in_layers(range(8)), [0, 1, 4, 5, 2, 3, 6, 7]
    after = in_layers(numbers) | {"layers.2.up": before["layers.2.up"]}
    assert main(["diff", *map(str, files(tmp_path, before, after))]) == 1
    assert "stages" not in capsys.readouterr().out
