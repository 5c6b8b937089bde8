"""Every private part of pytest that the plugin uses, as `shardviz.live.compat` for torch.

Tried on pytest 8.2, 8.4 and 9.2. Nothing is imported from `_pytest` before it is needed: the plugin is loaded in every
session of pytest, most of which have no test for ranks.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import ExitStack
    from pathlib import Path
    from types import ModuleType

    from _pytest._code.code import ExceptionChainRepr as ExceptionChainRepr

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
"""pytest's own fixtures that ranks make, and the modules that define them."""

_alive: list[object] = []


# Tests and their fixtures


def argument_names(item: pytest.Function) -> tuple[str, ...]:
    """Return the names of a test's arguments."""
    return item._fixtureinfo.argnames


def is_from_pytest(item: pytest.Function, name: str) -> bool:
    """Whether a test's argument is from a fixture of pytest itself."""
    if name == "request":
        return True
    definitions = item._fixtureinfo.name2fixturedefs.get(name, ())
    return bool(definitions) and str(definitions[-1].func.__module__).startswith("_pytest.")


def fixture_function(name: str) -> Callable[..., Any]:
    """Return the function behind one of `HOMES`."""
    fixture = getattr(import_module(HOMES[name]), name)
    unwrap = getattr(fixture, "_get_wrapped_function", None)
    function: Callable[..., Any] = unwrap() if unwrap else fixture.__pytest_wrapped__.obj
    return function


def skip_where_the_test_is(reason: str) -> BaseException:
    """Return a skip that is reported at the test's own line."""
    return pytest.skip.Exception(reason, _use_item_location=True)


# Modules and the rewriting of assertions


def rewritten_names(config: pytest.Config) -> tuple[str, ...]:
    """Return the names of further modules whose assertions a session rewrites."""
    return tuple(sorted(getattr(_rewriter(config), "_must_rewrite", ())))


def rewrite(config: pytest.Config, names: Iterable[str]) -> None:
    """Let assertions of modules be rewritten when they are imported."""
    _rewriter(config).mark_rewrite(*names)


def import_path(path: Path, *, mode: str, root: Path, namespace_packages: bool) -> ModuleType:
    """Import a test module as pytest does."""
    from _pytest.pathlib import import_path

    return import_path(path, mode=mode, root=root, consider_namespace_packages=namespace_packages)


def explain_assertions(config: pytest.Config) -> None:
    """Make failed assertions show the values that they compared, as pytest does in a test."""
    from _pytest import assertion

    running = SimpleNamespace(config=config, ihook=config.hook, nodeid="")
    hooked = assertion.pytest_runtest_protocol(running)  # type: ignore[arg-type]
    next(hooked)
    _alive.append(hooked)  # its end would take the hooks away again


def make_config(args: list[str]) -> pytest.Config:
    """Return a configuration; parsing it installs the rewriting of assertions."""
    from _pytest.config import get_config
    from _pytest.terminal import TerminalReporter

    config = get_config(args)
    config.parse(args)
    config.pluginmanager.register(TerminalReporter(config, sys.stdout), "terminalreporter")  # it colors diffs
    return config


def _rewriter(config: pytest.Config) -> Any:
    return getattr(config.pluginmanager, "rewrite_hook", None)


# Warnings and logs


def filter_warnings(configured: Iterable[str], on_command_line: Iterable[str], marked: Iterable[str]) -> None:
    """Apply warning filters from the configuration, the command line and marks."""
    from _pytest.config import apply_warning_filters, parse_warning_filter

    apply_warning_filters(configured, on_command_line)
    for text in marked:
        warnings.filterwarnings(*parse_warning_filter(text, escape=False))


def log_level(config: pytest.Config) -> int | None:
    """Return `--log-level`; None if it was not given."""
    from _pytest.logging import get_log_level_for_setting

    return get_log_level_for_setting(config, "log_level")


def catch_logs(stack: ExitStack, level: int | None) -> SimpleNamespace:
    """Catch log records until a stack ends; return an object that `caplog` accepts."""
    from _pytest import logging as catching

    stderr = stack.enter_context(os.fdopen(os.dup(2), "w", buffering=1))  # not what `capfd` will catch
    handlers = catching.LogCaptureHandler(), logging.StreamHandler(stderr)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(catching.DEFAULT_LOG_FORMAT))
        stack.enter_context(catching.catching_logs(handler, level=level))
    handlers[1].addFilter(_is_for_readers)
    stash = pytest.Stash()
    stash[catching.caplog_handler_key] = handlers[0]
    stash[catching.caplog_records_key] = {"call": handlers[0].records}
    return SimpleNamespace(stash=stash)


def _is_for_readers(record: logging.LogRecord) -> bool:
    """Whether a logger lets anybody read a record: torch's checkpoints log at every call, for a handler of Meta's.

    pytest 9 also catches what loggers do not propagate.
    """
    logger = logging.getLogger(record.name)
    return logger.propagate or not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)


# Capture


@contextmanager
def without_capture(config: pytest.Config) -> Iterator[None]:
    """Give the session its own streams back for a while."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend(in_=True)
    try:
        yield
    finally:
        if capture is not None:
            capture.resume()


# What failures look like


def plain_failure(text: str, path: str, line: int) -> ExceptionChainRepr:
    """Return pytest's representation of a failure that has no traceback."""
    from _pytest._code.code import ExceptionChainRepr, ReprEntry, ReprFileLocation, ReprTraceback

    traceback_entry = ReprEntry([f"E   {text_line}" for text_line in text.splitlines()], None, None, None, "long")
    crash = ReprFileLocation(path, line, text)
    return ExceptionChainRepr([(ReprTraceback([traceback_entry], None, "long"), crash, None)])


def as_failure(shown: object) -> ExceptionChainRepr | None:
    """Return the representation of an exception, the only kind that takes a title; else None."""
    from _pytest._code.code import ExceptionChainRepr

    return shown if isinstance(shown, ExceptionChainRepr) else None


def traceback_of(entries: Iterable[Any]) -> Any:
    """Return a traceback of these entries."""
    from _pytest._code.code import Traceback

    return Traceback(entries)
