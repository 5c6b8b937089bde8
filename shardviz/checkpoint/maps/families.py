"""Maps that come with shardviz, one a model family, and the numbers in a model's config."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardviz.checkpoint.maps.language import names_in, parse_rules, read_rules
from shardviz.checkpoint.maps.matching import is_turned, named_tensors, pattern_of
from shardviz.checkpoint.records import file_size
from shardviz.errors import ShardvizError
from shardviz.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardviz.checkpoint.maps.language import Rule
    from shardviz.checkpoint.records import Tensor

ENDING = ".map"
FOLDER = Path(__file__).parent
MOST = 0.9
"""The part of all names that a map has to know to be the one for them."""

FILES = ("config.json", "params.json")
MAX_BYTES = 1 << 24
LARGEST = 1 << 20
"""No model has more heads, or larger ones."""


def families() -> list[str]:
    """Return the names of the maps that come with shardviz."""
    return sorted(path.stem for path in FOLDER.glob(f"*{ENDING}"))


def find_map(which: Path | str) -> tuple[Rule, ...]:
    """Return the rules of a file, or of a family.

    Raises:
        ShardvizError: There is no such file or family, or a line cannot be read.

    Example:
        >>> find_map("llama")[0].left
        'model.embed_tokens.weight'
    """
    if str(which) in families() and not Path(which).is_file():
        return _family(str(which))
    if not Path(which).exists() and not Path(which).suffix and Path(which).name == str(which):
        hint = did_you_mean(str(which), families()) or f"give a file, or one of {', '.join(families())}"
        raise ShardvizError(f"cannot read {which}: No such file, and no map of that name", hint)
    return read_rules(which)


@lru_cache(maxsize=16)
def _family(name: str) -> tuple[Rule, ...]:
    return parse_rules((FOLDER / f"{name}{ENDING}").read_text(), f"{name}{ENDING}")


def family_of(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> str:
    """Return the narrowest map that knows nearly all names of two checkpoints, or an empty name."""
    if first.keys() == second.keys():
        return ""
    shares = {name: _known_share(_family(name), first, second) for name in families()}
    best = max(shares, key=lambda name: (shares[name], -len(_family(name))), default="")
    return best if best and shares[best] >= MOST else ""


def _known_share(rules: Sequence[Rule], first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the part of all names that rules know, each rule in the direction in which it fits."""
    patterns = [name for rule in rules for name in (rule.left, *names_in(rule.right))]
    either = [named_tensors("", tensors, patterns).tensors for tensors in (first, second)]
    names_known: list[set[str]] = [set(), set()]
    for rule in rules:
        at = is_turned(rule, *either)
        names_known[at] |= _fitting_names([rule.left], either[at])
        names_known[not at] |= _fitting_names(names_in(rule.right), either[not at])
    return sum(map(len, names_known)) / (len(first) + len(second)) if all(names_known) else 0.0


def _fitting_names(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    own = [pattern_of(pattern) for pattern in patterns]
    return {name for name in names if any(pattern.fullmatch(name) for pattern in own)}


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
    """Return the numbers in the config files of some folders, under the names that maps use.

    Files that can't be read are skipped, and so is a number that differs between folders.
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
    numbers = {"heads": heads, "kv_heads": config.num_key_value_heads or config.n_kv_heads or heads, "head_dim": head}
    return {name: number for name, number in numbers.items() if number and 0 < number <= LARGEST}
