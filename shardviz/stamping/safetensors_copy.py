"""Stamped safetensors files: the same names, shapes and element types with fills as values, written block by block."""

from __future__ import annotations

import json
import math
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardviz.errors import DumpError
from shardviz.reference.files import INDEX, open_reference
from shardviz.stamping.plan import MARK, STAMPED, Plan, equal_ones, plan
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shardviz.stamping.plan import HasBits

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".distcp"})
"""How files end that hold weights: copied beside the stamped ones, a loader might take them instead."""

HUB_FILES = "blobs"
"""Where the cache of the Hugging Face hub keeps what its folders link to."""

SAFETENSORS = ".safetensors"
COPIED = 1 << 24
"""Bytes copied at a time."""

LENGTH_BYTES = 8
"""Bytes before a file's header, which count those of the header."""

SPELLED = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
    **{f"{long}{bits}": f"{short}{bits}" for long, short in (("int", "I"), ("uint", "U")) for bits in (8, 16, 32, 64)},
}
"""How torch names element types, and how safetensors does."""


def stamp_safetensors(source: Path, target: Path, *, force: bool = False) -> Plan:
    """Write the stamped copy of a safetensors file, or of a folder of them with what else a loader reads there.

    Args:
        source: The file or folder.
        target: The copy; a file for a file, a folder for a folder.
        force: Replace what is there, if it is a stamped copy.

    Raises:
        DumpError: The source is not a checkpoint, or the copy cannot be written.
    """
    reference = open_reference(source)
    tensors = {name: (entry.dtype, entry.shape) for name, entry in reference.entries.items()}
    made = plan(tensors, equal_ones(reference.entries), str(source))
    with replaced(target, made.nbytes, is_folder=source.is_dir(), force=force) as unfinished:
        for path in _files(source):
            _write(unfinished / path.name if source.is_dir() else unfinished, _header_of(path), reference.entries, made)
        if source.is_dir():
            _copy_others(source, unfinished)
    return made


def write_model(tensors: Mapping[str, tuple[str, tuple[int, ...]]], made: Plan, target: Path, *, force: bool) -> None:
    """Write a model of which only names, element types and shapes are known; what has no fill becomes ones.

    Raises:
        DumpError: An element type has no place in a safetensors file, or it cannot be written.
    """
    foreign = next((dtype for dtype, _ in tensors.values() if dtype not in SPELLED), None)
    if foreign is not None:
        raise DumpError(f"a safetensors file cannot hold {foreign}", "cast the model in its build function")
    is_folder = target.suffix != SAFETENSORS
    header = {name: {"dtype": SPELLED[dtype], "shape": list(shape)} for name, (dtype, shape) in tensors.items()}
    with replaced(target, made.nbytes, is_folder=is_folder, force=force) as unfinished:
        _write(unfinished / f"model{SAFETENSORS}" if is_folder else unfinished, header, {}, made)


def is_stamped(path: Path) -> bool:
    """Whether a safetensors file, or every one of a folder, is a stamped copy."""
    files = sorted(path.glob(f"*{SAFETENSORS}")) if path.is_dir() else [path]
    marks = [_header_of(file).get("__metadata__") for file in files if file.is_file()]
    return bool(marks) and all(isinstance(mark, dict) and mark.get(MARK) == STAMPED for mark in marks)


def _header_of(path: Path) -> dict[str, Any]:
    """Return the header of a file; empty where it has none that can be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            return _as_dict(file.read(min(length, os.fstat(file.fileno()).st_size)))
    except OSError:
        return {}


def _as_dict(text: bytes) -> dict[str, Any]:
    """Return a JSON object; empty where the text is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _files(source: Path) -> list[Path]:
    """Return the files that a checkpoint's tensors are in: without those that its index does not name."""
    if not source.is_dir():
        return [source]
    files, index = sorted(source.glob(f"*{SAFETENSORS}")), source / INDEX
    named = _as_dict(index.read_bytes()).get("weight_map") if index.is_file() else None
    return [path for path in files if named is None or path.name in named.values()]


def _write(path: Path, header: dict[str, Any], entries: Mapping[str, HasBits], made: Plan) -> None:
    """Write one file: the header with its tensors where they stood, side by side, and the mark."""
    metadata = {**header.pop("__metadata__", {}), MARK: STAMPED}
    written: dict[str, Any] = {"__metadata__": metadata}
    names = sorted(header, key=lambda name: header[name].get("data_offsets", (0,))[0])
    end = 0
    for name in names:
        shape, nbytes = header[name]["shape"], _nbytes(name, header, entries, made)
        written[name] = {"dtype": header[name]["dtype"], "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(written, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # safetensors aligns what follows
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name in names:
            for block in _content(name, header, entries, made):
                file.write(block)


def _nbytes(name: str, header: Mapping[str, Any], entries: Mapping[str, HasBits], made: Plan) -> int:
    if name in entries:
        return int(entries[name].bits.nbytes)
    return sum(len(block) for block in _content(name, header, entries, made))


def _content(name: str, header: Mapping[str, Any], entries: Mapping[str, HasBits], made: Plan) -> Iterator[bytes]:
    """Yield the bytes of a tensor: its fill, its own values, or ones where it has none."""
    if name in made.fills:
        for block in made.fills[name].blocks():
            yield block.tobytes()
    elif name in entries:
        flat = entries[name].bits.reshape(-1)
        for first in range(0, len(flat), COPIED):
            yield flat[first : first + COPIED].tobytes()
    else:
        width = 1 if header[name]["dtype"] == "BOOL" else int(header[name]["dtype"].lstrip("IUFBC")) // 8
        yield (b"\1" + b"\0" * (width - 1)) * math.prod(header[name]["shape"])


def _copy_others(source: Path, target: Path) -> None:
    """Copy what stands beside the weights: config, tokenizer, index; no links that lead elsewhere, no other weights."""
    own = (source.resolve(), source.resolve().parent.parent / HUB_FILES)
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in WEIGHTS or (path.name.endswith(".index.json") and path.name != INDEX)
        if path.is_file() and not is_weights and path.resolve().parent in own:
            shutil.copyfile(path, target / path.name)


@contextmanager
def replaced(target: Path, nbytes: int, *, is_folder: bool, force: bool) -> Iterator[Path]:
    """Give a path beside `target` to write to, which takes its place once all went well.

    Raises:
        DumpError: Something is there that may not be replaced, there is too little room, or it cannot be written.
    """
    target = type(target)(os.path.abspath(target))
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        _refuse_existing(target, force=force)
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if nbytes > free:
            message = f"{target} takes {nbytes / 1e9:,.3g} GB, and {target.parent} has {free / 1e9:,.3g} GB left"
            raise DumpError(message, "give a folder on another disk with -o")
        if is_folder:
            unfinished.mkdir()
        yield unfinished
        _remove(target)
        os.replace(unfinished, target)
    except OSError as error:
        raise DumpError(f"cannot write {target}: {error.strerror or error}", "choose another place with -o") from error
    finally:
        _remove(unfinished)


def _refuse_existing(target: Path, *, force: bool) -> None:
    if not (target.exists() or target.is_symlink()) or (target.is_dir() and not any(target.iterdir())):
        return
    if target.is_symlink() or not _is_own(target):
        raise DumpError(
            f"{printable(str(target))} exists and is not a stamped copy: its weights would be lost",
            "choose another place with -o",
        )
    if not force:
        raise DumpError(f"{printable(str(target))} exists", "give --force to replace it, or another place with -o")


def _is_own(target: Path) -> bool:
    from shardviz.stamping.dcp_copy import is_stamped_dcp

    return is_stamped(target) or is_stamped_dcp(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
