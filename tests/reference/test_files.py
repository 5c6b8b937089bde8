"""References on disk: read as they are written, refused in one line where they are damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.checkpoint.formats.headers import INDEX
from shardviz.errors import DumpError
from shardviz.reference.files import open_reference


def written(path, **tensors):
    save_file({name: np.asarray(value) for name, value in tensors.items()}, path)
    return path


def test_bits_are_those_of_the_file(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    found = open_reference(
        written(tmp_path / "a.safetensors", w=values, n=np.float32(2.0), e=np.empty((0, 3), np.int8))
    )
    assert np.array_equal(found.entries["w"].bits, values.view(np.uint32))
    assert found.entries["w"].dtype == "float32"
    assert found.entries["n"].bits.shape == ()
    assert found.entries["e"].bits.shape == (0, 3)


def test_a_folder_is_one_reference(tmp_path):
    written(tmp_path / "a.safetensors", w=np.zeros(2))
    written(tmp_path / "b.safetensors", v=np.zeros(2))
    assert set(open_reference(tmp_path).entries) == {"w", "v"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"w": "a.safetensors"}}))
    assert set(open_reference(tmp_path).entries) == {"w"}


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ("w", "w"),
        ("module.w", "w"),
        ("w", "model.w"),
        ("_orig_mod.w", "w"),
    ],
)
def test_a_wrappers_prefix_is_no_obstacle(tmp_path, asked, stored):
    assert open_reference(written(tmp_path / "a.safetensors", **{stored: np.zeros(2)})).find(asked) is not None


def test_a_name_that_is_not_there_is_not_found(tmp_path):
    reference = open_reference(written(tmp_path / "a.safetensors", **{"a.w": np.zeros(2)}))
    assert reference.find("w") is None
    assert reference.find("b.w") is None


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[:4], "is cut short: it has 4 of the 8 bytes that say how long its header is"),
        (lambda data: data[:8], "is cut short: it has 0 of the [0-9]+ bytes of its header"),
        (lambda data: data[:9], "is cut short: it has 1 of the [0-9]+ bytes of its header"),
        (lambda data: b"\xff" * 8, "is not a safetensors file"),
        (lambda data: bytes(8), "is not a safetensors file"),
        (lambda data: data[:20], "is cut short: it has 12 of the [0-9]+ bytes of its header"),
        (lambda data: b"\xff" * 8 + data[8:], "is not a safetensors file"),
        (lambda data: data[:-3], "in bytes 0 to 24 of 21"),
        (lambda data: data.replace(b'"w"', b"\xff\xff\xff"), "is damaged"),
        (lambda data: data.replace(b"[2,3]", b"[2,4]"), "in bytes 0 to 24 of 24"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, spoil, told):
    path = written(tmp_path / "a.safetensors", w=np.zeros((2, 3), np.float32))
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DumpError, match=told) as caught:
        open_reference(path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["ab", "a note\n", "abcdefgh", '{"a": 1}\n'])
def test_a_short_file_of_another_kind_is_not_called_cut_short(tmp_path, text):
    (tmp_path / "notes.txt").write_text(text)
    with pytest.raises(DumpError, match="is not a safetensors file"):
        open_reference(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({"weight_map": {"w": "../a.safetensors"}}, "outside its folder"),
        ({"weight_map": {"w": "b.safetensors"}}, "lacks b.safetensors"),
        ({"weights": {}}, "is damaged"),
    ],
)
def test_an_index_never_leads_out_of_its_folder(tmp_path, index, told):
    written(tmp_path / "a.safetensors", w=np.zeros(2))
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(DumpError, match=told):
        open_reference(tmp_path)


def test_what_is_missing_is_reported(tmp_path):
    with pytest.raises(DumpError, match="does not exist"):
        open_reference(tmp_path / "none.safetensors")
    with pytest.raises(DumpError, match=r"has no \.safetensors file"):
        open_reference(tmp_path)
