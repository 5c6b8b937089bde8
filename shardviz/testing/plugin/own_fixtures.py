"""pytest's own fixtures that act on the process that they are in, `capsys` and its like: made on each rank.

They are made by pytest's own functions, which is private of pytest. Tried on pytest 8.2 and 9.2.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import pytest

HOMES = {
    "capfd": "_pytest.capture",
    "capfdbinary": "_pytest.capture",
    "caplog": "_pytest.logging",
    "capsys": "_pytest.capture",
    "capsysbinary": "_pytest.capture",
    "capteesys": "_pytest.capture",
    "monkeypatch": "_pytest.monkeypatch",
    "recwarn": "_pytest.recwarn",
}
"""The fixtures that ranks make, and the modules that define them."""


def is_own(item: pytest.Function, name: str) -> bool:
    """Whether a test's argument is from a fixture of pytest itself."""
    if name == "request":
        return True
    definitions = item._fixtureinfo.name2fixturedefs.get(name, ())
    return bool(definitions) and str(definitions[-1].func.__module__).startswith("_pytest.")


@contextmanager
def made(
    names: Collection[str], config: pytest.Config, log_level: int | None, *, catch_logs: bool
) -> Iterator[dict[str, Any]]:
    """Make fixtures for a test, and end them with it. Log records go to stderr, as in a report of pytest.

    Args:
        names: Some of `HOMES`.
        config: A configuration with a capture manager.
        log_level: What pytest was asked to record; None for what loggers let through.
        catch_logs: Whether to catch log records, which `caplog` needs and ranks that are threads must not.
    """
    with ExitStack() as stack:
        node = _logging_node(stack, log_level) if catch_logs else None
        request = SimpleNamespace(config=config, node=node, fixturename="", raiseerror=_refuse)
        yield {name: stack.enter_context(_made(name, request)) for name in names}


@contextmanager
def _made(name: str, request: SimpleNamespace) -> Iterator[Any]:
    request.fixturename = name
    function = _function(name)
    takes_request = "request" in function.__code__.co_varnames[: function.__code__.co_argcount]
    steps = function(request) if takes_request else function()
    yield next(steps)
    next(steps, None)


def _function(name: str) -> Callable[..., Any]:
    fixture = getattr(import_module(HOMES[name]), name)
    unwrap = getattr(fixture, "_get_wrapped_function", None)
    function: Callable[..., Any] = unwrap() if unwrap else fixture.__pytest_wrapped__.obj
    return function


def _logging_node(stack: ExitStack, level: int | None) -> SimpleNamespace:
    """Catch log records, and return what `caplog` takes for the test that they are of."""
    import pytest
    from _pytest import logging as catching

    told = stack.enter_context(os.fdopen(os.dup(2), "w", buffering=1))  # not what `capfd` will catch
    handlers = catching.LogCaptureHandler(), logging.StreamHandler(told)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(catching.DEFAULT_LOG_FORMAT))
        stack.enter_context(catching.catching_logs(handler, level=level))
    stash = pytest.Stash()
    stash[catching.caplog_handler_key] = handlers[0]
    stash[catching.caplog_records_key] = {"call": handlers[0].records}
    return SimpleNamespace(stash=stash)


def _refuse(message: str) -> None:
    import pytest

    pytest.fail(message, pytrace=False)
