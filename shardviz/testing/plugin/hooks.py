"""The pytest plugin's hooks: tests marked with a mesh run on its ranks. Imports are lazy."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from shardviz.testing.plugin.options import add_options, is_joined

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from shardviz.layout.mesh import Mesh
    from shardviz.testing.plugin.launching import Preload

_FAILED = pytest.StashKey[bool]()
_PRELOAD: pytest.StashKey[Preload] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shardviz-*`."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "mesh(axis=size, ...): run the test on every rank of a mesh (shardviz)")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Start to import torch for the ranks as soon as a file looks as if it had a test for them."""
    config = parent.config
    if is_joined() or config.option.collectonly or _PRELOAD in config.stash:
        return
    text = module_path.read_bytes()
    if b"spmd" in text or b"mark.mesh" in text:
        from shardviz.testing.plugin.launching import Preload

        config.stash[_PRELOAD] = Preload(config)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the tests for ranks, and let the fork server import their modules."""
    preload = session.config.stash.get(_PRELOAD, None)
    if preload is None and "shardviz.testing.plugin.marks" not in sys.modules:
        return
    from shardviz.testing.plugin import launching
    from shardviz.testing.plugin.parcel import collected

    items = [item for item in session.items if item.get_closest_marker("mesh")]
    session.config.stash[launching.COLLECTED] = collected(items)
    if preload is not None:
        preload.finish(items)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Wait for nothing more, if collection was interrupted."""
    preload = config.stash.get(_PRELOAD, None)
    if preload is not None:
        preload.end()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a test that cannot run on ranks before its fixtures are set up."""
    if item.get_closest_marker("mesh") is None:
        return
    from shardviz.testing.plugin.marks import check_item

    check_item(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks."""
    __tracebackhide__ = True
    if pyfuncitem.get_closest_marker("mesh") is None:
        return None
    from shardviz.testing.plugin import launching
    from shardviz.testing.plugin.marks import spmd_of

    spmd = spmd_of(pyfuncitem)
    assert spmd is not None
    (launching.run_here if is_joined() else launching.run)(pyfuncitem, spmd)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the traceback of the rank at fault, and where its dump is."""
    report = yield
    if call.when == "call" and call.excinfo is not None and item.get_closest_marker("mesh"):
        from shardviz.testing.plugin.outcome import report_story

        report_story(item, report)
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """The mesh of a test on ranks: its `DeviceMesh` in the test, axes and sizes in fixtures."""
    from shardviz.testing.plugin.launching import MESH
    from shardviz.testing.plugin.marks import spmd_of

    spmd = spmd_of(request.node)
    if spmd is None:
        pytest.fail(f"{request.node.name} takes mesh but names none: mark it with @spmd(mesh=...)", pytrace=False)
    request.node.stash[MESH] = spmd.mesh
    return spmd.mesh


@pytest.fixture
def shard_dump(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder for a test's dump, the same on every rank; kept when the test fails."""
    folder = tmp_path / f"{request.node.originalname}.shardviz"
    yield folder
    if not request.node.stash.get(_FAILED, False):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str | None:
    """List the options that were given, if any were."""
    names = ("ranks", "launch", "timeout", "seed")
    options_given: dict[str, Any] = {name: config.getoption(f"shardviz_{name}") for name in names}
    options = ", ".join(f"{name} {value}" for name, value in options_given.items() if value is not None)
    return f"shardviz: {options}" if options else None
