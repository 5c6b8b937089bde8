"""The parcel sent to ranks for one test: its place, its arguments, and how to show failures; and its module there.

Ranks import test modules as pytest imported them, with its rewriting of assertions.

Names that `setup_module`, `setup_class` and fixtures bind in a test's module and class are sent, too. Ranks import the
test module afresh, or fork from a process that did. A name that was bound in pytest's own process since the tests were
collected is bound on the ranks before the test runs there.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardviz.errors import ShardvizError
from shardviz.live.world.torchrun import with_environment
from shardviz.testing.plugin import compat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pytest

    from shardviz.layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Source:
    """Where a test module is, and how pytest imported it.

    Attributes:
        name: Its name in `sys.modules`.
        mode: `--import-mode`.
        root: pytest's root folder.
        namespace_packages: Whether folders without `__init__.py` may be packages.
        rewritten: Names of modules whose assertions are rewritten; None for `--assert=plain`.
    """

    name: str
    path: Path
    mode: str
    root: Path
    namespace_packages: bool
    rewritten: tuple[str, ...] | None


def source_of(item: pytest.Function) -> Source:
    """Return the test module of an item, as pytest imported it."""
    config, name = item.config, item.module.__name__
    rewritten = (name, *compat.rewritten_names(config)) if config.option.assertmode == "rewrite" else None
    namespaces = bool(config.getini("consider_namespace_packages"))
    return Source(name, item.path, config.getoption("importmode"), config.rootpath, namespaces, rewritten)


def load(source: Source) -> ModuleType:
    """Import a test module, unless that was done before it was forked."""
    module_here = sys.modules.get(source.name)
    if module_here is not None and getattr(module_here, "__file__", None) == str(source.path):
        return module_here
    if source.rewritten is not None:
        compat.rewrite(config(source.root), source.rewritten)
    return compat.import_path(
        source.path, mode=source.mode, root=source.root, namespace_packages=source.namespace_packages
    )


def explain_assertions(source: Source, verbosity: int) -> None:
    """Make failed assertions say what they compared, as pytest does while a test runs."""
    if source.rewritten is None:
        return
    configured = config(source.root)
    configured.option.verbose = verbosity
    compat.explain_assertions(configured)


@cache
def config(root: Path) -> pytest.Config:
    """Return a pytest configuration without the user's plugins; it rewrites assertions."""
    args = ["-c", os.devnull, "--rootdir", str(root), "--noconftest", "-p", "no:cacheprovider", "-p", "no:shardviz"]
    with with_environment({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": None, "PYTEST_PLUGINS": None}):
        return compat.make_config(args)


class FixtureError(ShardvizError):
    """A fixture's value cannot be sent to ranks."""


@dataclass(frozen=True, slots=True)
class FailureStyle:
    """How pytest's options say to show failures.

    Attributes:
        traceback: `--tb`.
        full: `--full-trace`.
        show_locals: `--showlocals`.
        verbosity: The number of `-v`.
    """

    traceback: str = "auto"
    full: bool = False
    show_locals: bool = False
    verbosity: int = 0


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a test, ready to be sent.

    Attributes:
        values: Pickled values, by name.
        indices: Parametrized arguments that cannot pickle, by their place in the list of values.
        meshes: Names of the arguments that are the device mesh.
        made: Names of pytest's own fixtures that ranks make themselves.
    """

    values: Mapping[str, bytes]
    indices: Mapping[str, int]
    meshes: tuple[str, ...]
    made: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parcel:
    """One test on its way to the ranks.

    Attributes:
        owner: The qualified name of the test's class; empty for a function.
        function: The test's name in its class or module.
        instance: The pickled instance of the class, as setup methods left it.
        module_bindings: What was bound in the test module since it was collected, pickled.
        class_bindings: The same of the test's class.
        seed: The seed of torch, numpy and random on every rank.
        filters: Warning filters as pytest has them: those of its configuration, of its command line, of marks.
        log_level: `--log-level`; None if it was not given.
        style: How a failure is shown.
        folder: Where ranks write how the test ended.
        terminal: The terminal that a debugger may open; empty without `--pdb`.
    """

    source: Source
    owner: str
    function: str
    instance: bytes
    arguments: Arguments
    module_bindings: Mapping[str, bytes]
    class_bindings: Mapping[str, bytes]
    mesh: Mesh
    seed: int
    filters: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    log_level: int | None
    style: FailureStyle
    folder: Path
    terminal: str = ""


def pack_arguments(item: pytest.Function, mesh: Mesh) -> Arguments:
    """Pickle the arguments of a test.

    Args:
        mesh: The value that the fixture `mesh` gave: arguments that are it become the device mesh.

    Raises:
        FixtureError: A value cannot be pickled, and is not a parameter of the test.
    """
    values, indices, meshes, fixture_names = {}, {}, [], []
    positions: Mapping[str, int] = item.callspec.indices if hasattr(item, "callspec") else {}
    for name in compat.argument_names(item):
        value = item.funcargs[name]
        if value is mesh:
            meshes.append(name)
            continue
        is_pytest_fixture = compat.is_from_pytest(item, name)
        if is_pytest_fixture and name in compat.HOMES:
            fixture_names.append(name)
            continue
        try:
            values[name] = pickle.dumps(value)
        except Exception as error:
            if name not in positions or name not in item.callspec.params:
                raise (_own_fixture_error(name) if is_pytest_fixture else _cannot_send(name, value, error)) from None
            indices[name] = positions[name]
    return Arguments(values, indices, tuple(meshes), tuple(fixture_names))


def pack_instance(item: pytest.Function) -> bytes:
    """Pickle the instance of a test's class; empty for a function.

    Raises:
        FixtureError: Something that a setup method left on it cannot pickle.
    """
    if item.cls is None:
        return b""
    try:
        return pickle.dumps(item.instance)
    except Exception as error:
        kind = item.cls.__name__
        hint = "create what cannot be sent in the test itself, which runs on every rank"
        raise FixtureError(f"the instance of {kind} cannot be sent to ranks: {error}", hint) from None


def unpack_arguments(parcel: Parcel, module: ModuleType) -> dict[str, Any]:
    """Return a test's arguments on a rank, all but the mesh.

    Raises:
        FixtureError: A value cannot be read here.
    """
    values: dict[str, Any] = {name: _parameter(parcel, module, name) for name in parcel.arguments.indices}
    for name, pickled in parcel.arguments.values.items():
        try:
            values[name] = pickle.loads(pickled)
        except Exception as error:
            hint = "define its class in a module that ranks can import"
            raise FixtureError(f"fixture {name!r} cannot be read in a rank: {error}", hint) from None
    return values


def owner_of(parcel: Parcel, module: ModuleType) -> Any:
    """Return the class that a test is in, or its module."""
    owner: Any = module
    for attribute in parcel.owner.split(".") if parcel.owner else ():
        owner = getattr(owner, attribute)
    return owner


def _parameter(parcel: Parcel, module: ModuleType, name: str) -> Any:
    """Read a parametrized value from the mark, in the rank's own import of the test module."""
    owner = owner_of(parcel, module)
    for place in (getattr(owner, parcel.function), owner, module):
        marks: Any = getattr(place, "pytestmark", [])
        for mark in marks if isinstance(marks, list | tuple) else [marks]:
            wrapped: Any = getattr(mark, "mark", mark)
            if wrapped.name == "parametrize" and name in (names := _names(wrapped.args[0])):
                values = list(wrapped.args[1])[parcel.arguments.indices[name]]
                values = getattr(values, "values", values)
                return values[names.index(name)] if isinstance(values, tuple) else values
    raise FixtureError(f"the value of {name!r} cannot be sent to ranks, nor be found in its parametrize mark")


def _names(given: Any) -> list[str]:
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)


def _own_fixture_error(name: str) -> FixtureError:
    return FixtureError(
        f"fixture {name!r} is pytest's own and stays in its process: it cannot be sent to ranks",
        f"take {name} in a fixture of your own, and let that return what the test needs",
    )


def _cannot_send(name: str, value: object, error: Exception) -> FixtureError:
    return FixtureError(
        f"fixture {name!r} gave a {type(value).__name__}, which cannot be sent to ranks: {error}",
        f"make it in the test, which runs on every rank, or let {name!r} return plain data",
    )


CollectedNames = Mapping[object, Mapping[str, Any]]
"""The names in test modules and classes when collection ended, with their values, by module or class."""


def collected(items: Iterable[pytest.Item]) -> CollectedNames:
    """Note the names in the modules and classes of tests."""
    places = {place for item in items for place in (getattr(item, "module", None), getattr(item, "cls", None))}
    return {place: dict(vars(place)) for place in places if place is not None}


def pack_bound(place: object, before: CollectedNames) -> dict[str, bytes]:
    """Pickle the names bound in a module or class since it was collected.

    What cannot be sent is left out of a module, because other tests bind names there too.

    Raises:
        FixtureError: Something that was bound in a class cannot be sent.
    """
    bindings: dict[str, bytes] = {}
    for name, value in _names_bound_since(place, before):
        try:
            bindings[name] = pickle.dumps(value)
        except Exception as error:
            if isinstance(place, type):
                what = f"{place.__name__}.{name}, which is set before the test, cannot be sent to ranks: {error}"
                raise FixtureError(what, "make it in the test itself, which runs on every rank") from None
    return bindings


def bind(sent: Parcel, module: ModuleType) -> None:
    """Bind on a rank the names that were bound in pytest's own process."""
    for place, bindings in ((module, sent.module_bindings), (owner_of(sent, module), sent.class_bindings)):
        for name, pickled in bindings.items():
            setattr(place, name, pickle.loads(pickled))


def _names_bound_since(place: object, before: CollectedNames) -> Iterator[tuple[str, Any]]:
    names_before = before.get(place)
    if names_before is None:
        return
    for name, value in vars(place).items():
        is_new = name not in names_before or names_before[name] is not value
        if is_new and name.isidentifier() and not name.startswith("__") and not isinstance(value, ModuleType):
            yield name, value
