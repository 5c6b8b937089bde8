"""A checkpoint with a damaged file beside a whole one: a line a file, and a difference."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import save_file

from shardviz.cli import main
from tests.checkpoint.maps import weight

FILES = {"cut": "ends at byte 2,000, before the end", "gone": "does not exist", "garbage": "is damaged, or is not"}


def damaged(path, how):
    if how == "cut":
        with path.open("r+b") as file:
            file.truncate(2000)
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"\0" * path.stat().st_size)


@pytest.mark.parametrize("how", FILES)
@pytest.mark.parametrize("turned", [False, True])
def test_a_damaged_file_of_a_dcp_folder_is_one_difference(saved, copied, capsys, how, turned):
    folder = copied("dcp")
    damaged(folder / "__1_0.distcp", how)
    sides = [str(saved / "dcp"), str(folder)][:: -1 if turned else 1]
    assert main(["diff", *sides]) == 1
    out = capsys.readouterr().out
    assert out.count("≠ unreadable") == 1
    assert f"__1_0.distcp {FILES[how]}" in " ".join(out.split())
    assert main(["diff", *sides, "--format", "json"]) == 1
    odd = [one for one in json.loads(capsys.readouterr().out)["tensors"] if one["verdict"] == "unreadable"]
    assert {one["cause_id"] for one in odd} == {"unreadable-file"}
    assert main(["diff", str(saved / "dcp"), str(saved / "dcp"), "--strict"]) == 0


def test_a_job_is_not_equal_to_a_damaged_checkpoint(saved, copied, capsys):
    folder = copied("dcp")
    damaged(folder / "__1_0.distcp", "cut")
    rules = ["--map", str(folder.parent / "names.map")]
    (folder.parent / "names.map").write_text("* = app.model.*\n")
    assert main(["diff", str(saved / "job.shardviz"), str(saved / "dcp"), *rules]) == 0
    assert main(["diff", str(saved / "job.shardviz"), str(folder), *rules]) == 1
    assert "≠ unreadable" in capsys.readouterr().out


@pytest.mark.parametrize("turned", [False, True])
def test_tensors_of_a_file_that_only_the_index_has_are_unreadable(tmp_path, capsys, turned):
    tensors = {name: weight(4, 4, seed=at) for at, name in enumerate("abc")}
    save_file(tensors, tmp_path / "whole.safetensors")
    folder = tmp_path / "parts"
    folder.mkdir()
    files = {name: f"model-{name}.safetensors" for name in tensors}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    sides = [str(tmp_path / "whole.safetensors"), str(folder)][:: -1 if turned else 1]
    assert main(["diff", *sides]) == 0
    (folder / files["b"]).unlink()
    assert main(["diff", *sides]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "≠ unreadable b" in out
    assert "model-b.safetensors does not exist, and the index says that it is there" in out
