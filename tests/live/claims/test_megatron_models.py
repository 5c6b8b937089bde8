"""Whole models of Megatron-core under their own groups: right loaders are quiet, wrong ones are named."""

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn

import shardviz
from shardviz.check.run import check_dump
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.notation import write
from shardviz.live.claims.registry import local_tensors
from shardviz.testing import spmd
from tests.lanes import nightly

pytestmark = nightly
LAYER = "decoder.layers.0"
FC1, QKV, EMBED = f"{LAYER}.mlp.linear_fc1.weight", f"{LAYER}.self_attention.linear_qkv.weight", "output_layer.weight"


def gpt(tp=1, ep=1):
    """Build one layer of Megatron's GPT with gated MLPs and grouped queries, or with experts."""
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[frameworks]'")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1 if ep > 1 else None
    )
    experts = {"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather", "add_bias_linear": False}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        gated_linear_unit=True,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        **(experts if ep > 1 else {}),
    )
    spec = get_gpt_layer_local_spec(num_experts=4 if ep > 1 else None)
    return GPTModel(config, spec, vocab_size=40, max_sequence_length=8, position_embedding_type="rope")


class Own(nn.Module):
    """A module that cuts its weight by itself, and says so in `sharded_state_dict` only."""

    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 16))
        self.rank = rank

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        from megatron.core.dist_checkpointing import ShardedTensor

        key = f"{prefix}weight"
        return {key: ShardedTensor.from_rank_offsets(key, self.weight, (0, self.rank, 2), replica_id=0)}


def loaded(model, load, folder):
    """Load each weight's own part of random whole ones, as a loader does; return the file that has them."""
    placed = {one.name: one for one in local_tensors(model)}
    generator = torch.Generator().manual_seed(0)
    shapes = [dict.fromkeys(placed)] * distributed.get_world_size()
    distributed.all_gather_object(shapes, {name: one.shape for name, one in placed.items()})
    shapes = {name: shape for of_rank in shapes for name, shape in of_rank.items()}
    wholes = {name: torch.randn(shapes[name], generator=generator) for name in sorted(shapes)}
    for name, one in placed.items():
        with torch.no_grad():
            one.values.copy_(load(name, one, wholes[name]))
    path = folder.with_name("whole.safetensors")
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(wholes, path)
    distributed.barrier()
    return path


def right(name, one, whole):
    """Cut a weight as its placement says, with plain chunks."""
    split = next((one for one in (one.claim[1] if one.claim else ()) if hasattr(one, "dim")), None)
    if split is None:
        return whole
    segments = whole.chunk(getattr(split, "split_factor", 1), split.dim)
    return torch.cat([segment.chunk(2, split.dim)[distributed.get_rank()] for segment in segments], split.dim)


def without_stride(name, one, whole):
    return whole.chunk(2)[distributed.get_rank()] if name == FC1 else right(name, one, whole)


def shifted(name, one, whole):
    return whole.roll(-4, 0).chunk(2)[distributed.get_rank()] if name == EMBED else right(name, one, whole)


def three_matrices(name, one, whole):
    """Put q, k and v one behind the other, as Hugging Face has them: Megatron has them in groups of queries."""
    if name != QKV:
        return right(name, one, whole)
    groups = whole.view(2, 4, 4, 16)
    fused = torch.cat([groups[:, :2].reshape(-1, 16), groups[:, 2].reshape(-1, 16), groups[:, 3].reshape(-1, 16)])
    return fused.chunk(2)[distributed.get_rank()]


def report_of(model, load, folder):
    path = loaded(model, load, folder)
    shardviz.capture(model, folder, reference=path)
    return check_dump(folder)


def found_in(report):
    return {(one.kind, one.tensor) for finding in report.findings for one in finding.each}


def claims_in(folder):
    tensors = dump_of(read_files(folder)).at("stamped")
    return {name: write(tensor.claimed) for tensor in tensors for name in tensor.names if tensor.claimed}


@spmd(mesh={"tp": 2})
def test_a_gated_model_with_grouped_queries_is_in_order(mesh, shard_dump):
    report = report_of(gpt(2), right, shard_dump)
    assert (report.findings, report.not_checked) == ((), ())
    claims = claims_in(shard_dump)
    assert claims[FC1] == "[48/2/tp, 16]"
    assert claims[QKV] == "[32/tp, 16]"
    assert claims[f"{LAYER}.input_layernorm.weight"] == "[16]"


@pytest.mark.parametrize(
    ("load", "name", "held"),
    [(without_stride, FC1, "[48/tp, 16]"), (shifted, EMBED, ""), (three_matrices, QKV, "")],
)
@spmd(mesh={"tp": 2})
def test_a_loader_that_orders_a_weight_in_another_way_is_named(mesh, shard_dump, load, name, held):
    report = report_of(gpt(2), load, shard_dump)
    assert found_in(report) == {("misordered", name)}
    assert held in report.findings[0].held
    assert report.findings[0].fix


@spmd(mesh={"ep": 2})
def test_experts_are_told_apart_by_their_global_numbers(mesh, shard_dump):
    report = report_of(gpt(ep=2), right, shard_dump)
    assert (report.findings, report.not_checked) == ((), ())
    assert len([name for name in claims_in(shard_dump) if "local_experts" in name]) == 8


@spmd(mesh={"ep": 2})
def test_an_expert_on_the_wrong_rank_is_named(mesh, shard_dump):
    model = gpt(ep=2)
    path = loaded(model, right, shard_dump)
    with torch.no_grad():  # a loader that numbers experts from 0 on every rank
        experts = model.decoder.layers[0].mlp.experts.local_experts
        for param in experts.parameters():
            distributed.broadcast(param.data, 0)
    shardviz.capture(model, shard_dump, reference=path)
    found = check_dump(shard_dump).findings
    names = {f"{LAYER}.mlp.experts.local_experts.{number}.linear_fc{fc}.weight" for number in (2, 3) for fc in (1, 2)}
    assert {name for one in found for name in one.tensors} == names
    assert {one.kind for one in found} == {"foreign"}
    assert any(f"hold {LAYER}.mlp.experts.local_experts.0.linear_fc" in one.sentence for one in found)


@spmd(mesh={"tp": 2})
def test_a_weight_that_only_sharded_state_dict_knows_to_be_split(mesh, shard_dump):
    gpt(2)
    rank = distributed.get_rank()
    model = nn.ModuleDict({"own": Own(rank)})
    report = report_of(model, right, shard_dump)
    assert (report.findings, report.not_checked) == ((), ())
    assert claims_in(shard_dump) == {"own.weight": "[24/tp, 16]"}
    shardviz.capture(model, shard_dump, reference=loaded(model, backwards, shard_dump), force=True)
    assert found_in(check_dump(shard_dump)) == {("misordered", "own.weight")}


def backwards(name, one, whole):
    return whole.chunk(2)[1 - distributed.get_rank()]


@spmd(mesh={"tp": 2})
def test_norms_of_sequence_parallel_ranks_that_differ_are_named(mesh, shard_dump):
    model = gpt(2)
    name = f"{LAYER}.input_layernorm.weight"
    norm = model.get_parameter(name)
    norm.sequence_parallel = True
    with torch.no_grad():
        norm.copy_(torch.randn(16) + distributed.get_rank())
    shardviz.capture(model, shard_dump)
    assert found_in(check_dump(shard_dump)) >= {("unreplicated", name)}
