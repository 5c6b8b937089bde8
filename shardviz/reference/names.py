"""A model's names as its reference has them: patterns, where a conversion renamed tensors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

from shardviz.errors import ShardvizError
from shardviz.text import listed, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_LISTED = 3


def renamed(names: Collection[str], patterns: Mapping[str, str]) -> dict[str, str]:
    """Return what a reference calls each tensor of a model.

    Args:
        names: The model's names.
        patterns: The reference's name by pattern over the model's; the first that fits counts. `*` stands for anything,
            and each `*` of the reference's name for what stood in its place. A name that fits none is kept.

    Raises:
        ShardvizError: A pattern fits no name, or the name for it has more `*` than the pattern.

    Example:
        >>> renamed(["layers.3.wq.weight", "norm"], {"layers.*.wq.*": "model.layers.*.self_attn.q_proj.*"})
        {'layers.3.wq.weight': 'model.layers.3.self_attn.q_proj.weight', 'norm': 'norm'}
    """
    rules = [(_compiled(pattern, target), target) for pattern, target in patterns.items()]
    for (rule, _), pattern in zip(rules, patterns, strict=True):
        if not any(map(rule.fullmatch, names)):
            close = nearest(pattern, names)
            hint = f"did you mean {close}?" if close else f"the model has {listed(sorted(names), MAX_LISTED)}"
            raise ShardvizError(f"reference_names: no tensor of the model fits {pattern!r}", hint)
    return {name: _renamed(name, rules) for name in names}


def _compiled(pattern: str, target: str) -> re.Pattern[str]:
    if target.count("*") > pattern.count("*"):
        raise ShardvizError(
            f"reference_names: {target!r} has more * than {pattern!r}", "each * of a name stands for one of its pattern"
        )
    return re.compile("(.*?)".join(map(re.escape, pattern.split("*"))))


def _renamed(name: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for rule, target in rules:
        if (found := rule.fullmatch(name)) is not None:
            pieces = target.split("*")
            return "".join(
                piece for pair in zip(pieces, (*found.groups()[: len(pieces) - 1], ""), strict=True) for piece in pair
            )
    return name


def refuse_strangers(names: Collection[str], others: Collection[str], path: str) -> NoReturn:
    """Raise because a reference has none of a model's names: nothing could be compared.

    Args:
        names: The model's names, as they were looked up.
        others: The reference's.
        path: Where the reference is.

    Raises:
        ShardvizError: Always; its message has some names of each side.
    """
    raise ShardvizError(
        f"no tensor of the model is in {path} by its name: the model has {listed(sorted(names), MAX_LISTED)}, "
        f"{path} has {listed(sorted(others), MAX_LISTED) or 'no tensors'}",
        'say how they correspond: reference_names={"layers.*.wq.weight": "model.layers.*.self_attn.q_proj.weight"}',
    )
