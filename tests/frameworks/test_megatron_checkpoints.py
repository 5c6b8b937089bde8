"""Megatron's torch_dist folders with an optimizer: moments by parameter, or buckets that nothing is claimed of."""

import numpy as np
import pytest
import torch

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.open import open_checkpoint
from shardviz.checkpoint.optimizer import is_bucket, state_of
from shardviz.testing import spmd
from tests.frameworks.megatron_checkpoints import BETAS, saved
from tests.lanes import nightly

pytestmark = nightly
WHOLE = {"decoder.final_layernorm.weight", "embedding.word_embeddings.weight", "output_layer.weight"}


@spmd(mesh={"dp": 2}, timeout=300)
def test_moments_are_read_by_parameter(mesh, shard_dump):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[frameworks]'")
    folder = shard_dump.with_name("megatron")
    gradients = saved(folder, "fully_reshardable")
    found = open_checkpoint(folder)
    report = check_checkpoint(found)
    assert report.findings == ()
    assert [one.why[:25] for one in report.not_checked] == ["files next to the weights"]
    states = {state_of(name): one for name, one in found.tensors.items() if state_of(name)}
    assert {key for _, key in states} == {"exp_avg", "exp_avg_sq", "param"}
    for name in WHOLE:
        grad = gradients[name].numpy()
        moment = states[name, "exp_avg"].bits.view("f4")
        assert np.allclose(moment, (1 - BETAS[0]) * grad, rtol=1e-5), name
        weight = torch.from_numpy(states[name, "param"].bits.view("f4").copy()).bfloat16()
        assert np.array_equal(weight.view(torch.int16).numpy().view("u2"), found.tensors[name].bits), name


@pytest.mark.parametrize("sharding", ["dp_reshardable", "dp_zero_gather_scatter"])
@spmd(mesh={"dp": 2}, timeout=300)
def test_buckets_are_not_compared_with_states_by_parameter(mesh, shard_dump, sharding):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[frameworks]'")
    folders = [shard_dump.with_name(name) for name in ("fully_reshardable", sharding)]
    for folder in folders:
        saved(folder, folder.name)
    named, bucketed = map(open_checkpoint, folders)
    assert any(map(is_bucket, (*bucketed.tensors, *bucketed.objects)))
    report = check_checkpoint(bucketed)
    assert report.findings == ()
    assert any("they do not say which parameter an element is of" in one.why for one in report.not_checked)
    comparison = compare_checkpoints(named, bucketed)
    assert not comparison.differs
    assert comparison.compared == sum(state_of(name) is None for name in named.tensors)
    assert any("optimizer state" in note for note in comparison.notes)
