"""Checkpoints are read offline as torch reads them: every bit, any part of a tensor, any format."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.layout.region import Region
from tests.checkpoint.saving import FORMATS, HAS_HF


def bits(tensor):
    return (
        tensor.contiguous().view(-1).view(torch.uint8).numpy().view(f"u{tensor.element_size()}").reshape(tensor.shape)
    )


@pytest.mark.parametrize("name", ["dcp", "flat"])
def test_every_tensor_is_that_which_torch_loads(saved, name):
    found = open_checkpoint(saved / name)
    wanted = {one.name: torch.empty(one.shape, dtype=getattr(torch, one.dtype)) for one in found.tensors.values()}
    dcp.load(wanted, checkpoint_id=saved / name)
    assert len(found.tensors) == 16
    for one, tensor in wanted.items():
        assert np.array_equal(found.tensors[one].bits, bits(tensor)), one


def test_formats_agree(saved):
    whole = open_checkpoint(saved / "whole")
    for name, before in (("dcp", "app.model."), ("flat", "model."), ("hf", "")):
        if name not in FORMATS:
            continue
        found = open_checkpoint(saved / name)
        for one in whole.tensors:
            assert np.array_equal(found.tensors[before + one].bits, whole.tensors[one].bits)
            assert len(found.tensors[before + one].chunks) in (2, 4)


REGIONS = [
    (((0, 24),), ((0, 16),)),
    (((3, 19),), ((5, 6),)),
    (((20, 24), (1, 2), (5, 8)), ((0, 3), (10, 16))),
    ((), ((0, 16),)),
]


@pytest.mark.parametrize("dims", REGIONS, ids=str)
def test_a_part_is_that_of_the_whole(saved, dims):
    one = open_checkpoint(saved / "dcp").tensors["app.model.0.weight"]
    rows, columns = ([at for start, stop in ranges for at in range(start, stop)] for ranges in dims)
    assert np.array_equal(one.read(Region(dims)), one.bits[np.ix_(rows, columns)])


def test_views_and_odd_types_are_read(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "transposed": torch.randn(6, 4).t(),
        "half": torch.randn(5).bfloat16(),
        "flags": torch.rand(7) > 0.5,
        "whole": torch.arange(5),
        "small": torch.randn(4).to(torch.float8_e4m3fn),
        "unsigned": torch.arange(4).to(torch.uint16),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    dcp.save(tensors, checkpoint_id=tmp_path / "ckpt")
    found = open_checkpoint(tmp_path / "ckpt")
    for name, tensor in tensors.items():
        assert np.array_equal(found.tensors[name].bits, bits(tensor.detach())), name


def test_plans_in_the_metadata_are_no_obstacle(edited, saved):
    """Megatron's dist-checkpointing keeps them there."""

    def add_plans(metadata):
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size([0]), torch.Size([2])), TensorProperties(), torch.Size([2])
        )
        item = WriteItem(MetadataIndex("w", [0]), WriteItemType.SHARD, tensor_data=data)
        metadata.all_local_plans = [SavePlan([item])]

    assert open_checkpoint(edited(add_plans)).tensors.keys() == open_checkpoint(saved / "dcp").tensors.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_told_from_a_dump(saved, name, tmp_path):
    assert is_checkpoint(saved / name)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "rank_00000.safetensors").write_bytes(b"")
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "none")


def test_no_verb_imports_torch_for_a_checkpoint(saved):
    code = (
        "import sys; from shardviz.cli import main\n"
        "one, other = sys.argv[1:]\n"
        "for words in (['check', one], ['show', one], ['view', one], ['diff', one, other]):\n"
        "    assert main(words) == 0, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    command = [sys.executable, "-c", code, saved / "dcp", saved / ("hf" if HAS_HF else "whole")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
