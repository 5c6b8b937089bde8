"""Master copies and moments in DeepSpeed's flat buffers: right jobs are quiet, and every harm to them is named."""

import os
from contextlib import contextmanager

import pytest
import torch
from torch import distributed, nn

import shardviz
from shardviz.check.run import check_dump
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.testing import spmd
from tests.lanes import nightly

pytestmark = nightly
WEIGHTS = ("0.weight", "2.weight")


def built():
    """A net of odd sizes with a frozen weight and a tied one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 15), nn.ReLU(), nn.Linear(15, 13), nn.Linear(13, 17), nn.Linear(17, 15))
    model[3].weight.requires_grad = False
    model[4].weight = model[0].weight
    return model


def engine_of(stage, dtype="fp32", steps=2, **zero):
    """Return DeepSpeed's engine with two groups of parameters, after some steps."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["DEEPSPEED_DISABLE_SHM"] = "1"
    os.environ.setdefault("LOCAL_RANK", str(distributed.get_rank()))
    deepspeed = pytest.importorskip("deepspeed", reason="needs deepspeed: pip install -e '.[frameworks]'")
    deepspeed.init_distributed("gloo")
    model = built()
    params = [one for one in model.parameters() if one.requires_grad]
    groups = [{"params": [one for one in params if (one.ndim > 1) is wide]} for wide in (True, False)]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
    for _ in range(steps):
        loss = engine(torch.randn(2, 17).to(next(engine.module.parameters()).dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
    return engine


def buffers(engine):
    optimizer = engine.optimizer
    return getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_partitioned_groups_flat


def report_of(engine, folder):
    shardviz.capture(engine, folder)
    return check_dump(folder)


def found_in(report):
    return {(one.kind, one.tensor) for finding in report.findings for one in finding.each}


def about(names, kind):
    return {(kind, f"{name}.fp32") for name in names}


@contextmanager
def fragments(engine, rank):
    """Yield the parameters that have a fragment on one rank, with it; nothing on the others."""
    linked = [one for one in engine.module.parameters() if getattr(one, "_hp_mapping", None) is not None]
    yield [(one, one._hp_mapping) for one in linked] if distributed.get_rank() == rank else []


def masters_in(folder):
    dump = dump_of(read_files(folder))
    return {name for tensor in dump.at("stamped") for name in tensor.names if tensor.role == "optim"}


def quiet(stage, dtype, folder, **zero):
    report = report_of(engine_of(stage, dtype, **zero), folder)
    assert report.findings == ()
    masters = masters_in(folder)
    assert masters == {f"{name}.fp32" for name in (*WEIGHTS, "0.bias", "2.bias", "3.bias", "4.bias")}
    assert not masters & {one.tensor for one in report.not_checked}
    states = {name for tensor in dump_of(read_files(folder)).at("initial") for name in tensor.names}
    assert {f"{name}.{kind}" for name in WEIGHTS for kind in ("exp_avg", "exp_avg_sq")} <= states


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(mesh={"dp": 2})
def test_masters_of_two_ranks_are_their_weights(mesh, shard_dump, stage, dtype):
    quiet(stage, dtype, shard_dump)


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(mesh={"dp": 4})
def test_masters_of_four_ranks_are_their_weights(mesh, shard_dump, stage):
    quiet(stage, "bf16", shard_dump)


@spmd(mesh={"dp": 2})
def test_offloaded_masters_are_their_weights(mesh, shard_dump):
    quiet(2, "fp32", shard_dump, offload_optimizer={"device": "cpu"})


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(mesh={"dp": 2})
def test_exchanged_buffers_are_named(mesh, shard_dump, stage):
    engine = engine_of(stage)
    flat = buffers(engine)[0].detach()
    both = [torch.empty_like(flat) for _ in range(2)]
    distributed.all_gather(both, flat.clone())
    flat.copy_(both[1 - distributed.get_rank()])
    report = report_of(engine, shard_dump)
    assert found_in(report) == about(WEIGHTS, "misordered")
    assert all("zero_pp_rank" in one.fix for one in report.findings)


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(mesh={"dp": 2})
def test_weights_loaded_past_the_masters_are_named(mesh, shard_dump, stage):
    engine = engine_of(stage, "bf16")
    if distributed.get_rank() == 1:
        buffers(engine)[0].data.normal_()
    report = report_of(engine, shard_dump)
    assert found_in(report) == about(WEIGHTS, "foreign")
    assert {one.ranks for one in report.findings} == {(1,)}
    assert all("refresh_fp32_params" in one.fix for one in report.findings)
    engine.optimizer.refresh_fp32_params()
    shardviz.capture(engine, shard_dump, force=True)
    assert check_dump(shard_dump).findings == ()


@spmd(mesh={"dp": 2})
def test_all_ranks_masters_that_are_stale_are_named(mesh, shard_dump):
    engine = engine_of(2, "bf16")
    with torch.no_grad():
        for param in engine.module.parameters():
            param.mul_(1.5)
    found = found_in(report_of(engine, shard_dump))
    assert about(WEIGHTS, "foreign") <= found
    assert {kind for kind, _ in found} == {"foreign"}


@spmd(mesh={"dp": 2})
def test_addresses_that_are_off_by_one_are_named(mesh, shard_dump):
    engine = engine_of(1)
    with fragments(engine, 1) as linked:
        for _, mapping in linked:
            mapping.lp_fragment_address.start += 1
    report = report_of(engine, shard_dump)
    assert ("wrong-placement", "2.weight.fp32") in found_in(report)
    assert {one.kind for one in report.findings} == {"wrong-placement"}
    assert "on none" in report.findings[0].sentence


@spmd(mesh={"dp": 2})
def test_fragments_that_begin_one_element_late_are_named(mesh, shard_dump):
    engine = engine_of(1)
    with fragments(engine, 1) as linked:
        for _, mapping in linked[:1]:
            at = mapping.hp_fragment_address
            mapping.hp_fragment = mapping.hp_fragment._base.narrow(0, at.start + 1, at.numel)
    report = report_of(engine, shard_dump)
    assert found_in(report) == {("misordered", "0.weight.fp32")}
    assert "rank 1 has element 227 of it but says that it has element 226" in report.findings[0].sentence


@spmd(mesh={"dp": 2})
def test_a_wrong_weight_is_one_finding_and_not_two(mesh, shard_dump):
    engine = engine_of(2)
    with torch.no_grad():
        if distributed.get_rank() == 1:
            engine.module[0].weight.normal_()
    report = report_of(engine, shard_dump)
    assert {kind for kind, _ in found_in(report)} == {"unreplicated"}


@spmd(mesh={"dp": 2})
def test_round_robin_gradients_have_addresses_of_other_elements(mesh, shard_dump):
    """As DeepSpeed 0.19.8 is: it links fragments in another order than it lays the buffers out in."""
    report = report_of(engine_of(2, round_robin_gradients=True), shard_dump)
    assert {one.kind for one in report.findings} <= {"misordered", "foreign"}
    assert report.findings
    assert all("round_robin_gradients" in one.fix for one in report.findings)


@pytest.mark.parametrize("stage", [2, 3])
@spmd(mesh={"dp": 2})
def test_moments_of_another_rank_are_named(mesh, shard_dump, stage):
    """As where every rank loads the first one's file."""
    engine = engine_of(stage)
    for flat in buffers(engine):
        for state in engine.optimizer.optimizer.state[flat].values():
            if torch.is_tensor(state) and state.ndim:
                distributed.broadcast(state, 0)
    report = report_of(engine, shard_dump)
    found = found_in(report)
    assert {kind for kind, _ in found} == {"identical-shards"}
    assert {f"optimizer.buffer0.{kind}" for kind in ("exp_avg", "exp_avg_sq")} <= {name for _, name in found}
    assert all("same rank's optimizer file" in one.cause for one in report.findings)
