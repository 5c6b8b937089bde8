"""Megatron-core's layers are born sharded, with plain weights: their attributes are the claim."""

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn

import shardviz
from shardviz.check.run import check_dump
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.notation import write
from shardviz.testing import spmd
from tests.lanes import nightly

pytestmark = nightly
SIZES = {"embed.weight": (32, 16), "up.weight": (48, 16), "up.bias": (48,), "down.weight": (16, 48), "down.bias": (16,)}
SPLIT = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}


@pytest.fixture(autouse=True)
def _needs_megatron():
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[frameworks]'")


def wholes():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SIZES.items()}


def saved(folder):
    path = folder.with_name("checkpoint.safetensors")
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(wholes(), path)
    distributed.barrier()
    return path


def built(tp, stride=1, shifted=False):
    """Build Megatron's layers under its own groups, and load the weights as a right loader does, or one rank off."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, tensor_model_parallel_size=tp
    )
    options = {"config": config, "init_method": nn.init.zeros_}
    model = nn.ModuleDict(
        {
            "embed": tensor_parallel.VocabParallelEmbedding(32, 16, **options),
            "up": tensor_parallel.ColumnParallelLinear(16, 48, gather_output=False, stride=stride, **options),
            "down": tensor_parallel.RowParallelLinear(
                48, 16, input_is_parallel=True, bias=True, skip_bias_add=False, **options
            ),
        }
    )
    mine = (parallel_state.get_tensor_model_parallel_rank() + shifted) % tp
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole, dim = wholes()[name], SPLIT.get(name)
            if dim is not None:
                cut = stride if name.startswith("up") else 1
                whole = torch.cat([piece.chunk(tp, dim)[mine] for piece in whole.chunk(cut, dim)], dim)
            param.copy_(whole)
    return model


@pytest.mark.parametrize("stride", [1, 2])
@spmd(mesh={"dp": 2, "tp": 2})
def test_split_weights_are_in_order_on_the_mesh_of_parallel_state(mesh, shard_dump, stride):
    shardviz.capture(built(2, stride), shard_dump, reference=saved(shard_dump))
    report = check_dump(shard_dump)
    assert (report.findings, report.not_checked) == ((), ())
    layouts = {name: text.split("]")[0] for name, text in layouts_in(shard_dump).items()}
    assert layouts["up.weight"] == ("[48/tp, 16" if stride == 1 else "[48/2/tp, 16")
    assert layouts["down.weight"] == "[16, 48/tp"


def layouts_in(folder):
    tensors = dump_of(read_files(folder)).at("initial")
    return {name: write(tensor.claimed) for tensor in tensors for name in tensor.names if tensor.claimed}


@spmd(mesh={"dp": 2, "tp": 2})
def test_copies_without_a_reference_are_compared_along_dp_only(mesh, shard_dump):
    shardviz.capture(built(2), shard_dump)
    assert check_dump(shard_dump).findings == ()
    model = built(2)
    with torch.no_grad():
        model["up"].weight += distributed.get_rank() // 2
    shardviz.capture(model, shard_dump, force=True)
    assert [(one.kind, one.tensor) for one in check_dump(shard_dump).findings] == [("unreplicated", "up.weight")]


@spmd(mesh={"tp": 2})
def test_weights_that_were_loaded_one_rank_off_are_named(mesh, shard_dump):
    shardviz.capture(built(2, shifted=True), shard_dump, reference=saved(shard_dump))
    found = {(one.kind, name) for one in check_dump(shard_dump).findings for name in one.tensors}
    assert found == {("misordered", name) for name in SPLIT}
