"""What torch does otherwise on tensors without values, a plan does as on those with values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from shardviz import probe_files
from shardviz.commands.probe import mesh_for
from shardviz.live.compat.fakes import fake_mode
from shardviz.live.compat.worlds import fake_world
from shardviz.live.plan.forks import ask
from shardviz.live.plan.memory import OF_ONE_DTYPE, Watched
from shardviz.live.plan.planning import PlanJob, plan
from shardviz.live.step.observe import observed

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.dump.records.files import PlanRecord

ATEN = torch.ops.aten


def of(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(sizes, dtype=dtype)


def arguments(dtype: torch.dtype) -> dict[Any, tuple[Any, ...]]:
    """Return arguments of each operator, the last of which has an element type."""
    row = torch.zeros(2, dtype=torch.int64)
    pads = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return {
        ATEN.mm.default: (of(4, 4), of(4, 4, dtype=dtype)),
        ATEN.addmm.default: (of(4), of(4, 4), of(4, 4, dtype=dtype)),
        ATEN.mv.default: (of(4, 4), of(4, dtype=dtype)),
        ATEN.convolution.default: (of(1, 3, 8, 8), of(4, 3, 3, 3, dtype=dtype), None, *pads),
        ATEN.index_put.default: (of(4, 4), [row], of(2, 4, dtype=dtype)),
        ATEN.index_put_.default: (of(4, 4), [row], of(2, 4, dtype=dtype)),
        ATEN.index_add.default: (of(4, 4), 0, row, of(2, 4, dtype=dtype)),
    }


def in_a_plan(dtype: torch.dtype) -> dict[Any, str]:
    """Return what each operator raises in a step of a plan; empty where it raises nothing."""

    def work(_: int) -> dict[str, str]:
        model, found = nn.Identity(), {}
        with fake_world(0, 2), fake_mode():
            given = arguments(dtype)
            with observed(model, values=False) as seen, Watched(model, [model], seen.comms):
                for func, own in given.items():
                    found[str(func)] = error_of(func, own)
        return found

    return ask([0], work)[0]


def error_of(func: Any, given: tuple[Any, ...]) -> str:
    try:
        func(*given)
    except RuntimeError as error:
        return str(error)
    return ""


def test_operands_of_two_element_types_are_refused_as_they_are_with_values() -> None:
    assert set(arguments(torch.float32)) == set(OF_ONE_DTYPE)
    with_values = {str(func): error_of(func, given) for func, given in arguments(torch.bfloat16).items()}
    with fake_mode():
        by_torch = {str(func): error_of(func, given) for func, given in arguments(torch.bfloat16).items()}
    assert all(with_values.values())
    assert not any(by_torch.values())
    for func, error in in_a_plan(torch.bfloat16).items():
        assert error.endswith("() of torch.float32 and torch.bfloat16"), func
    assert not any(in_a_plan(torch.float32).values())


HEAD = """
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
AXES = BATCH_AXES = ("dp",)
MESH = (2,)
def build(): return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
def parallelize(model, mesh): return DistributedDataParallel(model, process_group=mesh.get_group("dp"))
def batch(): return torch.zeros(8, 64)
"""


def planned(tmp_path: Path, code: str) -> PlanRecord:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + code)
    probe = probe_files.find(str(path))
    return plan(PlanJob(probe, mesh_for(probe, None)))[1]


def sent(record: PlanRecord) -> list[tuple[str, int, int]]:
    return [(one.op, one.count, one.bytes) for one in record.parts[0].record.collectives]


def test_a_policy_after_which_element_types_differ_is_refused_and_one_that_casts_is_not(tmp_path: Path) -> None:
    policy = (
        "def parallelize(model, mesh):\n    fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(POLICY))"
    )
    narrow = "param_dtype=torch.bfloat16"
    raised = planned(tmp_path, policy.replace("POLICY", narrow)).without_step
    assert raised.startswith("a step run with values raised RuntimeError: addmm() of torch.float32 and torch.bfloat16")
    cast = f"{narrow}, output_dtype=torch.float32"
    assert planned(tmp_path, policy.replace("POLICY", cast)).without_step == ""


@pytest.mark.parametrize("how", ["model.bfloat16()", "model.to('cpu:0')"])
def test_a_model_that_is_converted_is_built_without_values(how: str, tmp_path: Path) -> None:
    code = f"""
def build():
    model = nn.Sequential(nn.Conv2d(64, 4096, 16), nn.Flatten(), nn.LayerNorm(4096), nn.Linear(4096, 8192))
    return {how}
def batch(): return torch.zeros(2, 64, 16, 16)
"""
    record = planned(tmp_path, code.replace("16, 16)", "16, 16).bfloat16()") if "bfloat" in how else code)
    dtype = torch.bfloat16 if "bfloat" in how else torch.float32
    numbers = 64 * 4096 * 16 * 16 + 4096 + 2 * 4096 + 4096 * 8192 + 8192
    assert record.without_step == ""
    assert not any("with its values" in line or "own values" in line for line in record.how)
    assert [size for op, _, size in sent(record) if op == "all_reduce"] == [numbers * dtype.itemsize]


REPLICATED = """
from torch.distributed._composable.replicate import replicate
def parallelize(model, mesh): replicate(model, device_mesh=mesh["dp"])
"""


def test_replicate_reduces_as_the_wrapper_does_and_says_what_its_first_step_adds(tmp_path: Path) -> None:
    wrapped = planned(tmp_path, "")
    record = planned(tmp_path, REPLICATED)
    assert sent(record) == sent(wrapped) == [("all_reduce", 1, 2 * (64 * 64 + 64) * 4)]
    assert any("in it replicate() makes a DistributedDataParallel" in line for line in record.how)
    assert not any("replicate()" in line for line in wrapped.how)


GRAD_OP = """
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
def parallelize(model, mesh):
    return FullyShardedDataParallel(
        model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )
"""


def test_fsdp1_that_keeps_what_it_has_gathered_is_stepped_without_values(tmp_path: Path) -> None:
    record = planned(tmp_path, GRAD_OP)
    assert record.without_step == ""
    assert not any("this rank's own values" in line for line in record.how)


OFFLOADED = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import WRAPPER
def parallelize(model, mesh):
    model[0] = WRAPPER(model[0])
    fully_shard(model, mesh=mesh)
"""


@pytest.mark.parametrize("wrapper", ["offload_wrapper", "checkpoint_wrapper"])
def test_what_save_on_cpu_keeps_is_counted_and_noted(wrapper: str, tmp_path: Path) -> None:
    record = planned(tmp_path, OFFLOADED.replace("WRAPPER", wrapper))
    assert record.without_step == ""
    assert any("save_on_cpu() keeps" in line for line in record.how) == (wrapper == "offload_wrapper")
