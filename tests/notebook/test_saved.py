"""A checkpoint and a plan are loaded as a dump is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardviz
from shardviz.errors import DumpError
from shardviz.layout.mesh import parse_mesh
from tests.plans import make_plan

if TYPE_CHECKING:
    from pathlib import Path

MESH = parse_mesh("fsdp=2,tp=2")
WHOLE = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_a_checkpoint_has_its_tensors_by_name(tmp_path: Path) -> None:
    save_file({"layers.0.w": WHOLE, "norm": WHOLE[0].astype(np.float16)}, tmp_path / "model.safetensors")
    run = shardviz.load(tmp_path / "model.safetensors")
    assert repr(run) == "<Checkpoint model.safetensors: 2 tensors, safetensors>"
    w = run["w"]
    assert (w.name, w.shape, w.dtype, w.layout, w.files) == (
        "layers.0.w",
        (3, 4),
        "float32",
        "[3, 4]",
        ("model.safetensors",),
    )
    assert (w.mesh, w.claimed, w.placements) == (None, None, None)
    assert repr(w.held) == "{0: [0:3, 0:4]}"
    assert np.array_equal(w.full(), WHOLE)
    assert np.array_equal(w.shards[0], WHOLE)
    assert run["norm"].full().dtype == np.float16
    assert run.check().clean
    assert w.svg().startswith("<svg")
    with pytest.raises(KeyError, match="did you mean norm"):
        run["nrom"]
    with pytest.raises(AttributeError, match=r"a checkpoint's tensor has no \.held_layout: only tensors of a dump"):
        w.held_layout  # noqa: B018
    with pytest.raises(AttributeError, match="'SavedTensor' object has no attribute 'heldlayout'"):
        w.heldlayout  # noqa: B018


def test_show_takes_a_checkpoints_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"up.weight": np.zeros((4, 3), np.float32)}, tmp_path / "model.safetensors")
    shardviz.show(tmp_path / "model.safetensors")
    assert "up.weight" in capsys.readouterr().out
    shardviz.show(str(tmp_path / "model.safetensors"), "up.weight")
    assert "float32[4, 3]" in capsys.readouterr().out
    with pytest.raises(DumpError, match="does not exist"):
        shardviz.show(tmp_path / "nothing")


def test_a_checkpoint_that_is_cut_short_says_which_bytes_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": WHOLE}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DumpError, match=r"model\.safetensors"):
        shardviz.load(path)["w"].full()


def test_a_plan_has_layouts_and_says_that_it_has_no_values(tmp_path: Path) -> None:
    run = shardviz.load(make_plan(tmp_path / "p.shardviz", MESH, [{"w": ("[8/tp, 3]", MESH)}]))
    assert repr(run) == "<Plan p.shardviz: 1 tensor on 4 ranks, mesh (fsdp=2, tp=2)>"
    assert (run["w"].layout, run["w"].held) == ("[8/tp, 3]", {})
    with pytest.raises(DumpError, match="w: a plan has no values"):
        run["w"].full()
