"""How an engine's tensors are cut into pieces: each made of one tensor of the source, with a layout of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import distributed

from shardviz.checkpoint.maps.made import Op, called
from shardviz.errors import NotationError, ShardvizError
from shardviz.layout.notation import parse
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import dtype_name
from shardviz.testing.trips.mapping import entry_of, names_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.checkpoint.maps.made import Node
    from shardviz.layout.layout import Layout
    from shardviz.live.capture.locals import Local
    from shardviz.reference.files import Entry
    from shardviz.testing.trips.contents import Contents


@dataclass(frozen=True)
class Piece:
    """A tensor of the target as one rank has it, or a part of it that is made of one tensor of the source.

    Attributes:
        local: What this rank has.
        of: The tensor, and which of its parts.
        cut: Where it is in this rank's tensor.
    """

    local: Local
    of: tuple[str, int | None]
    cut: tuple[slice, ...] = ()


@dataclass(frozen=True)
class Cut:
    """How the target's tensors are cut into pieces that have a layout each.

    Attributes:
        made: What each is made of.
        layouts: The layouts of plain ones, by pattern over their names.
        mesh: The mesh of those.
    """

    made: Mapping[str, Node]
    layouts: Mapping[str, str]
    mesh: DeviceMesh | None

    def node(self, name: str, part: int | None) -> Node:
        """Return what a tensor, or one of its parts, is made of."""
        made = self.made[name]
        return made.parts[part] if isinstance(made, Op) and part is not None else made

    def dim(self, name: str, local: Local) -> int:
        """Return the dim along which a fused tensor's parts are put one after the other."""
        made = self.made[name]
        return _dim_of(made, local.values.shape) if isinstance(made, Op) else 0

    def fused(self, name: str, local: Local) -> Local | None:
        """Return a fused tensor as if it were cut in one piece; None where it does not divide so."""
        text = _rule_of(self.layouts, name)
        if text is None:
            return None
        layout = self._layout(text, name, self.entry(name, None).shape)
        return _labelled(local, name, layout)

    def entry(self, name: str, part: int | None) -> Entry:
        """Return what a tensor, or one of its parts, should have."""
        return entry_of(self.node(name, part))

    def of_rank(self, theirs: Contents) -> tuple[dict[str, Piece], dict[str, str]]:
        """Return this rank's pieces by name, and what is not understood, with why.

        Raises:
            ShardvizError: A plain tensor is smaller than what it is made of, and no layout says which part it is.
        """
        pieces: dict[str, Piece] = {}
        not_known = dict(theirs.not_known)
        for name, local in theirs.tensors.items():
            if name not in self.made:
                continue
            if why := packed(local, self.entry(name, None)):
                not_known[name] = why
            else:
                pieces.update(self._pieces(name, local))
        return pieces, not_known

    def _pieces(self, name: str, local: Local) -> dict[str, Piece]:
        whole = self.entry(name, None)
        if local.claim or local.flat:
            return {name: Piece(local, (name, None))}
        text = _rule_of(self.layouts, name)
        if text is None:
            if tuple(local.values.shape) != tuple(whole.shape):
                raise ShardvizError(
                    f"{name} has shape {list(local.values.shape)} on rank {distributed.get_rank()}, and what it is "
                    f"made of has {list(whole.shape)}: no layout says which part it is",
                    'pass layouts={"'
                    + name
                    + '": "[*/tp, *]"} and mesh=, or let the target have DTensors'
                    + _or_padding(name, tuple(local.values.shape), self.made[name]),
                )
            return {name: Piece(local, (name, None))}
        layout = self._layout(text, name, whole.shape)
        parts = self._parts(name, local, text) if self._is_cut_apart(name, layout) else {}
        return parts or {name: Piece(_labelled(local, name, layout), (name, None))}

    def _is_cut_apart(self, name: str, layout: Layout) -> bool:
        """Whether a tensor is put together along a dim that is split: then each of its parts is split."""
        made = self.made[name]
        return isinstance(made, Op) and made.function == "cat" and bool(layout.chains[_dim_of(made, layout.shape)])

    def _parts(self, name: str, local: Local, text: str) -> dict[str, Piece]:
        """Cut a fused tensor into what it is made of; nothing where its size is not that of all parts."""
        made = self.made[name]
        if not isinstance(made, Op):
            return {}
        found, start, dim = {}, 0, _dim_of(made, local.values.shape)
        for number, part_of in enumerate(made.parts):
            names = names_of(part_of)
            called = f"{name} ({names[0] if len(names) == 1 else f'part {number}'})"
            own = {pattern: layout for pattern, layout in self.layouts.items() if "(" in pattern}
            layout = self._layout(_rule_of(own, called) or text, called, self.entry(name, number).shape)
            size = layout.region(self._coord(layout)).shape[dim]
            cut = (*(slice(None),) * dim, slice(start, start + size))
            part = replace(local, values=local.values[cut])
            found[called] = Piece(_labelled(part, called, layout), (name, number), cut)
            start += size
        return found if start == local.values.shape[dim] else {}

    def _layout(self, text: str, name: str, shape: Sequence[int]) -> Layout:
        if self.mesh is None:
            raise ShardvizError(f"the layout {text} of {name} is on no mesh", "pass mesh=, the target's DeviceMesh")
        try:
            return parse(text).layout(plain_mesh(self.mesh), tuple(shape))
        except NotationError as error:
            raise NotationError(f"{name}: {error.message}", error.hint) from error

    def _coord(self, layout: Layout) -> tuple[int, ...]:
        return layout.mesh.coord_of(distributed.get_rank())


def _or_padding(name: str, own: tuple[int, ...], made: Node) -> str:
    """Return what to write where one of two shapes is longer along one dim, as by padding; empty for others."""
    odd = [dim for dim, pair in enumerate(zip(own, made.shape, strict=False)) if pair[0] != pair[1]]
    if len(own) != len(made.shape) or len(odd) != 1:
        return ""
    dim, source = odd[0], called(made)
    size = own[dim]
    text = f"pad({source}, {size}, {dim})" if size > made.shape[dim] else f"slice({source}, 0, {size}, {dim})"
    return f', or, where the rest is padding, map={{"{name}": "{text}"}}'


def _dim_of(made: Op, shape: Sequence[int]) -> int:
    """Return the dim along which tensors are put one after the other."""
    return (made.numbers[0] if made.numbers else 0) % max(1, len(shape))


def _labelled(local: Local, name: str, layout: Layout) -> Local:
    placements = layout.placements()
    if placements is None:
        raise ShardvizError(f"torch's placements cannot say {layout}, the layout of {name}", "use one that they can")
    return replace(local, name=name, shape=tuple(layout.shape), claim=(layout.mesh, placements))


def _rule_of(layouts: Mapping[str, str], name: str) -> str | None:
    return next((text for pattern, text in layouts.items() if fnmatchcase(name, pattern)), None)


def packed(local: Local, entry: Entry) -> str:
    """Say why a tensor's values are not the source's, only coded; empty where they are."""
    own = local.values.dtype
    theirs = getattr(torch, entry.dtype)
    if theirs.is_floating_point and (not own.is_floating_point or own.itemsize == 1):
        return f"it is {dtype_name(own)}, a coded form of the source's {entry.dtype}"
    return ""
