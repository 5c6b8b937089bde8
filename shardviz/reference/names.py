"""Match a model's names with its reference's, whatever prefixes and wrappers they have.

If a conversion renamed or combined tensors, a map says so: `shardviz.checkpoint.maps`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from shardviz.errors import ShardvizError
from shardviz.groups import in_groups
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

MIN_SHARED = 2
"""Names that stand behind the same beginning: one alone may be another tensor that ends alike."""

WRAPPERS = ("module.", "model.", "_orig_mod.", "base_model.model.")
"""What libraries put before every name."""

WRAPPED = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_layer.")
"""What libraries put into names, wherever a module is wrapped."""

_OF_OPTIMIZERS = re.compile(r"(?:^|\.)(?:optim[a-z]*|[a-z_]*optimizer[a-z_]*|state|lr_scheduler)\.")


@dataclass(frozen=True, slots=True)
class NameMatching:
    """The names that a model's tensors have in a reference.

    Attributes:
        names: The reference's name by the model's; names that it lacks are left out.
        before: What the reference has before the model's names, such as `app.model.`; empty if nothing, or if it
            is the model that has more.
        open: Several such beginnings that fit equally well, so that none is used; empty if one is clear.
    """

    names: Mapping[str, str]
    before: str = ""
    open: tuple[str, ...] = ()


def matched(names: Collection[str], others: Collection[str]) -> NameMatching:
    """Match a model's tensors with a reference's: by name, without wrappers, behind a prefix.

    A nested state dict puts the same words before every name of a model (`app.model.`), and others before its
    optimizer's. The beginning that fits most of the names is taken, if no other fits as many. A module that a job puts
    around its model does the same on the other side: `policy.up` is the reference's `up`.

    Example:
        >>> matched(["up", "down"], ["app.model.up", "app.model.down", "app.optimizer.state.up.exp_avg"]).names
        {'up': 'app.model.up', 'down': 'app.model.down'}
    """
    pairs = {name: name for name in names if name in others}
    pairs |= _by_wrappers([name for name in names if name not in pairs], _unmatched(others, pairs))
    left = {name: bare_name(name) for name in names if name not in pairs}
    least = max(MIN_SHARED, len(pairs) + 1)
    best = _beginnings(set(left.values()), _unmatched(others, pairs), least)
    if len(best) == 1:
        pairs |= {name: best[0] + bare for name, bare in left.items() if best[0] + bare in others}
        return NameMatching(pairs, best[0])
    return NameMatching(
        pairs if best else pairs | _match_without_prefix(left, _unmatched(others, pairs), least), open=tuple(best)
    )


def _match_without_prefix(names: Mapping[str, str], others: Collection[str], least: int) -> dict[str, str]:
    """Match names without a prefix that the model has; empty if several prefixes fit as well."""
    best = _beginnings(others, names.values(), least)
    if len(best) != 1:
        return {}
    behind = {name: bare.removeprefix(best[0]) for name, bare in names.items() if bare.startswith(best[0])}
    return {name: other for name, other in behind.items() if other in others}


def wrapped_alone(names: Iterable[str], others: Collection[str], fits: Callable[[str, str], bool]) -> dict[str, str]:
    """Match weights of wrapped modules: `wq.base.weight` was saved as `wq.weight`.

    A wrapper's own weights, as those of LoRA, stand beside it: only one may fit, by its shape.

    Args:
        names: The model's names that nothing in the reference has.
        others: The reference's names that are no other tensor's.
        fits: Whether a tensor of the model may be one of the reference.

    Example:
        >>> wrapped_alone(["wq.base.weight", "wq.down.weight"], ["wq.weight"], lambda name, _: "base" in name)
        {'wq.base.weight': 'wq.weight'}
    """
    wanted: dict[str, list[str]] = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        outer, _, inner = module.rpartition(".")
        other = f"{outer}.{leaf}"
        if outer and not inner.isdigit() and other in others and fits(name, other):
            wanted.setdefault(other, []).append(name)
    return {some[0]: other for other, some in wanted.items() if len(some) == 1}


def _unmatched(others: Collection[str], found: Mapping[str, str]) -> set[str]:
    return set(others) - set(found.values())


def _by_wrappers(names: Iterable[str], others: Collection[str]) -> dict[str, str]:
    """Match names that differ by wrappers' words on either side; ambiguous ones are left out."""
    by_bare = in_groups((short, other) for other in others for short in dict.fromkeys(_shorter_names(other)))
    pairs = {}
    for name in names:
        fits = next((by_bare[short] for short in _shorter_names(name) if short in by_bare), [])
        if len(fits) == 1:
            pairs[name] = fits[0]
    return pairs


def _shorter_names(name: str) -> Iterator[str]:
    """Yield a name, and what is left of it without a wrapper's words before it, in it, or both."""
    names = [name, *(name.removeprefix(wrapper) for wrapper in WRAPPERS if name.startswith(wrapper))]
    yield from names
    yield from map(bare_name, names)


def bare_name(name: str) -> str:
    """Return a name without what libraries put before and into it."""
    for word in WRAPPED:
        name = name.replace(f".{word}", ".").removeprefix(word)
    return name.removeprefix("module.").removeprefix("base_model.model.")


def _beginnings(names: Collection[str], others: Collection[str], least: int) -> list[str]:
    """Return the prefix of the most names on the other side, at least `least`; several if tied."""
    counts: Counter[str] = Counter()
    for other in others:
        for dot in (match.end() for match in re.finditer(r"\.", other)):
            if other[dot:] in names:
                counts[other[:dot]] += 1
    # A beginning with a number chooses a layer: `0.weight` is not any layer's weight.
    fits = {before: count for before, count in counts.items() if not any(map(str.isdigit, before.split(".")))}
    own = {before: count for before, count in fits.items() if not _OF_OPTIMIZERS.search(before)}
    best = max((own or fits).values(), default=0)
    return sorted(before for before, count in (own or fits).items() if count == best >= least)


def refuse_strangers(names: Collection[str], others: Collection[str], path: str, several: Collection[str]) -> NoReturn:
    """Raise because a reference has none of a model's names: nothing could be compared.

    Args:
        names: The model's names, as they were looked up.
        others: The reference's.
        several: What stands before the names in the reference, if that is more than one thing.

    Raises:
        ShardvizError: Always; its message has some names of each side.
    """
    if several:
        raise ShardvizError(
            f"{path} has the model's names {len(several)} times: behind {listed(several)}",
            f'say which is meant: reference_names={{"*": "{next(iter(several))}*"}}, or a line of a file for --map: '
            f"* = {next(iter(several))}*",
        )
    raise ShardvizError(
        f"no tensor of the model is in {path} by its name: the model has {listed(sorted(names))}, "
        f"{path} has {listed(sorted(others)) or 'no tensors'}",
        'say how they correspond: reference_names={"layers.*.wq.weight": "model.layers.*.self_attn.q_proj.weight"}, or '
        "lines of a file for --map: layers.*.wq.weight = model.layers.*.self_attn.q_proj.weight",
    )
