"""Variants of checkpoints: a tensor changed, renamed, exchanged or of another type, or a file cut short or lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.contract.changes import any_change

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tests.contract.changes import Change

    Files = dict[str, bytes]

WIDTHS: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32}


def is_safetensors(content: bytes) -> bool:
    return len(content) > 9 and content[8:9] == b"{" and int.from_bytes(content[:8], "little") <= len(content) - 8


def read_tensors(content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the header of a safetensors file and each tensor's bytes."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    data = content[8 + size :]
    return header, {name: data[slice(*one["data_offsets"])] for name, one in header.items() if name != "__metadata__"}


def write_tensors(header: Mapping[str, Any], data: Mapping[str, bytes]) -> bytes:
    """Return a safetensors file."""
    made, body = {}, b""
    for name, one in header.items():
        if name == "__metadata__":
            made[name] = one
            continue
        made[name] = {**one, "data_offsets": [len(body), len(body) + len(data[name])]}
        body += data[name]
    text = json.dumps(made, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + body


def of_safetensors(rng: random.Random, files: Files, file: str, small: tuple[str, Change] | None) -> str:
    """Change a tensor of a safetensors file, and say how."""
    try:
        header, data = read_tensors(files[file])
    except (ValueError, KeyError, TypeError, AttributeError):
        return of_bytes(rng, files)
    if not data:
        return ""
    name = rng.choice(sorted(data))
    one, how = header[name], 1.0 if small else rng.random()
    if how < 0.05:
        del header[name], data[name]
        done = "dropped"
    elif how < 0.1:
        header[f"{name}_"], data[f"{name}_"] = header.pop(name), data.pop(name)
        done = "renamed"
    elif how < 0.22:
        other = rng.choice(sorted(data))
        is_alike = (one["dtype"], one["shape"]) == (header[other]["dtype"], header[other]["shape"])
        if other == name or not is_alike:
            return ""
        data[name], data[other] = data[other], data[name] if rng.random() < 0.6 else data[other]
        done = f"and {other} exchanged"
    elif how < 0.27:
        one["shape"] = one["shape"][::-1]
        done = "of reversed shape"
    elif how < 0.32:
        return of_bytes(rng, files)
    else:
        done = _retyped(rng, one, data, name) if how < 0.42 else _of_array(rng, one, data, name, small)
    if not done:
        return ""
    files[file] = write_tensors(header, data)
    return f"{file} {name} {done}".strip()


def _array(one: Mapping[str, Any], data: bytes) -> NDArray[Any] | None:
    if one["dtype"] == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(one["shape"])
    if one["dtype"] not in WIDTHS:
        return None
    return np.frombuffer(data, WIDTHS[one["dtype"]]).reshape(one["shape"])


def _bytes(array: NDArray[Any], dtype: str) -> bytes:
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    return np.ascontiguousarray(array).astype(WIDTHS[dtype]).tobytes()


def _retyped(rng: random.Random, one: dict[str, Any], data: dict[str, bytes], name: str) -> str:
    array = _array(one, data[name])
    if array is None:
        return ""
    dtype = rng.choice(("F64", "F32", "F16", "BF16"))
    data[name], before = _bytes(array, dtype), one["dtype"]
    one["dtype"] = dtype
    return f"{before} -> {dtype}"


def _of_array(
    rng: random.Random, one: dict[str, Any], data: dict[str, bytes], name: str, small: tuple[str, Change] | None
) -> str:
    array = _array(one, data[name])
    if array is None or not array.size:
        return ""
    what, change = small or any_change(rng)
    with np.errstate(all="ignore"):
        data[name] = _bytes(change(rng, array.astype(np.float64)), one["dtype"])
    return what


def of_bytes(rng: random.Random, files: Files) -> str:
    """Cut a file short, or change one byte of it, or lose it."""
    file = rng.choice(sorted(files))
    content = files[file]
    how = rng.random()
    if how < 0.2 and len(files) > 1:
        del files[file]
        return f"{file} lost"
    if how < 0.45:
        files[file] = content[: rng.choice((0, 4, 7, len(content) // 2, max(0, len(content) - 1)))]
        return f"{file} cut to {len(files[file])} bytes"
    at = rng.randrange(min(len(content), 4096)) if content else 0
    files[file] = content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    return f"{file} byte {at} changed"
