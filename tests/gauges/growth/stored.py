"""Checkpoints of any size, and plans of any number of ranks."""

from __future__ import annotations

import io
import json
import pickle
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from shardviz.layout.mesh import Mesh, parse_mesh
from tests.gauges.growth.dumps import weights_of_job
from tests.plans import make_plan, shifted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Values = NDArray[np.floating]

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm")
FILES = 4


def chunks(path: Path, num: int) -> None:
    """Write a checkpoint of torch.distributed.checkpoint whose only tensor has many chunks, in a few files."""
    _chunks(path, num, lambda at: at)


def chunks_apart(path: Path, num: int) -> None:
    """Write such a checkpoint in which every fourth chunk stands where the one before stands."""
    _chunks(path, num, lambda at: at - (at % 4 == 3))


def _chunks(path: Path, num: int, place: Callable[[int], int]) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    path.mkdir(exist_ok=True)
    stored = io.BytesIO()
    torch.save(torch.ones(2, 4), stored)
    content = stored.getvalue()
    parts, info = [], {}
    for at in range(num):
        offsets = torch.Size([2 * place(at), 0])
        parts.append(ChunkStorageMetadata(offsets, torch.Size([2, 4])))
        start = len(content) * (at // FILES)
        info[MetadataIndex("weight", offsets, at)] = _StorageInfo(f"__{at % FILES}_0.distcp", start, len(content))
    for number in range(FILES):
        (path / f"__{number}_0.distcp").write_bytes(content * len(range(number, num, FILES)))
    whole = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2 * num, 4]), parts)
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({"weight": whole}, storage_data=info)))


def files(path: Path, num: int) -> None:
    """Write a Hugging Face folder of many files."""
    path.mkdir(exist_ok=True)
    names: dict[str, str] = {}
    for at in range(num):
        file = f"model-{at + 1:05}-of-{num:05}.safetensors"
        tensors = {f"layers.{at}.{part}.weight": np.full((2, 4), at, np.float32) for part in PARTS}
        save_file(tensors, path / file)
        names |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def keys(path: Path, num: int) -> None:
    """Write a checkpoint of one file with many keys."""
    _save(path, {_name(at): _weight(at) for at in range(num)})


def keys_renamed(path: Path, num: int) -> None:
    """Write the same tensors, every other one under a name that has nothing in common with its first."""
    _save(path, {_other_name(at) if at % 2 else _name(at): _weight(at) for at in range(num)})


def keys_changed(path: Path, num: int) -> None:
    """Write tensors under the same names, with other values in all of them."""
    _save(path, {_name(at): _weight(at + 7 * num) for at in range(num)})


def keys_exchanged(path: Path, num: int) -> None:
    """Write tensors each of which has the values of the next key."""
    _save(path, {_name(at): _weight((at + 1) % num) for at in range(num)})


def keys_scaled(path: Path, num: int) -> None:
    """Write tensors each of which is a half of what it was."""
    _save(path, {_name(at): _weight(at) / 2 for at in range(num)})


def keys_gone(path: Path, num: int) -> None:
    """Write tensors of which every other one has another name and other values."""
    _save(path, {_other_name(at) if at % 2 else _name(at): _weight(at + 7 * num * (at % 2)) for at in range(num)})


def keys_of_job(path: Path, num: int) -> None:
    """Write the checkpoint of `dumps.job`, half of it trained further."""
    weights = weights_of_job(num)
    _save(path, {name: weight + (at % 2) for at, (name, weight) in enumerate(weights.items())})


def _name(at: int) -> str:
    return f"layers.{at // 8}.{PARTS[at % 8]}.weight"


def _other_name(at: int) -> str:
    return f"h{at % 8}/blocks_{at // 8}"


def _save(path: Path, tensors: Mapping[str, Values]) -> None:
    path.mkdir(exist_ok=True)
    save_file(dict(tensors), path / "model.safetensors")


def _weight(seed: int) -> Values:
    return np.random.default_rng(seed).normal(size=(8, 8)).astype(np.float32)


def planned_ranks(path: Path, num: int) -> None:
    """Write a plan of a small model on many ranks."""
    mesh = parse_mesh(f"fsdp={num // 8},tp=8")
    size = 8 * num
    parts = {"up": f"[{size}/tp/fsdp, 64]", "down": f"[{size}/fsdp, 64/tp]", "norm": f"[{size}/fsdp]"}
    make_plan(path, mesh, [{f"layers.{at}.{one}.weight": (parts[one], mesh) for at in range(8) for one in parts}])


def planned_stages(path: Path, num: int) -> None:
    """Write a plan of a pipeline with many stages."""
    stage = Mesh(("tp",), (4,))
    on = [shifted(stage, 4 * at) for at in range(num)]
    stages = [
        {f"layers.{at}.{part}.weight": ("[64/tp, 64]", mesh) for part in ("up", "down", "gate")}
        for at, mesh in enumerate(on)
    ]
    make_plan(path, Mesh(("pp", "tp"), (num, 4)), stages)
