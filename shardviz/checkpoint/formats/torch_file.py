"""What torch saves, read without running anything: files of `torch.save`, and DCP folders.

Names of nested state dicts are joined by dots, as torch.distributed.checkpoint joins them: `model.layers.0.weight`. The
format of a file is the archive that torch writes since 1.6. In a folder, `.metadata` says which bytes of which file
hold each tensor. Megatron's dist-checkpointing in its `torch_dist` format is the same, with a `common.pt` beside it
that is not read.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.formats.archive import Archive, open_archive, strides_of
from shardviz.checkpoint.formats.pickle_reader import MAX_BYTES, Global, PickledObject, dict_of, read_pickle
from shardviz.checkpoint.records import MAX_SIZE, ByteRange, Checkpoint, Chunk, Problem, StoredTensor, file_size
from shardviz.errors import DumpError
from shardviz.layout.dtypes import is_dtype, itemsize
from shardviz.layout.region import MAX_DIMS
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

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
            f"{path} has no tensor in a state dict", "save a dict with their names, such as model.state_dict()"
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


METADATA = ".metadata"
_PREFIX = "torch.distributed.checkpoint."
_TENSOR = f"{_PREFIX}metadata.TensorStorageMetadata"
_ENDS = {_TENSOR: "tensor", f"{_PREFIX}metadata.BytesStorageMetadata": "object"}
Places = dict[str, dict[tuple[int, ...] | None, ByteRange]]
"""Where things are stored: by name, and a tensor's chunks by their offsets."""


def read_dcp(folder: Path) -> Checkpoint:
    """Read a folder's metadata; none of its tensors.

    Raises:
        DumpError: The metadata is damaged, or names anything but a checkpoint's own types.
    """
    path = folder / METADATA
    size = file_size(path)
    if size is None or size > MAX_BYTES:
        has = "is missing" if size is None else f"has {size:,} bytes, more than {MAX_BYTES:,}"
        raise DumpError(f"{path} {has}", "give a folder that torch.distributed.checkpoint wrote")
    root = read_pickle(path.read_bytes(), str(path))
    places = _places(dict_of(_field(root, "storage_data"), path, "storage_data", optional=True), path)
    tensors, objects = {}, {}
    for name, metadata in dict_of(_field(root, "state_dict_metadata"), path, "state_dict_metadata").items():
        what = _ENDS.get(metadata.kind) if type(name) is str and type(metadata) is PickledObject else None
        if what is None:
            raise DumpError(f"{path}: state_dict_metadata[{printable(repr(name))[:200]}] is damaged", "copy it again")
        if what == "tensor":
            tensors[name] = _tensor(name, metadata, places.get(name, {}), path)
        elif None in places.get(name, {}):
            objects[name] = places[name][None]
    return Checkpoint(folder, "DCP", tensors, objects)


def _field(made: Any, name: str) -> Any:
    return made.field(name) if type(made) is PickledObject else None


def _places(stored: dict[Any, Any], path: Path) -> Places:
    places: Places = {}
    for index, info in stored.items():
        name, offsets = _field(index, "fqn"), _field(index, "offset")
        if type(name) is not str:
            raise DumpError(f"{path}: storage_data has an entry without a name", "copy it again")
        key = None if offsets is None else _numbers(offsets, f"{path}: the offset of {printable(name)}")
        places.setdefault(name, {})[key] = _place(info, name, path)
    return places


def _place(info: Any, name: str, path: Path) -> ByteRange:
    where = f"{path}: storage_data of {printable(name)}"
    file, through = _field(info, "relative_path"), _field(info, "transform_descriptors")
    start, size = _numbers((_field(info, "offset"), _field(info, "length")), where)
    if type(file) is not str or not is_inside(file):
        raise DumpError(f"{where} names a file outside its folder: {printable(str(file))[:200]}", "do not trust it")
    transformed = ", ".join(map(str, through)) if type(through) in (list, tuple) else ""
    return ByteRange(file, start, size, not file.endswith(".safetensors"), transformed)


@lru_cache(maxsize=4096)
def is_inside(name: str) -> bool:
    """Whether a file's name stays in the folder that it is relative to."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not set(name) & set("\0\\:")


def _tensor(
    name: str, pickled: PickledObject, places: dict[tuple[int, ...] | None, ByteRange], path: Path
) -> StoredTensor:
    where = f"{path}: {printable(name)}"
    shape = _numbers(pickled.field("size"), f"{where}: size")
    listed = pickled.field("chunks")
    if type(listed) is not list:
        raise DumpError(f"{where}: chunks is not a list", "copy it again")
    chunks = []
    for chunk in listed:
        offsets = _numbers(_field(chunk, "offsets"), f"{where}: offsets")
        sizes = _numbers(_field(chunk, "sizes"), f"{where}: sizes")
        if not len(offsets) == len(sizes) == len(shape):
            raise DumpError(
                f"{where}: a chunk of shape {list(sizes)} at {list(offsets)} of {list(shape)}", "copy it again"
            )
        place = places.get(offsets) or (places.get(None) if len(listed) == 1 else None)
        chunks.append(Chunk(offsets, sizes, place))
    return StoredTensor(name, shape, _dtype(pickled, where), tuple(chunks), path.parent)


def _dtype(pickled: PickledObject, where: str) -> str:
    properties = pickled.field("properties")
    state = properties.state if type(properties) is PickledObject else None
    first = state.get("dtype") if type(state) is dict else state[0] if type(state) is tuple and state else None
    if type(first) is not Global or not is_dtype(first.name.removeprefix("torch.")):
        raise DumpError(f"{where}: properties has no dtype", "copy it again")
    return first.name.removeprefix("torch.")


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    if (
        type(value) is not tuple
        or len(value) > MAX_DIMS
        or not all(type(one) is int and 0 <= one <= MAX_SIZE for one in value)
    ):
        raise DumpError(f"{where} is not a tuple of sizes: {printable(_short_text(value))}", "copy it again")
    return value


def _short_text(value: Any) -> str:
    if type(value) is not tuple:
        return type(value).__name__
    return str([one if type(one) is int and abs(one) < 1 << 70 else type(one).__name__ for one in value[:8]])
