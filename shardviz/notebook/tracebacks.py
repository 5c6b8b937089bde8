"""Errors without shardviz's own frames: a cell shows the line that was typed and the error."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def concise(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise `ShardvizError` as if from its caller; bugs keep their traceback."""

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        __tracebackhide__ = True  # pytest leaves this frame out
        try:
            return function(*args, **options)
        except ShardvizError as error:
            raise error.with_traceback(None) from None

    return called
