"""Layouts that an author expects, read before a step runs: a bad one would spoil the dump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from shardviz.errors import NotationError
from shardviz.layout.intended import parse_intended

HINT = 'write a layout as text: {"*.weight": "[*/tp/fsdp, *]"}'


def check_intended(intended: object) -> None:
    """Check that every expected layout can be read.

    Axes are not checked: a flattened mesh, with its axis, may be made later.

    Args:
        intended: Layouts in the notation, by pattern over names.

    Raises:
        NotationError: It is not a dictionary, or a layout in it is not text or cannot be read.
    """
    if not isinstance(intended, Mapping):
        raise NotationError(f"expect is a {type(intended).__name__}, not a dictionary of layouts by name", HINT)
    for pattern, text in intended.items():
        if not isinstance(text, str):
            raise NotationError(f"the layout expected for {pattern!r} is a {type(text).__name__}, not text", HINT)
        try:
            parse_intended(text)
        except NotationError as error:
            raise NotationError(f"the layout expected for {pattern!r}: {error.message}", error.hint) from error


def check_axes(intended: Mapping[str, str], axes: Sequence[str]) -> None:
    """Check that every named axis exists, once the model is sharded and its meshes are known.

    Args:
        intended: Layouts in the notation, by pattern over names.
        axes: The axes of the run's meshes, flattened ones among them.

    Raises:
        NotationError: An axis is on no mesh; the hint names the one that is meant.
    """
    for pattern, text in intended.items():
        for axis in parse_intended(text).axes:
            if axis not in axes:
                close = get_close_matches(axis, axes, n=1)
                hint = f"did you mean {close[0]}?" if close else f"the axes are {', '.join(axes)}"
                raise NotationError(
                    f"the layout expected for {pattern!r}: {text} names {axis}, which is not an axis of any mesh", hint
                )
