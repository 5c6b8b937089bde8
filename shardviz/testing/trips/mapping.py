"""How a target's tensors are made of a source's: the maps of `shardviz diff`, with the target's names on the left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.maps import language
from shardviz.checkpoint.maps.families import find_map
from shardviz.checkpoint.maps.inverse import towards
from shardviz.checkpoint.maps.language import Name, Rule, names_in
from shardviz.checkpoint.maps.made import Made, Op, leaves
from shardviz.checkpoint.maps.matching import apply
from shardviz.checkpoint.maps.named import filled, named, pattern_of
from shardviz.errors import ShardvizError
from shardviz.reference.names import matched

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from shardviz.checkpoint.maps.made import Node
    from shardviz.layout.region import Region
    from shardviz.reference.files import Entry

AnyMap = Mapping[str, str] | Iterable[Rule] | Path | str
"""Expressions by pattern over the target's names; a file of such lines, or a family's name; or rules."""


@dataclass(frozen=True)
class Sent:
    """A tensor of the source, by its name.

    Attributes:
        name: Its name.
        entry: Its values.
    """

    name: str
    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.entry.shape)

    @property
    def dtype(self) -> str:
        """Its dtype, by torch's name."""
        return self.entry.dtype

    @property
    def bits(self) -> NDArray[Any]:
        """Its values as unsigned integers."""
        return self.entry.bits

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order."""
        return self.entry.read(region)


def rules_of(given: AnyMap | None) -> tuple[Rule, ...]:
    """Return a map as rules.

    Raises:
        ShardvizError: It is a file that cannot be read, or one of its expressions cannot.
    """
    if given is None:
        return ()
    if isinstance(given, str | Path):
        return find_map(given)
    return language.rules_of(given, "map") if isinstance(given, Mapping) else tuple(given)


def made_of(names: Collection[str], entries: Mapping[str, Entry], rules: Iterable[Rule]) -> dict[str, Node]:
    """Return what each of the target's tensors is made of; one without a rule is the source's of its own name, if any.

    Args:
        names: The target's names.
        entries: The source's tensors by name.
        rules: The map, with the target's names on either side.

    Raises:
        ShardvizError: A rule fits no name, names a tensor that the source does not have, or its tensors do not fit.
    """
    sent = {name: Sent(name, entry) for name, entry in entries.items()}
    known = tuple(rules)
    patterns = [name for rule in known for name in (rule.left, *names_in(rule.right))]
    right = named("the source", sent, patterns)
    left = named("the target", dict.fromkeys(names), patterns)
    mapped = apply(towards(known, left.tensors, right.tensors), left, right, {})
    for name, why in mapped.lacking.items():
        raise ShardvizError(f"map: {name}: {why}", "leave the tensor out of the map, or send it")
    found: dict[str, Node] = {name: one.node for name, one in mapped.made.items()}
    found |= {name: sent[other] for name, other in mapped.known_as.items() if other in sent}
    others = [name for name in names if name not in found and name not in mapped.left_alone]
    same = matched(others, set(entries)).names
    return found | {name: sent[other] for name, other in same.items()}


def entry_of(node: Node) -> Entry:
    """Return the tensor that a node makes."""
    return Made(node, node.shape, str(node)) if isinstance(node, Op) else node


def names_of(node: Node) -> list[str]:
    """Return the source's tensors that something is made of, from left to right."""
    return [leaf.name for leaf in leaves(node)]


def renamed(names: Iterable[str], rules: Iterable[Rule]) -> dict[str, str]:
    """Return what names are called by rules that only rename; the first that fits counts, others keep their name.

    Example:
        >>> renamed(["layers.0.wq"], language.rules_of({"layers.*.wq": "h.*.q"}, "map"))
        {'layers.0.wq': 'h.0.q'}
    """
    known = [(pattern_of(rule.left), rule.right.pattern) for rule in rules if isinstance(rule.right, Name)]
    found = {}
    for name in names:
        fits = ((fit, other) for pattern, other in known if (fit := pattern.fullmatch(name)))
        fit, other = next(fits, (None, name))
        found[name] = filled(other, fit.groups()) if fit else name
    return found
