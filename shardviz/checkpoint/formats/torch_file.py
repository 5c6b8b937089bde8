"""Files of `torch.save`: state dicts, alone or nested, read without running anything.

Names of nested state dicts are joined by dots, as torch.distributed.checkpoint joins them: `model.layers.0.weight`. The
format is the archive that torch writes since 1.6.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.formats.archive import Archive, open_archive, strides_of
from shardviz.checkpoint.formats.pickle_reader import PickledObject
from shardviz.checkpoint.records import ByteRange, Checkpoint, Chunk, Problem, StoredTensor
from shardviz.errors import DumpError
from shardviz.layout.dtypes import itemsize
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
BY_ITSELF = "pass a file of torch.save that has tensors alone"
MAX_DEPTH = 8
"""Levels of nested state dicts: an optimizer's states are on the third."""
MAX_TENSORS = 1 << 20
Parts = tuple[str, ...]


def read_torch_file(path: Path) -> Checkpoint:
    """Read which tensors a file has, and where; none of their elements.

    Raises:
        DumpError: It is missing or damaged, has no tensor, or has what is not among the types of a checkpoint.
    """
    _refuse_bare_pickle(path)
    archive = open_archive(path)
    tensors: dict[str, StoredTensor] = {}
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for parts, leaf in _leaves(archive.tree):
        name = printable(".".join(parts))
        if type(leaf) is not PickledObject:
            values[name] = leaf
            continue
        saved = whole_tensor(archive, leaf, name, path.parent)
        if saved is not None:
            tensors[name] = saved
        elif archive.tensor(leaf, name) is not None:
            problems.append(Problem(name, "it is not stored row by row: save it with .contiguous()"))
    if not tensors and not problems:
        raise DumpError(
            f"{path} has no tensor in a state dict",
            "save a dict with their names, such as model.state_dict()",
        )
    return Checkpoint(path, "torch.save", tensors, values=values, problems=tuple(problems))


def _refuse_bare_pickle(path: Path) -> None:
    """Raise for a pickle without an archive around it, as torch wrote before 1.6."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(1) == b"\x80":
            raise DumpError(
                f"{path} is a pickle, and not the archive that torch.save writes since torch 1.6",
                "load it and save it again with torch.save",
            )


def _leaves(tree: Any) -> Iterator[tuple[Parts, Any]]:
    """Yield every leaf of a nested state dict with its path.

    Dicts are split, and so are lists that contain dicts or tensors; torch.distributed.checkpoint flattens a state dict
    in the same way. Levels below `MAX_DEPTH` are ignored.
    """
    stack: list[tuple[Parts, Any]] = [((), tree)]
    count = 0
    while stack and count < MAX_TENSORS:
        at, node = stack.pop()
        count += 1
        inner = _inner(node)
        if inner is None:
            if at:
                yield at, node
        elif len(at) < MAX_DEPTH:
            stack += [((*at, name), value) for name, value in reversed(inner)]


def _inner(node: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a dict, or of a list of dicts or tensors, by name; None for others."""
    if type(node) is dict:
        return [(str(key), value) for key, value in node.items() if type(key) in (str, int)]
    if type(node) is list and any(type(value) in (dict, PickledObject) for value in node):
        return [(str(at), value) for at, value in enumerate(node)]
    return None


def whole_tensor(archive: Archive, pickled: Any, name: str, folder: Path) -> StoredTensor | None:
    """Return a tensor that one file has all of, row by row; None for what is not one."""
    stored = archive.tensor(pickled, name)
    if stored is None:
        return None
    size = math.prod(stored.shape)
    place = ByteRange(archive.path.name, stored.start, size * itemsize(stored.dtype))
    chunk = Chunk((0,) * len(stored.shape), stored.shape, place, stored.dtype)
    in_rows = stored.strides == strides_of(stored.shape) or size < 2
    return StoredTensor(name, stored.shape, stored.dtype, (chunk,), folder) if in_rows else None
