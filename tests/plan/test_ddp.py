"""DistributedDataParallel in a plan: its buckets, beside torch's own tracker, real ranks and sums by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardviz.cli import main
from shardviz.live.compat.ddp import ddp_alone, ddp_buckets
from shardviz.live.compat.fakes import fake_mode
from shardviz.live.compat.worlds import fake_world
from shardviz.live.plan.forks import ask
from shardviz.live.plan.memory import Watched
from shardviz.live.step.observe import observed
from shardviz.testing import spmd
from tests.lanes import at_night, nightly

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

FEATURES, ROWS, LAYERS = 256, 2048, 6
WEIGHTS = LAYERS * (FEATURES * FEATURES + FEATURES) * 4


def model_of(**options: Any) -> nn.Module:
    layers = [one for _ in range(LAYERS) for one in (nn.Linear(FEATURES, FEATURES), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers), **options)


def planned(**options: Any) -> int:
    """Return what a step holds beside weights, a gradient for each, and its batch."""
    with fake_mode():
        model = model_of(**options)
        x = torch.randn(ROWS, FEATURES)
        reduced = ddp_alone(model)
        with observed(model, values=False) as seen, Watched(model, [model], seen.comms, reduced) as memory:
            model(x).sum().backward()
    copied = sum(size for size, is_gradients in ddp_buckets(model) if not is_gradients)
    return memory.log.peak().activations + copied


def by_torch(**options: Any) -> int:
    """Return the same from the peak that torch's tracker finds."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker: Any = MemTracker()
    with fake_mode(), tracker:
        model = model_of(**options)
        x = torch.randn(ROWS, FEATURES)
        tracker.track_external(model, x)
        ddp_alone(model)
        model(x).sum().backward()
    found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    sizes = {getattr(key, "value", key): size for key, size in found.items()}
    lie_in_buckets = WEIGHTS if options.get("gradient_as_bucket_view") else 0
    return int(sizes["Activation"] + sizes["Temp"]) - lie_in_buckets


@pytest.mark.parametrize(
    "options",
    [{}, *at_night([{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1}])],
)
def test_buckets_count_as_torchs_own_tracker_measures(options: dict[str, Any]) -> None:
    def work(_: int) -> tuple[int, int]:
        with fake_world(0, 8):
            return planned(**options), by_torch(**options)

    mine, theirs = ask([0], work)[0]
    assert mine == pytest.approx(theirs, rel=0.02)
    assert mine - WEIGHTS != pytest.approx(theirs, rel=0.05)  # without the buckets it would not agree


def sizes_of(**options: Any) -> list[int]:
    def work(_: int) -> list[int]:
        with fake_world(0, 8), fake_mode():
            return [size for size, _ in ddp_buckets(model_of(**options))]

    return ask([0], work)[0]


def test_buckets_are_filled_from_the_last_layer_on() -> None:
    layer = WEIGHTS // LAYERS  # 257 KiB: a first bucket of 1 MiB is full after four layers, and all others fit into one
    assert sizes_of() == [4 * layer, 2 * layer]
    assert sizes_of(bucket_cap_mb=0.5) == [2 * layer] * 3
    assert sum(sizes_of(find_unused_parameters=True)) == WEIGHTS


@nightly
@spmd(mesh={"dp": 2})
def test_buckets_are_those_of_the_second_real_step(mesh: DeviceMesh) -> None:
    for options in ({}, {"bucket_cap_mb": 0.5}, {"bucket_cap_mb": 0.5, "find_unused_parameters": True}):
        model: Any = model_of(**options)
        sizes: list[int] = []
        model.register_comm_hook(None, _noting(sizes))
        for _ in range(2):
            sizes.clear()
            model(torch.randn(4, FEATURES)).sum().backward()
        assert sizes == [size for size, _ in ddp_buckets(model)]


def _noting(sizes: list[int]) -> Any:
    def hook(_: object, bucket: Any) -> Any:
        sizes.append(bucket.buffer().numel() * 4)
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__ = {}
    return hook


LARGE = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
AXES = BATCH_AXES = ("dp",)
MESH = (8,)
def build(): return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))
def parallelize(model, mesh): return DistributedDataParallel(model, process_group=mesh.get_group("dp"), OPTIONS)
def batch(): return torch.randn(64, 4096)
"""


@pytest.mark.parametrize("views", [False, *at_night([True])])
def test_a_model_too_large_for_values_is_planned(
    views: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large.py").write_text(LARGE.replace("OPTIONS", f"gradient_as_bucket_view={views}"))
    assert main(["plan", "large.py"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "parameters 512 MiB 4 GiB gradients 512 MiB" in text
    assert ("buckets 512 MiB" in text) == (not views)
    assert "reduces gradients in 8 buckets of at most 64 MiB" in text
    assert "all_reduce along dp backward 8 512 MiB 896 MiB" in text
    assert "raised" not in text


HOOKED = """
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
AXES = BATCH_AXES = ("dp",)
MESH = (8,)
def build(): return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
def parallelize(model, mesh):
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"), bucket_cap_mb=8)
    model.register_comm_hook(None, bf16_compress_hook)
    return model
def batch(): return torch.randn(8, 1024)
"""


@nightly
def test_a_hook_that_halves_what_is_sent_is_called_for_each_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hooked.py").write_text(HOOKED)
    assert main(["plan", "hooked.py"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "all_reduce along dp backward 2 8 MiB 14 MiB" in text  # 16 MiB of gradients in 2 buckets, in bfloat16
    assert "raised" not in text


UNUSED = """
class Odd(nn.Sequential):
    def forward(self, x): return super().forward(x)
    def __init__(self, *layers):
        super().__init__(*layers)
        self.unused = nn.Parameter(torch.zeros(8))
def build(): return Odd(nn.Linear(4096, 4096, bias=False))
"""


@pytest.mark.parametrize("unused", [UNUSED, *at_night([""])])
def test_looking_for_unused_parameters_is_planned_where_there_are_none(
    unused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large.py").write_text(LARGE.replace("OPTIONS", "find_unused_parameters=True") + unused)
    assert main(["plan", "large.py", "--mesh", "2"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    if unused:
        assert "planned without activations and collectives: a step without values cannot run in Distr" in text
    else:
        assert "it does the same with 0 (integers 0), 1 (integers 100), inf (integers 1), -1 (integers 2)" in text
        assert "all_reduce along dp backward 9 512 MiB 512 MiB" in text  # 8 buckets, and what was used
    assert "buckets " in text
