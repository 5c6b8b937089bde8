"""Tests of sharded models: run them on every rank of a mesh; assert layouts and values.

    from shardviz.testing import assert_layout, spmd

    @spmd(mesh={"fsdp": 2, "tp": 4})
    def test_weights_are_split_over_tp_then_fsdp(mesh):
        model = parallelize(build(), mesh)
        assert_layout(model, {"*.weight": "[*/tp/fsdp, *]"})

The pytest plugin is `shardviz.testing.plugin.hooks`; nothing here is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardviz.live.capture.stamp import stamp as stamp
    from shardviz.live.probe import load_probe as load_probe
    from shardviz.testing.assertions.calls import assert_clean as assert_clean
    from shardviz.testing.assertions.calls import assert_layout as assert_layout
    from shardviz.testing.assertions.calls import assert_ordered as assert_ordered
    from shardviz.testing.assertions.calls import assert_reduced as assert_reduced
    from shardviz.testing.assertions.calls import assert_replicated as assert_replicated
    from shardviz.testing.assertions.calls import assert_tied as assert_tied
    from shardviz.testing.assertions.equality import assert_same as assert_same
    from shardviz.testing.assertions.message import ShardAssertionError as ShardAssertionError
    from shardviz.testing.plugin.marks import spmd as spmd
    from shardviz.testing.trips.roundtrip import assert_checkpoint_roundtrip as assert_checkpoint_roundtrip
    from shardviz.testing.trips.transfer import assert_transferred as assert_transferred

_HOMES = {
    "ShardAssertionError": "shardviz.testing.assertions.message",
    "assert_checkpoint_roundtrip": "shardviz.testing.trips.roundtrip",
    "assert_clean": "shardviz.testing.assertions.calls",
    "assert_layout": "shardviz.testing.assertions.calls",
    "assert_ordered": "shardviz.testing.assertions.calls",
    "assert_reduced": "shardviz.testing.assertions.calls",
    "assert_replicated": "shardviz.testing.assertions.calls",
    "assert_same": "shardviz.testing.assertions.equality",
    "assert_tied": "shardviz.testing.assertions.calls",
    "assert_transferred": "shardviz.testing.trips.transfer",
    "load_probe": "shardviz.live.probe",
    "spmd": "shardviz.testing.plugin.marks",
    "stamp": "shardviz.live.capture.stamp",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardviz.testing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
