"""`shardviz stamp-checkpoint`: copies of safetensors files and folders, and what cannot be copied."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from shardviz.cli import main
from shardviz.stamping.copies import stamp_safetensors
from shardviz.stamping.fill import Fill
from shardviz.stamping.target import is_stamped

WEIGHTS = {
    "norm": np.ones(8, np.float32),
    "up": np.arange(12, dtype=np.float16).reshape(3, 4),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(2.0, np.float64),
    "positions": np.arange(6),
    "mask": np.array([True, False]),
    "packed": np.arange(5, dtype=np.uint8),
}


def stamp(*words):
    return main(["stamp-checkpoint", *map(str, words)])


def said(capsys):
    out, err = capsys.readouterr()
    return out, err.removeprefix("shardviz: error: ")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(WEIGHTS, path, {"format": "pt"})
    return path


def test_a_copy_has_the_names_shapes_and_types_and_fills_as_values(source, tmp_path, capsys):
    copy = tmp_path / "s.safetensors"
    assert stamp(source, "-o", copy) == 0
    found = load_file(copy)
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        name: (one.dtype, one.shape) for name, one in WEIGHTS.items()
    }
    for name in ("norm", "up", "empty", "scalar"):
        fill = Fill(name, WEIGHTS[name].shape, str(WEIGHTS[name].dtype))
        assert found[name].tobytes() == fill.bits.tobytes()
    for name in ("positions", "mask", "packed"):
        assert np.array_equal(found[name], WEIGHTS[name])
    with safe_open(copy, "np") as file:
        assert file.metadata() == {"format": "pt", "shardviz": "stamped 1"}
    out, err = said(capsys)
    assert out.splitlines()[:2] == [
        "4 tensors stamped, 119 B",
        "3 tensors kept: integers and flags may be indices: positions, packed, mask",
    ]
    assert f"reference={str(copy)!r}" in err


def test_bfloat16_is_written_without_torch(tmp_path):
    header = json.dumps({"w": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(30))
    code = (
        "import sys; from shardviz.cli import main; assert main(['stamp-checkpoint', 'm.safetensors', '-o', "
        "'s.safetensors']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "s.safetensors").read_bytes().endswith(Fill("w", (3, 5), "bfloat16").bits.tobytes())


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    save_file({"a": np.ones(4, np.float32)}, path / "model-1.safetensors")
    save_file({"b": np.ones((2, 2), np.float32)}, path / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (path / "config.json").write_text("{}")
    (path / "tokenizer.model").write_bytes(b"\0\1")
    return path


def test_a_folder_is_copied_with_what_a_loader_reads_beside_the_weights_and_no_other_weights(folder, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(b"other weights")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    (folder / "consolidated.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes())
    copy = tmp_path / "stamped"
    assert stamp(folder, "-o", copy) == 0
    assert sorted(path.name for path in copy.iterdir()) == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
    ]
    assert is_stamped(copy)
    assert not is_stamped(folder)


def test_the_hubs_cache_is_followed_and_links_that_lead_elsewhere_are_not(folder, tmp_path):
    hub = tmp_path / "hub" / "models--x"
    (hub / "blobs").mkdir(parents=True)
    snapshot = hub / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        shutil.copyfile(path, hub / "blobs" / f"blob-{path.name}")
        os.symlink(f"../../blobs/blob-{path.name}", snapshot / path.name)
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", snapshot / "tokenizer_config.json")
    copy = tmp_path / "stamped"
    assert stamp(snapshot, "-o", copy) == 0
    assert (copy / "config.json").read_text() == "{}"
    assert not (copy / "tokenizer_config.json").exists()
    assert not any(path.is_symlink() for path in copy.iterdir())


def test_tied_weights_that_are_stored_twice_have_one_fill_and_norms_of_ones_do_not(tmp_path, capsys):
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    save_file({"embed": table, "head": table.copy(), "one": np.ones(4), "two": np.ones(4)}, tmp_path / "m.safetensors")
    assert stamp(tmp_path / "m.safetensors", "-o", tmp_path / "s.safetensors") == 0
    found = load_file(tmp_path / "s.safetensors")
    assert np.array_equal(found["embed"], found["head"])
    assert not np.array_equal(found["one"], found["two"])
    assert "equal in the original, and so in the copy: head as embed" in said(capsys)[0]


# What is there already


def test_an_older_copy_is_replaced_with_force_and_nothing_else_ever_is(source, tmp_path, capsys):
    copy = tmp_path / "s.safetensors"
    assert stamp(source, "-o", copy) == 0
    capsys.readouterr()
    assert stamp(source, "-o", copy) == 2
    assert said(capsys)[1] == f"{copy} exists\nHint: give --force to replace it, or another place with -o\n"
    assert stamp(source, "-o", copy, "--force") == 0
    before = source.read_bytes()
    capsys.readouterr()
    assert stamp(source, "-o", source, "--force") == 2
    assert "exists and is not a stamped copy: its weights would be lost" in said(capsys)[1]
    assert source.read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert stamp(source, "-o", tmp_path / "other", "--force") == 2
    assert (tmp_path / "other" / "notes.txt").exists()


def test_a_copy_is_written_over_itself(source, tmp_path):
    copy = tmp_path / "s.safetensors"
    assert stamp(source, "-o", copy) == 0
    before = copy.read_bytes()
    assert stamp(copy, "-o", copy, "--force") == 0
    assert copy.read_bytes() == before


def test_an_empty_folder_is_filled(folder, tmp_path):
    (tmp_path / "stamped").mkdir()
    assert stamp(folder, "-o", tmp_path / "stamped") == 0


# What cannot be


def damaged(source, tmp_path):
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(source.read_bytes()[:-3])
    return path


def pickled(source, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"\x80\x04")
    return path


def integers(source, tmp_path):
    path = tmp_path / "ids.safetensors"
    save_file({"ids": np.arange(4)}, path)
    return path


def missing(source, tmp_path):
    return tmp_path / "nothing.safetensors"


def empty(source, tmp_path):
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (damaged, "damaged"),
        (pickled, "is not a checkpoint that can be stamped\nHint: convert it to safetensors"),
        (integers, "has only int64, which are not stamped\nHint: give a checkpoint"),
        (missing, "does not exist\nHint: "),
        (empty, "has no .safetensors file\nHint: "),
    ],
)
def test_what_cannot_be_stamped_is_one_line_and_a_hint_and_leaves_nothing(source, tmp_path, capsys, make, told):
    path = make(source, tmp_path)
    assert stamp(path, "-o", tmp_path / "out" / "s.safetensors") == 2
    out, err = said(capsys)
    assert out == ""
    assert told in err
    assert len(err.strip().splitlines()) == 2
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(source, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    assert stamp(source, "-o", tmp_path / "s.safetensors") == 2
    assert "takes 119 B, and" in (text := said(capsys)[1])
    assert "has 100 B left\nHint: give a folder on another disk" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors"]


def test_a_place_that_cannot_be_written_is_an_error(source, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert stamp(source, "-o", tmp_path / "file" / "s.safetensors") == 2
    assert said(capsys)[1].startswith(f"cannot write {tmp_path / 'file' / 's.safetensors'}: ")


def test_a_copy_needs_a_place(capsys):
    assert stamp("m.safetensors") == 2
    assert said(capsys)[1] == (
        "the following arguments are required: -o/--output\nHint: shardviz stamp-checkpoint --help\n"
    )


def test_an_index_of_another_name_says_which_files_are_the_checkpoints(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    save_file({"w": np.ones((4, 4), np.float32)}, source / "diffusion-00001-of-00001.safetensors")
    save_file({"stale": np.ones((4, 4), np.float32)}, source / "older.safetensors")
    index = {"metadata": {}, "weight_map": {"w": "diffusion-00001-of-00001.safetensors"}}
    (source / "diffusion.safetensors.index.json").write_text(json.dumps(index))
    made = stamp_safetensors(source, tmp_path / "copy")
    assert set(made.fills) == {"w"}
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "diffusion-00001-of-00001.safetensors",
        "diffusion.safetensors.index.json",
    ]
