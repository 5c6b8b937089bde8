"""Variants of recorded cases: one seeded change each, in the values, the layouts or the text of what ranks wrote.

`variant(case, blobs, seed)` returns the files of a variant and what was done to them, or nothing if the change drawn
does not fit. Values are scaled, moved by a little, exchanged between ranks, put in another order, transposed, rounded,
emptied; records, files and parts of files are dropped, doubled or exchanged.
"""

from __future__ import annotations

import copy
import json
import math
import random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shardviz.dump.content import digests_of
from shardviz.dump.records.tensors import Body
from shardviz.dump.tensor import DIGEST_LENGTH
from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from tests.contract.store import Case

    Files = dict[str, bytes]
    Change = Callable[[random.Random, NDArray[Any]], NDArray[Any]]

EDGE = " by "
"""What stands in a seed before the size of a change that is as small, or as large, as still makes a difference."""

SCALES = (0.0, -1.0, 0.5, 2.0, 3.0, 4.0, 0.25, 1.37, 1 / 3, 1.02, 0.995, 1e6)
SIZES = tuple(10.0**power for power in range(-12, 1))


def variant(case: Case, blobs: Mapping[str, bytes], seed: str) -> tuple[str, list[Files]] | None:
    """Return what was changed in a case, and the files of its inputs."""
    edge, _, size = seed.partition(EDGE)
    rng = random.Random(f"{case.name} {edge}")
    inputs = [{name: blobs[digest] for name, digest in files.items()} for files in case.inputs]
    which = rng.randrange(len(inputs))
    files = inputs[which]
    change = _small_change(rng, float(size)) if size else None
    if any(name.endswith("run.json") for name in files):
        done = _of_dump(rng, files, change)
    elif tensors := [name for name, content in files.items() if _is_safetensors(content)]:
        done = _of_safetensors(rng, files, rng.choice(tensors), change)
    else:
        done = "" if change else _of_bytes(rng, files)
    is_changed = any(files.get(name) != blobs[digest] for name, digest in case.inputs[which].items())
    return (f"{which}: {done}", inputs) if done and is_changed else None


# Values


def scaled(factor: float) -> Change:
    """Return a change that multiplies all values."""
    return lambda _rng, values: values * factor


def moved(size: float) -> Change:
    """Return a change that adds noise, relative to the largest value."""

    def change(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
        noise = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(values.shape)
        return values + size * float(np.max(np.abs(values), initial=0.0)) * noise

    return change


def _small_change(rng: random.Random, size: float) -> tuple[str, Change]:
    """Return a change of some size: all values times nearly 1, noise, or one element."""
    how = rng.choice(("times", "moved", "one"))
    if how == "times":
        return f"times 1 + {size:g}", scaled(1 + size)
    if how == "moved":
        return f"moved by {size:g}", moved(size)

    def of_one(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
        changed = values.copy()
        changed.reshape(-1)[rng.randrange(max(1, values.size))] += size * float(np.max(np.abs(values)))
        return changed

    return f"one element moved by {size:g}", of_one


def _one_element(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    changed = values.copy()
    changed.reshape(-1)[rng.randrange(max(1, values.size))] += rng.choice(SIZES) * float(np.max(np.abs(values)))
    return changed


def _rows_exchanged(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    dim = rng.randrange(values.ndim) if values.ndim else 0
    order = list(range(values.shape[dim] if values.ndim else 0))
    if len(order) < 2:
        return values
    how = rng.randrange(5)
    if how == 0:
        one, other = rng.sample(order, 2)
        order[one], order[other] = order[other], order[one]
    elif how == 1:
        order.reverse()
    elif how == 2:
        order = [*order[len(order) // 2 :], *order[: len(order) // 2]]
    elif how == 3:
        step = rng.choice((2, 3, 4))
        order = [place for start in range(step) for place in order[start::step]]
    else:
        rng.shuffle(order)
    return values.take(order, dim)


def _transposed(_rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    return values.T.reshape(values.shape) if values.ndim == 2 else values[..., ::-1].copy() if values.ndim else values


def _repeated(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    if values.ndim == 0 or values.shape[0] < 2:
        return values
    half = values.shape[0] // 2
    changed = values.copy()
    changed[half : 2 * half] = changed[:half] * rng.choice((1.0, 1.0, 0.0))
    return changed


def _rounded(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(rng.choice((0xFFFF0000, 0xFFFFE000)))
    return bits.view(np.float32).astype(values.dtype)


def _not_finite(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    changed = values.copy()
    if changed.size:
        changed.reshape(-1)[rng.randrange(changed.size)] = rng.choice((math.nan, math.inf, -math.inf))
    return changed


def _constant(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    return np.full_like(values, rng.choice((0.0, 1.0, 0.5, float(values.reshape(-1)[0]) if values.size else 0.0)))


def _added(rng: random.Random, values: NDArray[Any]) -> NDArray[Any]:
    if values.ndim == 0:
        return values + rng.choice((1.0, -0.5))
    other = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(values.shape[-1:])
    return values + other * rng.choice((1.0, 0.1, 1e-3))


def _any_change(rng: random.Random) -> tuple[str, Change]:
    """Return a change of values, with its name."""
    plain: list[tuple[str, Change]] = [
        ("one element changed", _one_element),
        ("rows exchanged", _rows_exchanged),
        ("rows exchanged", _rows_exchanged),
        ("transposed", _transposed),
        ("repeated", _repeated),
        ("rounded", _rounded),
        ("not finite", _not_finite),
        ("constant", _constant),
        ("a vector added", _added),
    ]
    factor, size = rng.choice(SCALES), rng.choice(SIZES)
    scales = [(f"times {factor:g}", scaled(factor))] * 4
    return rng.choice([*plain, *scales, *[(f"moved by {size:g}", moved(size))] * 3])


# Dumps


def _of_dump(rng: random.Random, files: Files, small: tuple[str, Change] | None) -> str:
    """Change what ranks wrote, and say how."""
    ranks = sorted(name for name in files if name.rpartition("/")[2].startswith("rank_") and name.endswith(".json"))
    if not ranks:
        return ""
    folder = rng.choice(sorted({name.rpartition("/")[0] for name in ranks}))
    ranks = [name for name in ranks if name.rpartition("/")[0] == folder]
    how = 0.5 if small else rng.random()
    if how < 0.03 and len(ranks) > 1:
        lost = rng.choice(ranks)
        del files[lost]
        return f"{lost} lost"
    try:
        records = {name: json.loads(files[name]) for name in ranks}
    except ValueError:
        return ""
    if how < 0.68:
        done = _of_values(rng, records, small) or (_of_text(rng, records) if small is None else "")
    elif how < 0.74:
        done = _between_ranks(rng, records)
    else:
        done = _of_text(rng, records)
    for name, record in records.items():
        files[name] = json.dumps(record, separators=(",", ":")).encode()
    return f"{folder} {done}".strip() if done else ""


Path = tuple[str | int, ...]


def _holders(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield where records are that have values."""
    if isinstance(value, dict):
        if isinstance(value.get("values"), list | float | int):
            yield path
        for key, inner in value.items():
            if isinstance(inner, dict | list) and key != "values":
                yield from _holders(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            if isinstance(inner, dict | list):
                yield from _holders(inner, (*path, number))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _role(record: dict[str, Any]) -> str:
    return f"{record.get('role', '')} {record.get('stage', '')}".strip()


def _some_ranks(rng: random.Random, records: Mapping[str, Any]) -> list[str]:
    names = sorted(records)
    how = rng.random()
    if how < 0.45:
        return names
    if how < 0.75:
        return [rng.choice(names)]
    half = len(names) // 2 or 1
    return rng.choice([names[:half], names[half:], names[::2], names[1::2] or names])


def _of_values(rng: random.Random, records: dict[str, Any], small: tuple[str, Change] | None) -> str:
    """Change the values of one tensor, or of all of a role, on some ranks."""
    first = records[sorted(records)[0]]
    paths = list(_holders(first))
    if not paths:
        return ""
    by_role: dict[str, list[Path]] = {}
    for path in paths:
        by_role.setdefault(_role(_at(first, path)), []).append(path)
    role = rng.choice(sorted(by_role))
    chosen = by_role[role] if rng.random() < 0.2 else [rng.choice(by_role[role])]
    name, change = small or _any_change(rng)
    ranks = _some_ranks(rng, records)
    return apply(rng, records, ranks, chosen, change) and f"{role} {_path(chosen)} {name} on {_short(ranks)}"


def apply(rng: random.Random, records: dict[str, Any], ranks: list[str], paths: list[Path], change: Change) -> bool:
    """Change the values at some places of some ranks; return whether any are there."""
    is_done = False
    seed = rng.randrange(1 << 30)
    for rank in ranks:
        for path in paths:
            try:
                holder = _at(records[rank], path)
                values = np.array(holder["values"], dtype=np.float64)
            except (KeyError, IndexError, TypeError, ValueError):
                continue
            if not values.size:
                continue
            with np.errstate(all="ignore"):
                changed = change(random.Random(seed), values)
            holder["values"] = _listed(changed)
            _digest_anew(records[rank], path)
            is_done = True
    return is_done


def _listed(values: NDArray[Any]) -> Any:
    """Return values as a dump has them: what is not finite as a word."""

    def written(value: Any) -> Any:
        if isinstance(value, list):
            return [written(inner) for inner in value]
        if math.isfinite(value):
            return value
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"

    return written(values.tolist())


def _digest_anew(record: dict[str, Any], path: Path) -> None:
    """Let the digests of a body be those of its values."""
    if path[:1] != ("bodies",) or len(path) != 2:
        return
    try:
        digests = digests_of(msgspec.convert(_at(record, path), Body))
    except (msgspec.ValidationError, ShardvizError):
        return
    for tensor in record.get("tensors", ()):
        if tensor.get("body") == path[1] and tensor.get("digests"):
            num_names = len(tensor["digests"]) // DIGEST_LENGTH
            tensor["digests"] = digests[0] * num_names if digests else ""


def _path(paths: list[Path]) -> str:
    return "/".join(map(str, paths[0])) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _short(ranks: list[str]) -> str:
    return ", ".join(str(int(name[-10:-5])) if name[-10:-5].isdigit() else name for name in ranks)


def _between_ranks(rng: random.Random, records: dict[str, Any]) -> str:
    """Give a rank another's values, or both the sum or the mean of theirs."""
    names = sorted(records)
    if len(names) < 2:
        return ""
    one, other = rng.sample(names, 2)
    paths = list(_holders(records[one]))
    if not paths:
        return ""
    path = rng.choice(paths)
    how = rng.choice(("exchanged", "copied", "summed", "averaged"))
    try:
        mine, theirs = _at(records[one], path), _at(records[other], path)
        arrays = [np.array(holder["values"], dtype=np.float64) for holder in (mine, theirs)]
        if arrays[0].shape != arrays[1].shape:
            return ""
    except (KeyError, IndexError, TypeError, ValueError):
        return ""
    new = {
        "exchanged": (arrays[1], arrays[0]),
        "copied": (arrays[0], arrays[0]),
        "summed": (arrays[0] + arrays[1],) * 2,
        "averaged": ((arrays[0] + arrays[1]) / 2,) * 2,
    }[how]
    mine["values"], theirs["values"] = map(_listed, new)
    for rank in (one, other):
        _digest_anew(records[rank], path)
    return f"{_role(mine)} {_path([path])} {how} between {_short([one, other])}"


def _of_text(rng: random.Random, records: dict[str, Any]) -> str:
    """Change one number, word, list or entry of a record, on one rank or on all."""
    first = records[sorted(records)[0]]
    section = rng.choice(
        sorted(key for key, value in first.items() if isinstance(value, dict | list) and value) or [""]
    )
    if not section:
        return ""
    leaves = list(_leaves(first[section], (section,)))
    if not leaves:
        return ""
    path = rng.choice(leaves)
    words = sorted({str(_at(first, leaf)) for leaf in leaves if leaf[-1] == path[-1]})
    ranks = sorted(records) if rng.random() < 0.6 else [rng.choice(sorted(records))]
    seed, is_done = rng.randrange(1 << 30), ""
    for rank in ranks:
        try:
            parent = _at(records[rank], path[:-1])
            done = _change_leaf(random.Random(seed), parent, path[-1], words)
        except (KeyError, IndexError, TypeError):
            continue
        is_done = is_done or done
    return is_done and f"{_path([path])} {is_done} on {_short(ranks)}"


def _leaves(value: Any, path: Path) -> Iterator[Path]:
    """Yield the places of numbers, words and lists; not those within values."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if key in ("values", "numbers"):
            continue
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from _leaves(inner, (*path, key))


def _change_leaf(rng: random.Random, parent: Any, key: str | int, words: list[str]) -> str:
    value = parent[key]
    if rng.random() < 0.15:
        del parent[key]
        return "dropped"
    if isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, int):
        parent[key] = rng.choice((value + 1, max(0, value - 1), value * 2, 0))
    elif isinstance(value, float):
        parent[key] = rng.choice((value * 2, value / 2, 0.0, 1.0, value * 1.001, value + 1e-6, value * 100))
    elif isinstance(value, str):
        parent[key] = rng.choice(words)
    elif isinstance(value, list) and value:
        how = rng.randrange(3)
        if how == 0 and len(value) > 1:
            parent[key] = [*value[1:], value[0]]
        elif how == 1:
            parent[key] = [*value, copy.deepcopy(value[-1])]
        else:
            parent[key] = value[:-1]
    elif isinstance(value, dict) and isinstance(parent, list) and len(parent) > 1:
        parent[key] = copy.deepcopy(rng.choice(parent))
    else:
        return ""
    return f"{str(value)[:20]} -> {str(parent[key])[:20]}"


# Checkpoints

WIDTHS: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32}


def _is_safetensors(content: bytes) -> bool:
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


def _of_safetensors(rng: random.Random, files: Files, file: str, small: tuple[str, Change] | None) -> str:
    """Change a tensor of a safetensors file, and say how."""
    try:
        header, data = read_tensors(files[file])
    except (ValueError, KeyError, TypeError, AttributeError):
        return _of_bytes(rng, files)
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
        return _of_bytes(rng, files)
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
    what, change = small or _any_change(rng)
    with np.errstate(all="ignore"):
        data[name] = _bytes(change(rng, array.astype(np.float64)), one["dtype"])
    return what


def _of_bytes(rng: random.Random, files: Files) -> str:
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
