"""Find and name silent sharding bugs in PyTorch models.

The names below are imported when they are first used, so that `import shardviz` costs nothing and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardviz.check.run import check_dump
    from shardviz.commands.python import run_probe, show
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.live.api import capture, capture_sharding
    from shardviz.live.capture.stamp import stamp
    from shardviz.live.run.watching import watch
    from shardviz.notebook.load import diff, load
    from shardviz.versions import __version__ as __version__

_HOMES = {
    "__version__": "shardviz.versions",
    "LightningCallback": "shardviz.live.run.watching",
    "Layout": "shardviz.layout.layout",
    "Mesh": "shardviz.layout.mesh",
    "TrainerCallback": "shardviz.live.run.watching",
    "capture": "shardviz.live.api",
    "capture_sharding": "shardviz.live.api",
    "check_dump": "shardviz.check.run",
    "diff": "shardviz.notebook.load",
    "load": "shardviz.notebook.load",
    "run_probe": "shardviz.commands.python",
    "show": "shardviz.commands.python",
    "stamp": "shardviz.live.capture.stamp",
    "watch": "shardviz.live.run.watching",
}

__all__ = [
    "Layout",
    "Mesh",
    "capture",
    "capture_sharding",
    "check_dump",
    "diff",
    "load",
    "run_probe",
    "show",
    "stamp",
    "watch",
]
# Not the callbacks: `from shardviz import *` would need their libraries.


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardviz' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
