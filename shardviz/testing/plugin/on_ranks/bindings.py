"""Names that `setup_module`, `setup_class` and fixtures bind in a test's module and class: ranks get them too.

Ranks import the test module afresh, or fork from a process that did. A name that was bound in pytest's own process
since the tests were collected is bound on the ranks before the test runs there.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardviz.testing.plugin.on_ranks.parcel import FixtureError, owner_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pytest

    from shardviz.testing.plugin.on_ranks.parcel import Parcel

Bindings = dict[str, bytes]
"""Pickled values by name."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The names of test modules and classes as they were when collection ended.

    Attributes:
        names: By module or class, its names and values.
    """

    names: Mapping[object, Mapping[str, Any]] = field(default_factory=dict)


def collected(items: Iterable[pytest.Item]) -> Collected:
    """Note the names in the modules and classes of tests."""
    places = {place for item in items for place in (getattr(item, "module", None), getattr(item, "cls", None))}
    return Collected({place: dict(vars(place)) for place in places if place is not None})


def pack_bound(place: object, before: Collected) -> Bindings:
    """Pickle the names bound in a module or class since it was collected.

    What cannot be sent is left out of a module, because other tests bind names there too.

    Raises:
        FixtureError: Something that was bound in a class cannot be sent.
    """
    bindings: Bindings = {}
    for name, value in _bound_since(place, before):
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


def _bound_since(place: object, before: Collected) -> Iterator[tuple[str, Any]]:
    known = before.names.get(place)
    if known is None:
        return
    for name, value in vars(place).items():
        is_new = name not in known or known[name] is not value
        if is_new and name.isidentifier() and not name.startswith("__") and not isinstance(value, ModuleType):
            yield name, value
