"""What following a step through its modules costs, beside the plain step: forward, backward and nothing else.

python tests/benchmarks/bench_trace.py    a transformer of 6 layers: all modules, one layer, none
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from whole import verdict

from shardviz.live.step.module_recorder import Trace
from shardviz.live.trace_modules import ALL, Followed

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, FEATURES, TOKENS, ROWS, RUNS = 6, 256, 128, 4, 9


def main() -> None:
    """Print the ratios."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(FEATURES, 8, 4 * FEATURES, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    rows = torch.randn(ROWS, TOKENS, FEATURES)
    ways = {"all": ALL, "modules=layers.1.*": Followed("layers.1.*")}
    steps: dict[str, Callable[[], int]] = {"plain": lambda: _step(model, rows)}
    steps |= {name: lambda followed=followed: _followed(model, rows, followed) for name, followed in ways.items()}
    taken, kept = _timed(steps)
    print(f"plain step: {taken['plain'] * 1e3:.0f} ms")
    for name in ways:
        print(f"--trace {name}: {taken[name] * 1e3:.0f} ms, {kept[name]:,} numbers kept")
        verdict(f"--trace {name}: step followed / plain step", taken[name] / taken["plain"], 2.0)


def _timed(steps: dict[str, Callable[[], int]]) -> tuple[dict[str, float], dict[str, int]]:
    """Time steps in turn; return the median seconds of each, and what the last run returned."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    kept = {}
    for _ in range(RUNS + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            kept[name] = step()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}, kept


def _step(model: nn.Module, rows: torch.Tensor) -> int:
    model.zero_grad()
    model(rows).square().mean().backward()
    return 0


def _followed(model: nn.Module, rows: torch.Tensor, followed: Followed) -> int:
    trace = Trace()
    handles = list(trace.follow(model, followed))
    _step(model, rows)
    for handle in handles:
        handle.remove()
    return trace.num_elements


if __name__ == "__main__":
    main()
