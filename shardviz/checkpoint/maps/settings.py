"""The numbers that a map takes from a model's own settings: config.json (Hugging Face) or params.json (Meta)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shardviz.checkpoint.records import file_size

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILES = ("config.json", "params.json")
MAX_BYTES = 1 << 24

LARGEST = 1 << 20
"""No model has more heads, or larger ones."""


class _Settings(msgspec.Struct):
    head_dim: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    hidden_size: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    dim: int | None = None
    text_config: _Settings | None = None


def numbers_beside(folders: Iterable[Path]) -> dict[str, int]:
    """Return the numbers that settings in some folders have, by the names that maps have for them.

    What cannot be read is left out, and so is what two folders have differently.
    """
    numbers_by_name: dict[str, set[int]] = {}
    for folder in folders:
        for file in FILES:
            for name, number in _numbers(folder / file).items():
                numbers_by_name.setdefault(name, set()).add(number)
    return {name: numbers.pop() for name, numbers in numbers_by_name.items() if len(numbers) == 1}


def _numbers(path: Path) -> dict[str, int]:
    size = file_size(path)
    if size is None or size > MAX_BYTES:
        return {}
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=_Settings)
    except (OSError, ValueError, msgspec.DecodeError, RecursionError):
        return {}
    config = settings.text_config or settings
    heads = config.num_attention_heads or config.n_heads
    width = config.hidden_size or config.dim
    head = config.head_dim or (width // heads if width and heads and heads > 0 else None)
    known = {"heads": heads, "kv_heads": config.num_key_value_heads or config.n_kv_heads or heads, "head_dim": head}
    return {name: number for name, number in known.items() if number and 0 < number <= LARGEST}
