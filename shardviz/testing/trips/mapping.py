"""How a target's tensors are made of a source's, by the maps of `shardviz diff`, and the padding that a map gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed

from shardviz.checkpoint.maps import language
from shardviz.checkpoint.maps.families import find_map
from shardviz.checkpoint.maps.inverse import towards
from shardviz.checkpoint.maps.language import Name, Rule, names_in
from shardviz.checkpoint.maps.made import Made, Op, leaves
from shardviz.checkpoint.maps.matching import apply
from shardviz.checkpoint.maps.named import filled, named, pattern_of
from shardviz.checkpoint.maps.padding import PAD, dim_of, has_padding, padding_in
from shardviz.errors import ShardvizError
from shardviz.layout.layout import Layout
from shardviz.live.capture.lookup.by_reference import cast_bits
from shardviz.live.capture.stamp import bits_of_tensor, from_bits
from shardviz.reference.names import matched
from shardviz.relate.values import part_of
from shardviz.testing.trips.filling import region_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from typing import Any

    from numpy.typing import NDArray

    from shardviz.checkpoint.maps.made import Node
    from shardviz.layout.region import Region
    from shardviz.live.capture.locals import Local
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
    nodes: dict[str, Node] = {name: one.node for name, one in mapped.made.items()}
    nodes |= {name: sent[other] for name, other in mapped.known_as.items() if other in sent}
    others = [name for name in names if name not in nodes and name not in mapped.left_alone]
    same = matched(others, set(entries)).names
    return nodes | {name: sent[other] for name, other in same.items()}


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
    new_names = {}
    for name in names:
        fits = ((fit, other) for pattern, other in known if (fit := pattern.fullmatch(name)))
        fit, other = next(fits, (None, name))
        new_names[name] = filled(other, fit.groups()) if fit else name
    return new_names


def without_padding(local: Local, node: Node) -> Local:
    """Return what a rank has, with the values of what is made in the place of padding: whatever is there is right."""
    own_region = region_of(local)
    if not has_padding(node) or local.flat or own_region is None or own_region.shape != tuple(local.values.shape):
        return local
    got, entry, padding = bits_of_tensor(local.values).copy(), entry_of(node), padding_in(node)
    for region in (*_others(local), own_region):  # a shard of another rank has that one's padding
        mask = part_of(padding, region)
        wanted = cast_bits(entry.read(region), entry.dtype, local.values.dtype)
        if region == own_region or (mask.shape == got.shape and _equal(got[~mask], wanted[~mask])):
            got[mask] = wanted[mask]
            break
    return replace(local, values=from_bits(got, local.values.dtype))


def _others(local: Local) -> Iterator[Region]:
    """Yield what other ranks have of a tensor where it is not all copies."""
    if local.claim is None:
        return
    mesh, placements = local.claim
    layout = Layout.from_placements(mesh, local.shape, placements)
    own = layout.region(mesh.coord_of(distributed.get_rank()))
    yield from (one for one in dict.fromkeys(map(layout.region, mesh.coords())) if one != own)


@dataclass(frozen=True)
class Padded:
    """A rank's own part with padding behind it, where the map pads the whole at its end.

    Attributes:
        dim: The dim that is padded.
        first: The part's first index there, in the whole.
        size: How many it has.
        more: How many are behind them.
    """

    dim: int
    first: int
    size: int
    more: int


def padded_by_rank(local: Local, node: Node) -> Padded | None:
    """Return how a rank's own part was padded; None if it was not."""
    if not isinstance(node, Op) or node.function != PAD or local.claim is None or local.flat:
        return None
    mesh, placements = local.claim
    inner, dim = node.parts[0], dim_of(node)
    part = Layout.from_placements(mesh, inner.shape, placements).region(mesh.coord_of(distributed.get_rank()))
    cut = (*(slice(None),) * dim, slice(0, part.shape[dim]))
    actual = bits_of_tensor(local.values)[cut]
    wanted = cast_bits(entry_of(inner).read(part), entry_of(inner).dtype, local.values.dtype)
    size = part.shape[dim]
    padded = Padded(dim, part.dims[dim][0][0] if size else 0, size, local.values.shape[dim] - size)
    return padded if padded.more > 0 and _equal(actual, wanted) else None


def _equal(actual: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return actual.size > 0 and actual.shape == wanted.shape and bool((actual == wanted).all())
