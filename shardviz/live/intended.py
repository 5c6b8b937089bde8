"""Layouts that an author wants, looked at before ranks run: a dump that holds one nobody can read is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardviz.chain import JOIN
from shardviz.errors import NotationError, ShardvizError
from shardviz.notation import parse

if TYPE_CHECKING:
    from shardviz.mesh import Mesh
    from shardviz.notation import Pattern

HINT = 'write a layout as text: {"*.weight": "[*/tp/fsdp, *]"}'


def check_intended(intended: object, mesh: Mesh | None = None) -> None:
    """Make sure that every layout is one.

    Args:
        intended: Layouts in the notation, by pattern over names.
        mesh: The mesh whose axes they may name; None where any will do.

    Raises:
        NotationError: It is no dictionary, or a layout in it is no text, or none that can be read.
        MeshError: A layout names an axis that the mesh has not.
    """
    if not isinstance(intended, Mapping):
        raise NotationError(f"what is expected is a {type(intended).__name__}, not a dictionary by name", HINT)
    for pattern, text in intended.items():
        if not isinstance(text, str):
            raise NotationError(f"what is expected of {pattern!r} is a {type(text).__name__}, no layout", HINT)
        try:
            named = _axes_of(parse(text))
            if mesh is not None:
                for axis in named:
                    mesh.axis_index(axis)
        except ShardvizError as error:
            raise type(error)(f"what is expected of {pattern!r}: {error.message}", error.hint) from error


def _axes_of(pattern: Pattern) -> list[str]:
    split = [link for chain in pattern.chains for link in chain if isinstance(link, str) and link != JOIN]
    return [*split, *pattern.equal, *(axis for axis, _ in pattern.partial)]
