"""Checkpoint files that a job opens by itself: its weights may be copied from there by hand, which no hook sees."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.checkpoint.formats.headers import index_in
from shardviz.errors import ShardvizError
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.compat import clean_name
from shardviz.reference.files import Reference, open_reference
from shardviz.reference.names import matched, wrapped_alone
from shardviz.stamping.target import SAFETENSORS, json_object

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch import nn

    from shardviz.reference.files import Entry

MOST = 64
"""Files that are remembered, the newest: a job may keep its data in safetensors files, too."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint that the job has opened a file of. Whether it loaded anything from it is not known.

    Attributes:
        path: The file, or the folder whose index names it.
        is_snapshot: Always: the job may have changed what it read.
        is_guess: Always: it is compared with only where some rank holds what it has, or nothing else is known.
    """

    path: Path
    is_snapshot: bool = True
    is_guess: bool = True

    def entries(self, root: nn.Module, names: Collection[str]) -> dict[str, Entry]:
        """Return what the checkpoint has of a model, by the model's names."""
        reference = self.opened()
        if reference is None:
            return {}
        found = dict(matched(names, reference.entries).names)
        found |= _wrapped(root, [name for name in names if name not in found], reference, set(found.values()))
        return {name: reference.entries[other] for name, other in found.items()}

    def opened(self) -> Reference | None:
        """Return what it has, if it can be read."""
        with suppress(ShardvizError, OSError):  # it may be gone by now, and it was never asked for
            return open_reference(self.path)
        return None


def _wrapped(root: nn.Module, names: Iterable[str], reference: Reference, used: set[str]) -> dict[str, str]:
    """Return what a checkpoint has of weights whose modules the job has put into others since, such as LoRA's."""
    shapes = {clean_name(name): tuple(one.shape) for _, name, one in named_tensors(root)}
    others = {name: one.shape for name, one in reference.entries.items() if name not in used}
    return wrapped_alone(names, others, lambda name, other: shapes.get(name) == others[other])


def checkpoint_of(file: str | Path) -> tuple[Path, str]:
    """Return the checkpoint that a file is of, and the file's name in it: empty where it is a checkpoint by itself."""
    path = Path(os.path.abspath(file))
    index = index_in(path.parent) if path.suffix == SAFETENSORS and path.is_file() else None
    named = json_object(index.read_bytes()).get("weight_map") if index else None
    return (path.parent, path.name) if isinstance(named, dict) and path.name in named.values() else (path, "")
