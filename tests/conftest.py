"""The lanes of the suite: `--lane`. What is in which, `tests/lanes.py` says."""

from __future__ import annotations

import compileall
import contextlib
import gc
import os
import shutil
import signal
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardviz.live import world
from shardviz.live.world.torchrun import variables
from shardviz.testing.plugin.marks import spmd_of
from shardviz.testing.plugin.options import is_joined
from tests import lanes
from tests.live import standing
from tests.live.worlds import PATIENCE
from tests.picture.browser import HOW_TO_GET_A_BROWSER, NO_BROWSER

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent
LIVE = TESTS / "live"
COMPILED = ("shardviz", "probes", "tui")
"""Folders whose modules are imported by workers, fork servers, ranks and hundreds of interpreters that tests start."""
NO_SKIPS = "SHARDVIZ_NO_SKIPS"
"""Set by CI, which installs what its tests need: there a test that is skipped fails the run."""
UNSET = ("CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "SHARDVIZ_DEBUG", "TERM", "TTY_COMPATIBLE")
"""What a shell or a CI runner may set, and what no test expects; nor does any that it is a rank of torchrun's."""
MEMORY_DISK = Path("/dev/shm")
ROOM = 2 << 30
"""Bytes that tests may write on the memory disk; in a container with less they write where pytest does."""
HEEDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}

ON_RANKS = (
    "shardviz.live.world.group",
    "shardviz.live.probe",
    "shardviz.live.dumping",
    "shardviz.live.capture.lookup.by_reference",
    "shardviz.live.capture.lookup.masters",
    "shardviz.live.capture.lookup.merges",
    "shardviz.picture.text.page",
    "shardviz.testing.plugin.ranks",
    "hypothesis.strategies",
    "numpy.ma",
    "safetensors.numpy",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.utils.serialization.config",
)
"""Modules that most tests need on their ranks: imported once for all of them, and not by each rank of each world."""
HUGE_PAGES = "tests.huge_pages"
"""What it does once takes half a second, and a worker's tests fork hundreds of ranks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=lanes.LANES, default="default", help="which of shardviz's own tests to run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: runs in the nightly lane only (--lane nightly)")
    config.addinivalue_line("markers", "recorded: by day the contract judges what it recorded (tests/lanes.py)")
    lanes.load_profile(config.getoption("lane"))
    _read_quickly(config)
    _heed_signals()
    _write_in_memory()
    config.option.shardviz_timeout = config.option.shardviz_timeout or PATIENCE
    for name in (*UNSET, *variables(0, 1, 1)):
        os.environ.pop(name, None)
    also = (*ON_RANKS, HUGE_PAGES) if hasattr(config, "workerinput") else ON_RANKS
    world.prepare("spawn", also=also)  # heeded by the fork server that the first test for ranks starts


def _heed_signals() -> None:
    """Let programs that tests start heed the signals that they are sent.

    They inherit what this process ignores: SIGINT in a script's background job, SIGHUP under nohup. A signal that it
    catches has its default effect in them. The suite itself still survives a hangup under nohup.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGCHLD: signal.SIG_DFL}
    for number in HEEDED:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handlers.get(number, lambda *_: None))


def _write_in_memory() -> None:
    """Keep the tests' folders in memory where there is room: they write 60,000 small files."""
    if os.access(MEMORY_DISK, os.W_OK) and shutil.disk_usage(MEMORY_DISK).free > ROOM:
        for name in ("PYTEST_DEBUG_TEMPROOT", "TMPDIR"):
            os.environ.setdefault(name, str(MEMORY_DISK))


def _read_quickly(config: pytest.Config) -> None:
    """Keep what is compiled, also in a container that forbids it, and look for no garbage until all tests are read.

    Where nothing is kept, every worker rewrites the asserts of all tests, and every rank compiles what it imports: a
    sixth of the processor time. Before workers start, all of it is compiled once, on all cores.
    """
    if config.getoption("numprocesses", None):
        roots = [Path(argument.partition("::")[0]) for argument in config.args]
        roots += [TESTS.parent / name for name in COMPILED]
        files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*.py")))]
        read = [file.resolve() for file in files if lanes.is_read(file.resolve(), TESTS, config.getoption("lane"))]
        with get_context("fork").Pool(os.cpu_count()) as pool:
            pool.map(_compile, read, chunksize=8)
    sys.dont_write_bytecode = False
    gc.disable()


def _compile(file: Path) -> None:
    """Write the bytecode of a module, that of a test with its asserts rewritten, unless it is there."""
    if not file.name.startswith(("test_", "conftest.")):
        compileall.compile_file(file, quiet=2)
        return
    hook = next(finder for finder in sys.meta_path if hasattr(finder, "_must_rewrite"))
    spec = spec_from_file_location(file.stem, file, loader=hook)
    assert spec is not None
    module = module_from_spec(spec)
    module.__dict__["__builtins__"] = {}
    with contextlib.suppress(Exception):  # pytest's loader has written it when its first import finds no `__import__`
        hook.exec_module(module)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let no collection walk through the modules that stay until the end, and collect garbage seldom."""
    sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)
    if hasattr(session.config, "workerinput"):
        import_module(HUGE_PAGES)
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give every worker a third of the tests in a row, and let idle ones steal: a module's fixtures are made once."""
    from xdist.scheduler.worksteal import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave unread what a lane does not run; None lets pytest decide."""
    return None if lanes.is_read(collection_path, TESTS, config.getoption("lane")) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lane = config.getoption("lane")
    others = [item for item in items if not lanes.is_of(item, lane)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if lanes.is_of(item, lane)]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """By day, run a test on ranks that stand ready; at night, and if it does not pass there, it has its own."""
    spmd = spmd_of(pyfuncitem)
    if spmd is None or spmd.launch or spmd.backend or (spmd.timeout or 0) > PATIENCE:
        return None
    option = pyfuncitem.config.option
    is_plain = option.lane != "nightly" and not (option.usepdb or option.shardviz_launch or is_joined())
    return (is_plain and standing.has_run(pyfuncitem, spmd)) or None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks that a module's tests have left standing; in `tests/live`, those of a folder."""
    place = (lambda one: one.path.parent) if LIVE in item.path.parents else (lambda one: one.path)
    if nextitem is None or place(nextitem) != place(item):
        standing.end_all()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the last to speak: below the line that counts
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    is_forbidden = skipped and os.environ.get(NO_SKIPS) and session.exitstatus == pytest.ExitCode.OK
    if is_forbidden:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    yield
    pages = sum(NO_BROWSER in str(report.longrepr) for report in skipped)
    if pages:
        reporter.write_line(f"{pages} tests of pages did not run. {HOW_TO_GET_A_BROWSER}", yellow=True)
    if is_forbidden:
        reporter.write_line(f"{len(skipped)} skipped, which {NO_SKIPS} forbids", red=True)
