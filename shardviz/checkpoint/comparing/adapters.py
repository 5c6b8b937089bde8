"""Weights with an adapter merged into them: by which scale, and which one the adapter's settings make."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardviz.checkpoint.comparing.changes import factor_text
from shardviz.checkpoint.comparing.low_rank import corner_of
from shardviz.checkpoint.formats.headers import read_json
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.conversion import MergedWithAnotherScale
from shardviz.relate.tolerance import EPSILON, SAFETY, STEP
from shardviz.relate.values import magnitude
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Checkpoint, Tensor

DOWN, UP = ".lora_A.", ".lora_B."
"""What stands in the names of an adapter's two matrices; their product is added to the weight."""

PREFIXES = ("base_model.model.", "")
"""What stands before a weight's name in an adapter's."""

SETTINGS = "adapter_config.json"


class Settings(msgspec.Struct):
    """What an adapter was trained with.

    Attributes:
        lora_alpha: The number that is divided by the rank, or by its root.
        use_rslora: Whether it is the root.
        fan_in_fan_out: Whether the weight is stored transposed.
        alpha_pattern: Other numbers for some modules.
    """

    lora_alpha: float
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    alpha_pattern: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was saved on its own.

    Attributes:
        checkpoint: Its matrices.
        settings: What it was trained with.
    """

    checkpoint: Checkpoint
    settings: Settings

    def matrices_of(self, weight: str) -> tuple[Tensor, Tensor] | None:
        """Return the two matrices for a weight; None if it has none."""
        for prefix in PREFIXES:
            for ending in ("weight", "default.weight"):
                down = f"{prefix}{weight.removesuffix('.weight')}{DOWN}{ending}"
                pair = self.checkpoint.tensors.get(down), self.checkpoint.tensors.get(down.replace(DOWN, UP))
                if pair[0] is not None and pair[1] is not None:
                    return pair[0], pair[1]
        return None

    def scale(self, rank: int) -> float | None:
        """Return what the product of its matrices is multiplied by; None if modules have numbers of their own."""
        if self.settings.alpha_pattern or not rank:
            return None
        return self.settings.lora_alpha / (math.sqrt(rank) if self.settings.use_rslora else rank)


def adapters_among(checkpoints: Iterable[Checkpoint]) -> list[Adapter]:
    """Return the adapters among checkpoints, with their settings."""
    alone = (one for one in checkpoints if one.tensors and all(DOWN in name or UP in name for name in one.tensors))
    read = ((one, _settings(one.path)) for one in alone)
    return [Adapter(one, settings) for one, settings in read if settings is not None]


def _settings(path: Path) -> Settings | None:
    folder = path if path.is_dir() else path.parent
    try:
        return msgspec.json.decode(read_json(folder / SETTINGS), type=Settings)
    except (OSError, ValueError, DumpError, msgspec.DecodeError, RecursionError):
        return None


def with_adapters(outcomes: Iterable[tuple[Outcome, Pair]], adapters: list[Adapter]) -> Iterator[tuple[Outcome, Pair]]:
    """Yield outcomes; those of weights into which an adapter was merged say by which scale."""
    for outcome, pair in outcomes:
        merged = (_merged(outcome, pair, adapter) for adapter in adapters if outcome.verdict == "other")
        yield next((one for one in merged if one is not None), outcome), pair


def _merged(outcome: Outcome, pair: Pair, adapter: Adapter) -> Outcome | None:
    """Return an outcome that says by which scale an adapter was merged; None if it wasn't."""
    matrices = adapter.matrices_of(pair.both[0].name)
    scale = None if matrices is None else _scale_of(pair, matrices, is_transposed=adapter.settings.fan_in_fan_out)
    if matrices is None or scale is None:
        return None
    name, due = printable(adapter.checkpoint.path.name), adapter.scale(matrices[0].shape[0])
    is_due = due is not None and math.isclose(scale, due, rel_tol=STEP)
    why = f"{outcome.why}; it is the first and {factor_text(scale)} times the product of the matrices in {name}"
    if due is None or is_due:
        return outcome.became("other", f"{why}{f', as {SETTINGS} says' if is_due else ''}")
    how = "alpha / sqrt(r)" if adapter.settings.use_rslora else "alpha / r"
    return outcome.became("other", why, MergedWithAnotherScale(name, factor_text(scale), factor_text(due), how))


def _scale_of(pair: Pair, matrices: tuple[Tensor, Tensor], *, is_transposed: bool) -> float | None:
    """Return by what the product of two matrices was multiplied before it was added; None if the change is another."""
    before, after, down, up = (corner_of(side) for side in (*pair.both, *matrices))
    if before is None or after is None or down is None or up is None:
        return None
    if not len(down) == up.shape[1] == matrices[0].shape[0]:
        return None  # the rank is more than a corner has
    product: NDArray[np.float64] = (up @ down).T if is_transposed else up @ down
    change = after - before
    if product.shape != change.shape or not magnitude(product):
        return None
    scale = float(np.vdot(change, product) / np.vdot(product, product))
    epsilon = max(EPSILON[side.dtype] for side in (*pair.both, *matrices))
    allowed = SAFETY * epsilon * (magnitude(before) + magnitude(after) + magnitude(scale * product))
    return scale if scale > 0 and magnitude(change - scale * product) <= allowed else None
