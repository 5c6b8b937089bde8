"""Stamped safetensors files: the same names, shapes and dtypes with fills as values, written block by block."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.formats.headers import DTYPES, LENGTH_BYTES, index_in
from shardviz.errors import DumpError
from shardviz.reference.files import open_reference
from shardviz.stamping.plan import Plan, equal_ones, plan
from shardviz.stamping.target import MARK, SAFETENSORS, STAMPED, header_of, json_object, replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shardviz.reference.files import Entry

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".distcp"})
"""How files end that hold weights: copied beside the stamped ones, a loader might take them instead."""

HUB_FILES = "blobs"
"""Where the cache of the Hugging Face hub keeps what its folders link to."""

COPIED = 1 << 24
"""Bytes copied at a time."""

SPELLED = {ours: theirs for theirs, ours in DTYPES.items() if ours != "complex64"}
"""How torch names dtypes, and how safetensors does; of those that are stamped or kept as ones."""


def stamp_safetensors(source: Path, target: Path, *, force: bool = False, salt: str = "") -> Plan:
    """Write the stamped copy of a safetensors file, or of a folder of them with what else a loader reads there.

    Args:
        source: The file or folder.
        target: The copy; a file for a file, a folder for a folder.
        force: Replace what is there, if it is a stamped copy.
        salt: As for `Fill`.

    Raises:
        DumpError: The source is not a checkpoint, or the copy cannot be written.
    """
    reference = open_reference(source)
    tensors = {name: (entry.dtype, entry.shape) for name, entry in reference.entries.items()}
    made = plan(tensors, equal_ones(reference.entries), str(source), salt)
    with replaced(target, made.nbytes, is_folder=source.is_dir(), force=force) as unfinished:
        for path in _files(source):
            _write(unfinished / path.name if source.is_dir() else unfinished, header_of(path), reference.entries, made)
        if source.is_dir():
            _copy_others(source, unfinished)
    return made


def write_model(tensors: Mapping[str, tuple[str, tuple[int, ...]]], made: Plan, target: Path, *, force: bool) -> None:
    """Write a model from its names, dtypes and shapes alone; what has no fill becomes ones.

    Raises:
        DumpError: A dtype has no place in a safetensors file, or it cannot be written.
    """
    foreign = next((dtype for dtype, _ in tensors.values() if dtype not in SPELLED), None)
    if foreign is not None:
        raise DumpError(f"a safetensors file cannot hold {foreign}", "cast the model in its build function")
    is_folder = target.suffix != SAFETENSORS
    header = {name: {"dtype": SPELLED[dtype], "shape": list(shape)} for name, (dtype, shape) in tensors.items()}
    with replaced(target, made.nbytes, is_folder=is_folder, force=force) as unfinished:
        _write(unfinished / f"model{SAFETENSORS}" if is_folder else unfinished, header, {}, made)


def _files(source: Path) -> list[Path]:
    """Return the files that a checkpoint's tensors are in: without those that its index does not name."""
    if not source.is_dir():
        return [source]
    files, index = sorted(source.glob(f"*{SAFETENSORS}")), index_in(source)
    named = json_object(index.read_bytes()).get("weight_map") if index else None
    return [path for path in files if named is None or path.name in named.values()]


def _write(path: Path, header: dict[str, Any], entries: Mapping[str, Entry], made: Plan) -> None:
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


def _nbytes(name: str, header: Mapping[str, Any], entries: Mapping[str, Entry], made: Plan) -> int:
    if name in entries:
        return int(entries[name].bits.nbytes)
    return sum(len(block) for block in _content(name, header, entries, made))


def _content(name: str, header: Mapping[str, Any], entries: Mapping[str, Entry], made: Plan) -> Iterator[bytes]:
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
    index = index_in(source)
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in WEIGHTS or (path.name.endswith(".index.json") and path != index)
        if path.is_file() and not is_weights and path.resolve().parent in own:
            shutil.copyfile(path, target / path.name)
