"""Layouts that an author wants, looked at before ranks run: a dump that holds one nobody can read is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from shardviz.errors import NotationError
from shardviz.layout.notation import parse

HINT = 'write a layout as text: {"*.weight": "[*/tp/fsdp, *]"}'


def check_intended(intended: object) -> None:
    """Make sure that every layout is one. Its axes may be any: those of a flattened mesh are nobody's until it is made.

    Args:
        intended: Layouts in the notation, by pattern over names.

    Raises:
        NotationError: It is no dictionary, or a layout in it is no text, or none that can be read.
    """
    if not isinstance(intended, Mapping):
        raise NotationError(f"what is expected is a {type(intended).__name__}, not a dictionary by name", HINT)
    for pattern, text in intended.items():
        if not isinstance(text, str):
            raise NotationError(f"what is expected of {pattern!r} is a {type(text).__name__}, no layout", HINT)
        try:
            parse(text)
        except NotationError as error:
            raise NotationError(f"what is expected of {pattern!r}: {error.message}", error.hint) from error


def check_axes(intended: Mapping[str, str], axes: Sequence[str]) -> None:
    """Make sure that every axis that is named exists, once the model is sharded and all of its meshes are known.

    Args:
        intended: Layouts in the notation, by pattern over names.
        axes: The axes of the run's meshes, flattened ones among them.

    Raises:
        NotationError: An axis is on no mesh; the hint names the one that is meant.
    """
    for pattern, text in intended.items():
        for axis in parse(text).axes:
            if axis not in axes:
                close = get_close_matches(axis, axes, n=1)
                hint = f"did you mean {close[0]}?" if close else f"the axes are {', '.join(axes)}"
                raise NotationError(f"what is expected of {pattern!r}: {text} names {axis}, an axis of no mesh", hint)
