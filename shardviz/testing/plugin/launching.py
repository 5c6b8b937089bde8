"""A marked test in pytest's process: sent to ranks, or run here if pytest is a rank.

Under torchrun pytest itself runs on every rank, and the test's body runs on the ranks that are there.

The fork server is started while pytest still collects. It imports torch first, then waits for the list of modules,
which is known when collection has ended. Ranks then find everything imported, and a test starts in the time of a fork.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import warnings
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from shardviz.errors import RankError, ShardvizError
from shardviz.layout.mesh import ranks_by
from shardviz.live import world
from shardviz.testing.plugin import compat, debugging, outcome
from shardviz.testing.plugin.options import launch_method, ranks_seed, ranks_timeout, timeout_of
from shardviz.testing.plugin.outcome import STORY, find_root, plain_story, story_of
from shardviz.testing.plugin.parcel import (
    CollectedNames,
    FailureStyle,
    Parcel,
    pack_arguments,
    pack_bound,
    pack_instance,
    source_of,
)
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardviz.layout.mesh import Mesh
    from shardviz.live.world import World
    from shardviz.testing.plugin.marks import SpmdMark
    from shardviz.testing.plugin.outcome import Outcome, Warned


TASK = "shardviz.testing.plugin.ranks:run_test"
MESH: pytest.StashKey[Mesh] = pytest.StashKey()
"""The mesh that a test got from the fixture `mesh`."""
COLLECTED: pytest.StashKey[CollectedNames] = pytest.StashKey()
"""The state of test modules and classes when collection ended."""
DEBUGGING_TIMEOUT = 24 * 3600.0


def run(item: pytest.Function, spmd: SpmdMark) -> None:
    """Run a test on ranks; skip, xfail or raise as it did there."""
    __tracebackhide__ = True
    with TemporaryDirectory(prefix="shardviz-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            pass_on(_launch(item, spmd, folder))
        except ShardvizError as error:
            end = _end(item, error, outcome.read(folder), spmd.mesh.labels)
            raise debugging.DebuggedTest(end) if (folder / debugging.MARK).exists() else end from None


def _launch(item: pytest.Function, spmd: SpmdMark, folder: Path) -> list[Warned]:
    """Run a test on ranks and show what they printed; return the warnings of all of them."""
    config = item.config
    terminal = debugging.terminal(config) if config.getoption("usepdb") else ""
    printed: dict[int, str] = {}
    try:
        warned = world.launch(
            TASK,
            (pack(item, spmd, folder, terminal),),
            num_ranks=spmd.mesh.size,
            method=spmd.launch or launch_method(config),
            backend=spmd.backend,
            timeout=DEBUGGING_TIMEOUT if terminal else timeout_of(item, spmd.timeout),
            coords=spmd.mesh.labels,
            on_output=printed.__setitem__,
        )
    finally:
        _show_output(item, printed, spmd.mesh.labels)
    return [one for of_rank in warned for one in of_rank]


def pack(item: pytest.Function, spmd: SpmdMark, folder: Path, terminal: str = "") -> Parcel:
    """Make the parcel of a test whose fixtures are set up.

    Raises:
        FixtureError: A value cannot be sent to ranks.
    """
    config = item.config
    style = FailureStyle(
        config.option.tbstyle, config.option.fulltrace, config.option.showlocals, config.get_verbosity()
    )
    marked = tuple(text for mark in item.iter_markers("filterwarnings") for text in mark.args)
    before = config.stash.get(COLLECTED, {})
    configured, on_command_line = config.getini("filterwarnings"), config.known_args_namespace.pythonwarnings or ()
    return Parcel(
        source=source_of(item),
        owner=item.cls.__qualname__ if item.cls is not None else "",
        function=item.originalname,
        instance=pack_instance(item),
        arguments=pack_arguments(item, item.stash.get(MESH, spmd.mesh)),
        module_bindings=pack_bound(item.module, before),
        class_bindings=pack_bound(item.cls, before),
        mesh=spmd.mesh,
        seed=ranks_seed(config),
        filters=(tuple(configured), tuple(on_command_line), marked),
        log_level=compat.log_level(config),
        style=style,
        folder=folder,
        terminal=terminal,
    )


def _end(item: pytest.Function, failure: ShardvizError, ends: list[Outcome], coords: list[str]) -> BaseException:
    """Return the exception of the rank that failed first, and keep its story for the report."""
    root = find_root(failure, ends)
    if root is not None and root.kind == "skipped":
        return compat.skip_where_the_test_is(root.reason)
    if root is not None and root.kind == "xfailed":
        return pytest.xfail.Exception(root.reason)
    if root is None:
        item.stash[STORY] = plain_story(failure, item)
        return failure
    item.stash[STORY] = story_of(root, failure, ends, coords, ranks_seed(item.config))
    return root.exception() or RankError(f"rank {root.rank}: {root.reason}")


def _show_output(item: pytest.Function, printed: dict[int, str], coords: list[str]) -> None:
    """Add what ranks printed to the report, equal outputs once; without capture, print it."""
    for text, ranks in ranks_by((rank, text) for rank, text in sorted(printed.items()) if text.strip()).items():
        name = f"rank {ranks[0]} ({coords[ranks[0]]})" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        if item.config.getoption("capture") == "no":
            sys.stdout.writelines(f"[{name}] {line}\n" for line in text.splitlines())
        else:
            item.add_report_section("call", f"output of {name},", text)


def pass_on(warned: Iterable[Warned]) -> None:
    """Give the warnings of all ranks again, each once."""
    for pickled, file, line in dict.fromkeys(warned):
        with suppress(pickle.PickleError, ImportError, AttributeError, EOFError):
            warning = pickle.loads(pickled)
            warnings.warn_explicit(warning, None, file, line)


_JOINED: pytest.StashKey[ExitStack] = pytest.StashKey()


def run_here(item: pytest.Function, spmd: SpmdMark) -> None:
    """Run a test on this rank of a job that is large enough for its mesh and no larger."""
    __tracebackhide__ = True
    joined = world.torchrun_world(spmd.backend)
    assert joined is not None
    if joined.num_ranks != spmd.mesh.size:
        pytest.skip(f"mesh {spmd.mesh} has {counted(spmd.mesh.size, 'rank')}, this job has {joined.num_ranks}")
    from shardviz.live.world import group
    from shardviz.testing.plugin import ranks

    _join(item.config, joined)
    group.seed(ranks_seed(item.config))
    values = _arguments(item)
    device_mesh = ranks.device_mesh(spmd.mesh, joined.device_type)
    plain = item.stash.get(MESH, None)
    ranks.call(partial(item.obj, **{n: device_mesh if v is plain else v for n, v in values.items()}), item.name)


def _join(config: pytest.Config, joined: World) -> None:
    """Join the job for the rest of the session: torchrun's store lets ranks meet only once."""
    if _JOINED in config.stash:
        return
    from shardviz.live.world import group

    config.stash[_JOINED] = stack = ExitStack()
    stack.enter_context(group.joined(joined, ranks_timeout(config)))
    config.add_cleanup(stack.close)


def _arguments(item: pytest.Function) -> dict[str, Any]:
    """Return a test's arguments; the folder for its dump is rank 0's on every rank."""
    from torch import distributed

    values = {name: item.funcargs[name] for name in compat.argument_names(item)}
    if "shard_dump" in values:
        shared = [values["shard_dump"]]
        distributed.broadcast_object_list(shared)
        values["shard_dump"] = shared[0]
    return values


SERVER = "shardviz.testing.plugin.server"
VARIABLE = "SHARDVIZ_TEST_MODULES"


class Preload:
    """Starts the fork server at the first sign of a test on ranks; ends with collection."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder: Path | None = None
        if launch_method(config) == "spawn":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="shardviz-modules-"))
        os.environ[VARIABLE] = str(self._folder / "modules")
        world.prepare(launch_method(config), (SERVER,))
        del os.environ[VARIABLE]

    def finish(self, items: Sequence[pytest.Item]) -> None:
        """Tell which modules tests for ranks are in. Only the first call counts."""
        if self._folder is None or (self._folder / "modules").exists():
            return
        sources = {source_of(item): None for item in items if isinstance(item, pytest.Function)}
        unfinished = self._folder / "modules.tmp"
        unfinished.write_bytes(pickle.dumps((tuple(sys.path), list(sources))))
        unfinished.rename(self._folder / "modules")

    def end(self) -> None:
        """Leave nothing behind."""
        self.finish([])
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
