"""What a planned step holds, beside torch's own trackers and beside numbers worked out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from shardviz import probe_files
from shardviz.cli import main
from shardviz.commands.probe import mesh_for
from shardviz.live.compat.fakes import fake_mode
from shardviz.live.compat.worlds import fake_world
from shardviz.live.plan.forks import ask
from shardviz.live.plan.memory import Watched
from shardviz.live.plan.planning import PlanJob, plan
from shardviz.live.step.observe import observed
from tests.lanes import at_night, nightly

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.files import PeakRecord

FEATURES, ROWS, BLOCKS = 64, 8192, 4
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NOT_OF_A_STEP = ("Parameter", "Sharded Param", "Buffer", "Gradient", "Sharded Grad", "OptState", "Inputs", "Other")
"""What torch's trackers count and the layouts of a plan say: weights, their gradients, and the batch."""


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, 4 * FEATURES)
        self.down = nn.Linear(4 * FEATURES, FEATURES)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)


def model_of(kind: str, mesh: DeviceMesh) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(Block(checkpointed="checkpoint" in kind) for _ in range(BLOCKS)))
    for block in model if "tp" in kind else ():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    policy = NARROW if "bfloat16" in kind else MixedPrecisionPolicy()
    for module in (*model, model) if "fsdp" in kind else ():
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    return model


def peak_of(kind: str) -> PeakRecord:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = model_of(kind, mesh)
    with fake_mode():
        model.to_empty(device="cpu")
        x = torch.randn(ROWS, FEATURES)
        with observed(model, values=False) as seen, Watched(model, [model], seen.comms) as memory:
            model(x).sum().backward()
    return memory.log.peak()


def bytes_by_torch(kind: str) -> int:
    """Return the peak that torch's tracker finds, without what the layouts of a plan say."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    model: Any = model_of(kind, init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")))
    with fake_mode():
        model.to_empty(device="cpu")
        x = torch.randn(ROWS, FEATURES)
        tracker: Any = FSDPMemTracker(model) if "fsdp" in kind else MemTracker()
        if "fsdp" in kind:
            tracker.track_inputs((x,))
        else:
            tracker.track_external(model, x)
        with tracker:
            model(x).sum().backward()
    found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    names = {getattr(key, "value", key): size for key, size in found.items()}
    return sum(size for name, size in names.items() if name not in (*NOT_OF_A_STEP, "Total"))


def both(kind: str) -> tuple[PeakRecord, int]:
    with fake_world(0, 8):
        return peak_of(kind), bytes_by_torch(kind)


@nightly
@pytest.mark.parametrize(
    "kind",
    [
        "fsdp tp checkpoint",
        *at_night(["plain", "checkpoint", "tp", "fsdp", "fsdp checkpoint", "fsdp bfloat16", "fsdp tp bfloat16"]),
    ],
)
def test_a_step_holds_what_torchs_own_tracker_measures(kind: str) -> None:
    peak, by_torch = ask([0], lambda _: both(kind))[0]
    assert peak.activations + peak.gathered == pytest.approx(by_torch, rel=0.05)
    assert (peak.gathered > 0) == ("fsdp" in kind)


def kept_by_hand(model: nn.Module) -> tuple[int, int]:
    """Return what waits for backward after a forward, and what should, with no module of a library in between."""
    with fake_mode():
        model.to_empty(device="cpu")
        with observed(model, values=False) as seen, Watched(model, [model], seen.comms) as memory:
            model(torch.randn(ROWS, FEATURES)).sum().backward()
    row = ROWS * FEATURES * 4
    return memory.log.kept().total(), row * (1 + BLOCKS * (1 + 4 + 1) - 1) + BLOCKS * 2 * ROWS * 4 + row


def test_what_waits_for_backward_is_what_a_formula_says() -> None:
    def work(_: int) -> tuple[int, int]:
        with fake_world(0, 8):
            return kept_by_hand(model_of("plain", init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))))

    found, by_hand = ask([0], work)[0]
    # A block keeps its norm's output, mean and deviation, relu's output, and its own output: the input of the next.
    assert found == by_hand


class Attending(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(64, 64), nn.Linear(64, 4 * features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, value = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.value))
        return nn.functional.scaled_dot_product_attention(query, query, value, is_causal=True)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("tokens", [15, 16, 17])
def test_a_tensor_of_as_many_tokens_as_features_is_no_score(tokens: int, is_fused: bool) -> None:
    def work(_: int) -> PeakRecord:
        with fake_world(0, 2), fake_mode():
            model, x = Attending(16), torch.randn(2, tokens, 64)
            kernel = SDPBackend.FLASH_ATTENTION if is_fused else SDPBackend.MATH
            with (
                sdpa_kernel(kernel),
                observed(model, values=False) as seen,
                Watched(model, [model], seen.comms) as memory,
            ):
                model(x).sum().backward()
        return memory.log.peak()

    # The fullest moment is the end of the forward, when what softmax gave is there.
    assert ask([0], work)[0].scores == (0 if is_fused else 2 * 4 * tokens * tokens * 4)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(("features", "scores"), [(16, 0), (8, 3 * 2 * 4 * 512 * 512 * 4)])
def test_scores_are_named_where_a_cpu_has_no_fused_kernel(features: int, scores: int, is_checkpointed: bool) -> None:
    def work(_: int) -> PeakRecord:
        with fake_world(0, 2), fake_mode():
            model, x = Attending(features), torch.randn(2, 512, 64)
            with observed(model, values=False) as seen, Watched(model, [model], seen.comms) as memory:
                (checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)).sum().backward()
        return memory.log.peak()

    peak = ask([0], work)[0]
    # A score for each pair of 512 tokens, of 4 heads and 2 rows: what softmax gave, its gradient, that of what it took.
    assert peak.scores == scores
    assert peak.activations >= scores
    assert (peak.fused > 0) == (scores > 0)
    assert scores == 0 or peak.activations - scores <= peak.fused < peak.activations


TRAINING = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
AXES, MESH = ("dp",), (2,)
def build(): return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
def parallelize(model, mesh): fully_shard(model, mesh=mesh)
def batch(): return torch.zeros(2, 64)
def step(model, batch, mesh):
    loss = model(batch).sum()
    loss.backward()
"""
WITH_OPTIMIZER = """
    opt = torch.optim.Adam(model.parameters(), foreach=False)
    opt.step()
    opt.zero_grad()
"""


def test_a_step_with_its_optimizer_has_gradients_and_states_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = []
    for more in ("", WITH_OPTIMIZER):
        (tmp_path / "mine.py").write_text(TRAINING + more + "\n    return loss")
        assert main(["plan", "mine.py"]) == 0
        texts.append(capfd.readouterr().out)
    rows = [{line.split("  ")[0]: line.split()[-3:] for line in text.splitlines()} for text in texts]
    assert {"gradients", "state of Adam", "parameters"} < rows[0].keys()
    assert rows[0] == rows[1]


RECURRENT = """
import torch
from torch import nn
AXES, MESH = ("dp",), (2,)
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.{}(16, 32, batch_first=True)
    def forward(self, x): return self.layer(x)[0]
def build(): return Words()
def parallelize(model, mesh): pass
def batch(): return torch.zeros(4, 20, 16)
"""


@pytest.mark.parametrize(("layer", "gates"), [("LSTM", 4), *at_night([("GRU", 3)])])
def test_gates_of_a_recurrent_layer_wait_for_its_backward(layer: str, gates: int, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(RECURRENT.format(layer))
    probe = probe_files.find(str(tmp_path / "words.py"))
    [part] = plan(PlanJob(probe, mesh_for(probe, None)))[1].parts
    per_token = sum(one.bytes for one in part.saved if one.module == "layer") / (4 * 20 * 32 * 4)
    # Beside its gates there are its output, which the next token's gates are made of, and the input that they share.
    assert gates + 1 <= per_token <= 2 * gates + 4
