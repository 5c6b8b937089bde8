"""Stamped copies of checkpoints: the fill of each tensor, written in the original's format.

Weights get a fill of their own name. Integers wider than a byte, bytes and flags are kept: they are positions, counters
and packed or encoded data, which a loader reads before anything is computed. Tied weights that a checkpoint stores
twice get one fill, since a loader that ties them again keeps one of the two.

Safetensors files have the same names, shapes and dtypes, written block by block. Of a DCP folder every file is copied,
and fills are written over the elements of each chunk, so that the copy has the chunks, objects and metadata of the
original bit by bit, which no save by torch would give. Nothing is unpickled, and one chunk is in memory at a time.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shardviz.checkpoint.formats.headers import DTYPES, LENGTH_BYTES, index_in
from shardviz.errors import DumpError
from shardviz.layout.dtypes import itemsize
from shardviz.reference.files import complete_checkpoint, open_reference
from shardviz.relate.values import is_alike
from shardviz.stamping.fill import Fill, can_fill
from shardviz.stamping.target import MARK, MARK_FILE, SAFETENSORS, STAMPED, header_of, json_object, replacing
from shardviz.text import bytes_text, counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from shardviz.checkpoint.records import StoredTensor
    from shardviz.reference.files import Entry

SAMPLE = 4096
"""Elements by which tensors that may be equal are found, before all are compared."""

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".distcp"})
"""How files end that hold weights: copied beside the stamped ones, a loader might take them instead."""

HUB_FILES = "blobs"
"""Where the cache of the Hugging Face hub keeps what its folders link to."""

COPIED = 1 << 24
"""Bytes copied at a time."""

SPELLED = {ours: theirs for theirs, ours in DTYPES.items() if ours != "complex64"}
"""How torch names dtypes, and how safetensors does; of those that are stamped or kept as ones."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The content of a stamped copy: a fill, or the original values, for each tensor.

    Attributes:
        fills: The fills by name.
        kept: The names of tensors that keep their values.
        tied: The other names whose fill is another tensor's, each with that tensor.
        nbytes: Bytes of all tensors.
    """

    fills: Mapping[str, Fill]
    kept: tuple[str, ...]
    tied: Mapping[str, str]
    nbytes: int

    def summary(self) -> list[str]:
        """Say in lines what is stamped and what is not."""
        lines = [f"{counted(len(self.fills), 'tensor')} stamped, {bytes_text(self.nbytes)}"]
        if self.tied:
            pairs = (f"{printable(name)} as {printable(other)}" for name, other in self.tied.items())
            lines.append(f"equal in the original, and so in the copy: {listed(pairs)}")
        if self.kept:
            names = listed(map(printable, self.kept))
            lines.append(f"{counted(len(self.kept), 'tensor')} kept: integers and flags may be indices: {names}")
        return lines


def is_weight(dtype: str) -> bool:
    """Whether tensors of a dtype are stamped."""
    return can_fill(dtype) and ("float" in dtype or dtype == "int8")


def plan(tensors: Mapping[str, tuple[str, tuple[int, ...]]], tied: Mapping[str, str], where: str) -> CopyPlan:
    """Return what the stamped copy of tensors has.

    Args:
        tensors: Dtype and shape by name.
        tied: Names whose content is another one's, each with that name.
        where: What they are of, for messages.

    Raises:
        DumpError: None of them can be stamped.
    """
    fills = {
        name: Fill(tied.get(name, name), shape, dtype) for name, (dtype, shape) in tensors.items() if is_weight(dtype)
    }
    if not fills:
        types = listed(sorted({dtype for dtype, _ in tensors.values()}))
        what = f"only {types}, which are not stamped" if tensors else "no tensors"
        raise DumpError(f"{where} has {what}", "give a checkpoint or a model that has weights")
    nbytes = sum(int(math.prod(shape)) * max(1, itemsize(dtype)) for dtype, shape in tensors.values())
    kept = tuple(name for name in tensors if name not in fills)
    return CopyPlan(fills, kept, {name: other for name, other in tied.items() if name in fills}, nbytes)


def equal_ones(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return names whose content equals an earlier tensor's, mapped to that tensor's name.

    Constant tensors, such as norms of ones, are equal by chance and left out.
    """
    alike: dict[object, list[str]] = {}
    for name, entry in entries.items():
        if is_weight(entry.dtype) and 0 not in entry.shape:
            sample = entry.bits.reshape(-1)[:SAMPLE]
            if len(sample) > 1 and not is_alike(sample):
                alike.setdefault((entry.dtype, entry.shape, sample.tobytes()), []).append(name)
    first_of: dict[str, str] = {}
    for names in alike.values():
        first_of.update(_equal_among(names, entries))
    return first_of


def _equal_among(names: Iterable[str], entries: Mapping[str, Entry]) -> dict[str, str]:
    firsts: list[str] = []
    first_of: dict[str, str] = {}
    for name in names:
        same = next((first for first in firsts if np.array_equal(entries[first].bits, entries[name].bits)), None)
        if same is None:
            firsts.append(name)
        else:
            first_of[name] = same
    return first_of


def stamp_safetensors(source: Path, target: Path, *, force: bool = False) -> CopyPlan:
    """Write the stamped copy of a safetensors file, or of a folder with the other files in it.

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
    with replacing(target, made.nbytes, is_folder=source.is_dir(), force=force) as unfinished:
        for path in _files(source):
            _write(unfinished / path.name if source.is_dir() else unfinished, header_of(path), reference.entries, made)
        if source.is_dir():
            _copy_others(source, unfinished)
    return made


def write_model(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], made: CopyPlan, target: Path, *, force: bool
) -> None:
    """Write a model from its names, dtypes and shapes alone; what has no fill becomes ones.

    Raises:
        DumpError: A dtype has no place in a safetensors file, or it cannot be written.
    """
    foreign = next((dtype for dtype, _ in tensors.values() if dtype not in SPELLED), None)
    if foreign is not None:
        raise DumpError(f"a safetensors file cannot hold {foreign}", "cast the model in its build function")
    is_folder = target.suffix != SAFETENSORS
    header = {name: {"dtype": SPELLED[dtype], "shape": list(shape)} for name, (dtype, shape) in tensors.items()}
    with replacing(target, made.nbytes, is_folder=is_folder, force=force) as unfinished:
        _write(unfinished / f"model{SAFETENSORS}" if is_folder else unfinished, header, {}, made)


def _files(source: Path) -> list[Path]:
    """Return the files with a checkpoint's tensors, without those that its index doesn't name."""
    if not source.is_dir():
        return [source]
    files, index = sorted(source.glob(f"*{SAFETENSORS}")), index_in(source)
    named = json_object(index.read_bytes()).get("weight_map") if index else None
    return [path for path in files if named is None or path.name in named.values()]


def _write(path: Path, header: dict[str, Any], entries: Mapping[str, Entry], made: CopyPlan) -> None:
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


def _nbytes(name: str, header: Mapping[str, Any], entries: Mapping[str, Entry], made: CopyPlan) -> int:
    if name in entries:
        return int(entries[name].bits.nbytes)
    return sum(len(block) for block in _content(name, header, entries, made))


def _content(name: str, header: Mapping[str, Any], entries: Mapping[str, Entry], made: CopyPlan) -> Iterator[bytes]:
    """Yield the bytes of a tensor: its fill, its own values, or ones if it has none."""
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
    """Copy config, tokenizer and index, but no other weights and no links that lead elsewhere."""
    folders = (source.resolve(), source.resolve().parent.parent / HUB_FILES)
    index = index_in(source)
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in WEIGHTS or (path.name.endswith(".index.json") and path != index)
        if path.is_file() and not is_weights and path.resolve().parent in folders:
            shutil.copyfile(path, target / path.name)


def stamp_dcp(source: Path, target: Path, *, force: bool = False) -> CopyPlan:
    """Write the stamped copy of a folder that torch.distributed.checkpoint wrote.

    Args:
        source: The folder.
        target: The copy.
        force: Replace what is there, if it is a stamped copy.

    Raises:
        DumpError: The source is not a checkpoint, or is damaged, or the copy cannot be written.
    """
    entries = complete_checkpoint(source).tensors
    tensors = {name: (saved.dtype, saved.shape) for name, saved in entries.items()}
    made = plan(tensors, equal_ones(entries), str(source))
    names = _files_of_folder(source, entries.values())
    nbytes = sum((source / name).stat().st_size for name in names)
    with replacing(target, nbytes, is_folder=True, force=force) as unfinished:
        for name in names:
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, unfinished / name)
        for name, fill in made.fills.items():
            copied = msgspec.structs.replace(entries[name], folder=unfinished)
            for chunk in copied.chunks:
                if math.prod(chunk.sizes):
                    copied.chunk_bits(chunk, "r+")[...] = fill.read(chunk.region)
        (unfinished / MARK_FILE).write_text(f"{STAMPED}\n")
    return made


def _files_of_folder(source: Path, entries: Iterable[StoredTensor]) -> list[str]:
    """Return the names of a folder's files: those with tensors and those next to them."""
    root = source.resolve()
    beside = [path.name for path in source.iterdir() if path.is_file() and path.resolve().parent == root]
    names = sorted({*beside, *(name for saved in entries for name in saved.files)})
    outside = [name for name in names if root not in (source / name).resolve().parents]
    if outside:
        raise DumpError(
            f"{source}: {printable(outside[0])} leads out of the folder", "copy the checkpoint without links"
        )
    return names
