"""pytest's own fixtures that act on the process that they are in, `capsys` and its like: made on each rank.

They are made by pytest's own functions.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardviz.testing.plugin import compat

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import pytest


@contextmanager
def made(names: Collection[str], config: pytest.Config, log_level: int | None) -> Iterator[dict[str, Any]]:
    """Make fixtures for a test, and end them with it. Log records go to stderr, as in a report of pytest.

    Args:
        names: Some of `compat.HOMES`.
        config: A configuration with a capture manager.
        log_level: What pytest was asked to record; None for what loggers let through.
    """
    with ExitStack() as stack:
        node = compat.catch_logs(stack, log_level)
        request = SimpleNamespace(config=config, node=node, fixturename="", raiseerror=_refuse)
        yield {name: stack.enter_context(_made(name, request)) for name in names}


@contextmanager
def _made(name: str, request: SimpleNamespace) -> Iterator[Any]:
    request.fixturename = name
    function = compat.fixture_function(name)
    takes_request = "request" in function.__code__.co_varnames[: function.__code__.co_argcount]
    steps = function(request) if takes_request else function()
    yield next(steps)
    next(steps, None)


def _refuse(message: str) -> None:
    import pytest

    pytest.fail(message, pytrace=False)
