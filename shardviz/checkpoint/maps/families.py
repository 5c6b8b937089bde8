"""The maps that come with shardviz, one file for each family of models: which there are, and which one fits names."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.checkpoint.maps.language import names_in, parse_rules, read_rules
from shardviz.checkpoint.maps.matching import is_turned
from shardviz.checkpoint.maps.named import named, pattern_of
from shardviz.errors import ShardvizError
from shardviz.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardviz.checkpoint.maps.language import Rule
    from shardviz.checkpoint.tensor import Tensor

ENDING = ".map"
FOLDER = Path(__file__).parent

MOST = 0.9
"""The part of all names that a map has to know to be the one for them."""


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
    """Return the map that knows nearly all names of two checkpoints, the narrowest one; empty if none does."""
    if first.keys() == second.keys():
        return ""
    known = {name: _known(_family(name), first, second) for name in families()}
    best = max(known, key=lambda name: (known[name], -len(_family(name))), default="")
    return best if best and known[best] >= MOST else ""


def _known(rules: Sequence[Rule], first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the part of all names that rules know, each rule in the direction in which it fits."""
    patterns = [name for rule in rules for name in (rule.left, *names_in(rule.right))]
    either = [named("", tensors, patterns).tensors for tensors in (first, second)]
    known: list[set[str]] = [set(), set()]
    for rule in rules:
        at = is_turned(rule, *either)
        known[at] |= _fitting([rule.left], either[at])
        known[not at] |= _fitting(names_in(rule.right), either[not at])
    return sum(map(len, known)) / (len(first) + len(second)) if all(known) else 0.0


def _fitting(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    own = [pattern_of(pattern) for pattern in patterns]
    return {name for name in names if any(pattern.fullmatch(name) for pattern in own)}
