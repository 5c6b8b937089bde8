"""Real checkpoints: written once by torch on real ranks, copied for tests that damage them."""

from __future__ import annotations

import json
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed import checkpoint as dcp

from shardviz.live.world import launch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COORDS = [f"fsdp={rank // 2}, tp={rank % 2}" for rank in range(4)]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `saving.save`."""
    folder = tmp_path_factory.mktemp("saved")
    launch("tests.checkpoint.saving:save", (str(folder),), num_ranks=4, coords=COORDS)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy one of the formats, to change it."""

    def copy(name: str) -> Path:
        return shutil.copytree(saved / name, tmp_path / name)

    return copy


@pytest.fixture
def edited(copied: Callable[[str], Path]) -> Callable[..., Path]:
    """Copy a DCP folder and change its metadata, with torch's own classes."""

    def edit(change: Callable[[Any], object], name: str = "dcp") -> Path:
        folder = copied(name)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return folder

    return edit


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A DCP folder, and a Hugging Face folder with an index, of a few tensors."""
    root = tmp_path_factory.mktemp("small")
    model = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.arange(3).bfloat16()}
    states = {"w": {"exp_avg": torch.ones(4, 6), "step": torch.tensor(1.0)}}
    parts = {"model": model, "optim": {"state": states, "param_groups": [{"params": ["w"], "lr": 0.1}]}}
    dcp.save(parts, checkpoint_id=root / "dcp")
    (root / "hf").mkdir()
    for name in "ab":
        save_file({name: np.arange(12.0).reshape(3, 4)}, root / "hf" / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in "ab"}}
    (root / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    return root
