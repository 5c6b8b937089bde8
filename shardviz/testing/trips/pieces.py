"""A target's tensors cut into pieces, each made of one source tensor by a `diff` map.

Padding is left out, and fused tensors are judged whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from shardviz.checkpoint.maps import language
from shardviz.checkpoint.maps.families import find_map
from shardviz.checkpoint.maps.language import Name, Rule, names_in
from shardviz.checkpoint.maps.mapped_tensors import (
    PAD,
    MappedTensor,
    Op,
    dim_of,
    has_padding,
    label_of,
    leaves,
    padding_in,
)
from shardviz.checkpoint.maps.matching import apply, fill_stars, named_tensors, pattern_of, turn_rules
from shardviz.errors import NotationError, ShardvizError
from shardviz.layout.layout import Layout
from shardviz.layout.notation import parse
from shardviz.live.capture.lookup.by_reference import cast_bits
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name, from_bits
from shardviz.reference.names import matched
from shardviz.relate.values import part_of
from shardviz.testing.trips.contents import region_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.checkpoint.maps.mapped_tensors import Node
    from shardviz.layout.region import Region
    from shardviz.live.claims.local import Local
    from shardviz.reference.files import Entry
    from shardviz.testing.trips.contents import RankContents

AnyMap = Mapping[str, str] | Iterable[Rule] | Path | str
"""Expressions by pattern over the target's names; a file of such lines, or a family's name; or rules."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the source."""

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


def rules_of(map_given: AnyMap | None) -> tuple[Rule, ...]:
    """Return a map as rules.

    Raises:
        ShardvizError: It is a file that cannot be read, or one of its expressions cannot.
    """
    if map_given is None:
        return ()
    if isinstance(map_given, str | Path):
        return find_map(map_given)
    return language.rules_of(map_given, "map") if isinstance(map_given, Mapping) else tuple(map_given)


def made_of(names: Collection[str], entries: Mapping[str, Entry], rules: Iterable[Rule]) -> dict[str, Node]:
    """Return the recipe of each target tensor; without a rule, the source's of the same name.

    Args:
        rules: The map, with the target's names on either side.

    Raises:
        ShardvizError: A rule fits no name, names a tensor that the source does not have, or its tensors do not fit.
    """
    sent = {name: SourceTensor(name, entry) for name, entry in entries.items()}
    rule_list = tuple(rules)
    patterns = [name for rule in rule_list for name in (rule.left, *names_in(rule.right))]
    right = named_tensors("the source", sent, patterns)
    left = named_tensors("the target", dict.fromkeys(names), patterns)
    mapped = apply(turn_rules(rule_list, left.tensors, right.tensors), left, right, {})
    for name, why in mapped.lacking.items():
        raise ShardvizError(f"map: {name}: {why}", "leave the tensor out of the map, or send it")
    nodes: dict[str, Node] = {name: one.node for name, one in mapped.made.items()}
    nodes |= {name: sent[other] for name, other in mapped.known_as.items() if other in sent}
    others = [name for name in names if name not in nodes and name not in mapped.left_alone]
    same = matched(others, set(entries)).names
    return nodes | {name: sent[other] for name, other in same.items()}


def entry_of(node: Node) -> Entry:
    """Return the tensor that a node makes."""
    return MappedTensor(node, node.shape, str(node)) if isinstance(node, Op) else node


def names_of(node: Node) -> list[str]:
    """Return the source's tensors that something is made of, from left to right."""
    return [leaf.name for leaf in leaves(node)]


def rename_weights(names: Iterable[str], rules: Iterable[Rule]) -> dict[str, str]:
    """Rename by the first fitting rule that only renames; names without one stay.

    Example:
        >>> rename_weights(["layers.0.wq"], language.rules_of({"layers.*.wq": "h.*.q"}, "map"))
        {'layers.0.wq': 'h.0.q'}
    """
    renamings = [(pattern_of(rule.left), rule.right.pattern) for rule in rules if isinstance(rule.right, Name)]
    new_names = {}
    for name in names:
        fits = ((fit, other) for pattern, other in renamings if (fit := pattern.fullmatch(name)))
        fit, pattern_text = next(fits, (None, name))
        new_names[name] = fill_stars(pattern_text, fit.groups()) if fit else name
    return new_names


def without_padding(local: Local, node: Node) -> Local:
    """Return a rank's values with padding replaced by the expected: any padding is right."""
    own_region = region_of(local)
    if not has_padding(node) or local.flat or own_region is None or own_region.shape != tuple(local.values.shape):
        return local
    got, source, padding = bits_of_tensor(local.values).copy(), entry_of(node), padding_in(node)
    for region in (*_other_regions(local), own_region):  # a shard of another rank has that one's padding
        mask = part_of(padding, region)
        expected = cast_bits(source.read(region), source.dtype, local.values.dtype)
        if region == own_region or (mask.shape == got.shape and _are_equal(got[~mask], expected[~mask])):
            got[mask] = expected[mask]
            break
    return replace(local, values=from_bits(got, local.values.dtype))


def _other_regions(local: Local) -> Iterator[Region]:
    """Yield other ranks' regions of a tensor that isn't replicated."""
    if local.claim is None:
        return
    mesh, placements = local.claim
    layout = Layout.from_placements(mesh, local.shape, placements)
    own_region = layout.region_of_rank(distributed.get_rank())
    yield from (one for one in dict.fromkeys(map(layout.region, mesh.coords())) if one != own_region)


@dataclass(frozen=True)
class PaddedPart:
    """A rank's part, padded because the map pads the whole tensor.

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


def padded_by_rank(local: Local, node: Node) -> PaddedPart | None:
    """Return how a rank's own part was padded; None if it was not."""
    if not isinstance(node, Op) or node.function != PAD or local.claim is None or local.flat:
        return None
    mesh, placements = local.claim
    inner, dim = node.parts[0], dim_of(node)
    region = Layout.from_placements(mesh, inner.shape, placements).region_of_rank(distributed.get_rank())
    cut = (*(slice(None),) * dim, slice(0, region.shape[dim]))
    actual = bits_of_tensor(local.values)[cut]
    expected = cast_bits(entry_of(inner).read(region), entry_of(inner).dtype, local.values.dtype)
    size = region.shape[dim]
    padded = PaddedPart(dim, region.dims[dim][0][0] if size else 0, size, local.values.shape[dim] - size)
    return padded if padded.more > 0 and _are_equal(actual, expected) else None


def _are_equal(actual: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return actual.size > 0 and actual.shape == wanted.shape and bool((actual == wanted).all())


@dataclass(frozen=True)
class TargetPiece:
    """A rank's tensor of the target, or a part of it that comes from one source tensor.

    Attributes:
        local: What this rank has.
        of: The tensor, and which of its parts.
        cut: Where it is in this rank's tensor.
    """

    local: Local
    of: tuple[str, int | None]
    cut: tuple[slice, ...] = ()


@dataclass(frozen=True)
class PieceCuts:
    """How the target's tensors are cut into pieces, each with a layout.

    Attributes:
        made: What each is made of.
        layouts: The layouts of plain ones, by pattern over their names.
        mesh: The mesh of those.
    """

    made: Mapping[str, Node]
    layouts: Mapping[str, str]
    mesh: DeviceMesh | None

    def node(self, name: str, number: int | None) -> Node:
        """Return what a tensor, or one of its parts, is made of."""
        node = self.made[name]
        return node.parts[number] if isinstance(node, Op) and number is not None else node

    def dim(self, name: str, local: Local) -> int:
        """Return the dim along which a fused tensor's parts are put one after the other."""
        node = self.made[name]
        return dim_of_parts(node, local.values.shape) if isinstance(node, Op) else 0

    def fused(self, name: str, local: Local) -> Local | None:
        """Return a fused tensor as if it were cut in one piece; None if it does not divide so."""
        text = _rule_of(self.layouts, name)
        if text is None:
            return None
        layout = self._layout(text, name, self.entry(name, None).shape)
        return _labeled(local, name, layout)

    def entry(self, name: str, part: int | None) -> Entry:
        """Return what a tensor, or one of its parts, should have."""
        return entry_of(self.node(name, part))

    def of_rank(self, target_contents: RankContents) -> tuple[dict[str, TargetPiece], dict[str, str]]:
        """Return this rank's pieces by name, and what is not understood, with why.

        Raises:
            ShardvizError: A plain tensor is smaller than what it is made of, and no layout says which part it is.
        """
        pieces: dict[str, TargetPiece] = {}
        not_known = dict(target_contents.not_known)
        for name, local in target_contents.tensors.items():
            if name not in self.made:
                continue
            if why := why_packed(local, self.entry(name, None)):
                not_known[name] = why
            else:
                pieces.update(self._pieces(name, local))
        return pieces, not_known

    def _pieces(self, name: str, local: Local) -> dict[str, TargetPiece]:
        whole = self.entry(name, None)
        if local.claim or local.flat:
            return {name: TargetPiece(local, (name, None))}
        text = _rule_of(self.layouts, name)
        if text is None:
            if tuple(local.values.shape) != tuple(whole.shape):
                raise ShardvizError(
                    f"{name} has shape {list(local.values.shape)} on rank {distributed.get_rank()}, and what it is "
                    f"made of has {list(whole.shape)}: no layout says which part it is",
                    'pass layouts={"'
                    + name
                    + '": "[*/tp, *]"} and mesh=, or let the target have DTensors'
                    + _padding_expression(name, tuple(local.values.shape), self.made[name]),
                )
            return {name: TargetPiece(local, (name, None))}
        layout = self._layout(text, name, whole.shape)
        node = self.made[name]
        # Put together along a dim that is split, each of its parts is split.
        is_cut_apart = (
            isinstance(node, Op) and node.function == "cat" and layout.chains[dim_of_parts(node, layout.shape)]
        )
        parts = self._parts(name, local, text) if is_cut_apart else {}
        return parts or {name: TargetPiece(_labeled(local, name, layout), (name, None))}

    def _parts(self, name: str, local: Local, text: str) -> dict[str, TargetPiece]:
        """Cut a fused tensor into what it is made of; nothing if its size is not that of all parts."""
        node = self.made[name]
        if not isinstance(node, Op):
            return {}
        pieces, start, dim = {}, 0, dim_of_parts(node, local.values.shape)
        for number, part_node in enumerate(node.parts):
            names = names_of(part_node)
            called = f"{name} ({names[0] if len(names) == 1 else f'part {number}'})"
            fused_layouts = {pattern: layout for pattern, layout in self.layouts.items() if "(" in pattern}
            layout = self._layout(_rule_of(fused_layouts, called) or text, called, self.entry(name, number).shape)
            size = layout.region_of_rank(distributed.get_rank()).shape[dim]
            cut = (*(slice(None),) * dim, slice(start, start + size))
            cut_local = replace(local, values=local.values[cut])
            pieces[called] = TargetPiece(_labeled(cut_local, called, layout), (name, number), cut)
            start += size
        return pieces if start == local.values.shape[dim] else {}

    def _layout(self, text: str, name: str, shape: Sequence[int]) -> Layout:
        if self.mesh is None:
            raise ShardvizError(f"the layout {text} of {name} is on no mesh", "pass mesh=, the target's DeviceMesh")
        try:
            return parse(text).layout(plain_mesh(self.mesh), tuple(shape))
        except NotationError as error:
            raise NotationError(f"{name}: {error.message}", error.hint) from error


def _padding_expression(name: str, shape: tuple[int, ...], node: Node) -> str:
    """Return the map expression for a shape that is longer along one dim; empty for others."""
    odd = [dim for dim, pair in enumerate(zip(shape, node.shape, strict=False)) if pair[0] != pair[1]]
    if len(shape) != len(node.shape) or len(odd) != 1:
        return ""
    dim, source = odd[0], label_of(node)
    size = shape[dim]
    text = f"pad({source}, {size}, {dim})" if size > node.shape[dim] else f"slice({source}, 0, {size}, {dim})"
    return f', or, where the rest is padding, map={{"{name}": "{text}"}}'


def dim_of_parts(made: Op, shape: Sequence[int]) -> int:
    """Return the dim along which tensors are put one after the other."""
    return (made.numbers[0] if made.numbers else 0) % max(1, len(shape))


def _labeled(local: Local, name: str, layout: Layout) -> Local:
    placements = layout.placements()
    if placements is None:
        raise ShardvizError(
            f"torch's placements cannot express {layout}, the layout of {name}", "use one that they can"
        )
    return replace(local, name=name, shape=tuple(layout.shape), claim=(layout.mesh, placements))


def _rule_of(layouts: Mapping[str, str], name: str) -> str | None:
    return next((text for pattern, text in layouts.items() if fnmatchcase(name, pattern)), None)


def why_packed(local: Local, source: Entry) -> str:
    """Say why a tensor's values are not the source's, only coded; empty if they are."""
    dtype = local.values.dtype
    source_dtype = getattr(torch, source.dtype)
    if source_dtype.is_floating_point and (not dtype.is_floating_point or dtype.itemsize == 1):
        return f"it is {dtype_name(dtype)}, a coded form of the source's {source.dtype}"
    return ""
