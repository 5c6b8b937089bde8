"""What a checkpoint's metadata shows: healthy ones are quiet, and each fault has its finding."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

from shardviz.check.report import ungrouped
from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from shardviz.picture.text.checkpoint import total


def found(path):
    report = check_checkpoint(open_checkpoint(path))
    return [(one.kind, one.tensor, one.sentence) for one in ungrouped(report.findings)]


# Chunks


# Files


def indexed(folder, weight_map, **files):
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file({one: np.arange(4.0) + at for at, one in enumerate(tensors)}, folder / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{file}.safetensors" for name, file in weight_map.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_an_index_and_its_files_that_disagree_are_found(tmp_path):
    folder = indexed(tmp_path, {"v": "a", "w": "b", "gone": "b", "lost": "c"}, a=["v", "w"], b=["extra"])
    texts = {tensor: text for _, tensor, text in found(folder)}
    assert texts["lost"].endswith("c.safetensors is missing: 1 entry in it cannot be read")
    assert "the index says that it is in b.safetensors, but a.safetensors has it" in texts["w"]
    assert "no file has it" in texts["gone"]
    assert "the index does not name it" in texts["extra"]
    assert "v" not in texts


def test_tensors_of_a_missing_file_are_named_and_counted(tmp_path):
    layers = {f"layers.{number}.w": "a" if number < 10 else "b" for number in range(40)}
    folder = indexed(tmp_path, layers, a=list(layers)[:10], b=list(layers)[10:])
    whole = open_checkpoint(folder)
    assert check_checkpoint(whole).num_tensors == 40
    assert "40 tensors" in total(whole)
    (folder / "b.safetensors").unlink()
    lacking = open_checkpoint(folder)
    (finding,) = check_checkpoint(lacking).findings
    assert (finding.title, len(finding.tensors)) == ("layers.[10-39].w", 30)
    assert check_checkpoint(lacking).num_tensors == 40
    assert "10 of 40 tensors" in total(lacking)


# Ties


# Optimizer state


# The bytes of a safetensors file


def with_header(path, header, size=96):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


def entry(begin, end, shape=(4, 6), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_an_element_type_that_nobody_knows_is_not_checked(tmp_path, capsys):
    path = with_header(tmp_path / "m.safetensors", {"w": entry(0, 96, dtype="Q4\x1b[31m"), "v": entry(96, 192)}, 192)
    (one,) = check_checkpoint(open_checkpoint(path)).not_checked
    assert one.tensor == "w"
    assert "dtype q4\\u001b[31m is not known here" in one.why
    assert main(["check", str(path), "--strict"]) == 1
    assert main(["show", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


# Types that are not read
