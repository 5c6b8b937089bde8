"""Variants with a gap: a tensor, field or entry that is not there, is empty, or is of another type or shape.

Of a dump: what a role has is lost, not written, of another dtype or without its layout, on all ranks or on one. Of a
checkpoint: an entry of a pickle, or of a JSON header or index, is dropped or replaced.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from tests.contract.changed_files import is_safetensors

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    Files = dict[str, bytes]
    Record = dict[str, Any]

GAP = "gap "
"""What the seed of such a variant begins with."""

DTYPES = ("float64", "float32", "bfloat16", "float16", "complex64", "int64", "bool", "float8_e4m3fn")
OTHERS: tuple[Any, ...] = (None, "text", 7, -1, [], {}, 1 << 40, 0.5, True)
"""What may stand in the place of a value."""

INSTEAD = 64
"""A list or dict of more entries is changed in one of the first or last of so many."""


def of_gap(rng: random.Random, files: Files) -> str:
    """Make a gap in a dump or checkpoint, and say which."""
    if any(name.endswith("run.json") for name in files):
        return _of_dump(rng, files)
    name = rng.choice(sorted(files))
    content = files[name]
    if is_safetensors(content):
        size = int.from_bytes(content[:8], "little")
        header, done = _of_json(rng, content[8 : 8 + size])
        files[name] = len(header).to_bytes(8, "little") + header + content[8 + size :]
    elif content[:1] == b"{":
        files[name], done = _of_json(rng, content)
    elif content[:2] == b"PK":
        files[name], done = _of_torch_file(rng, content)
    elif content[:1] == b"\x80":
        files[name], done = _of_pickle(rng, content)
    else:
        return ""
    return f"{name} {done}".strip() if done else ""


# Dumps


def _of_dump(rng: random.Random, files: Files) -> str:
    ranks = sorted(name for name in files if name.rpartition("/")[2].startswith("rank_") and name.endswith(".json"))
    folder = rng.choice(sorted({name.rpartition("/")[0] for name in ranks})) if ranks else ""
    ranks = [name for name in ranks if name.rpartition("/")[0] == folder]
    run = f"{folder}/run.json".lstrip("/")
    if run in files and rng.random() < 0.1:
        files[run], done = _of_json(rng, files[run])
        return f"{run} {done}" if done else ""
    try:
        records: dict[str, Record] = {name: json.loads(files[name]) for name in ranks}
    except ValueError:
        return ""
    if not records:
        return ""
    chosen = rng.choice((ranks, ranks[:1], ranks[-1:], ranks[1:] or ranks))
    first = records[chosen[0]]
    ways = [_of_role, _of_role, _of_section]
    done = rng.choice(ways)(rng, first, [records[name] for name in chosen])
    for name in chosen:
        files[name] = json.dumps(records[name], separators=(",", ":")).encode()
    which = "all" if chosen == ranks else ", ".join(name[-10:-5] for name in chosen)
    return f"{folder} {done} on {which}".strip() if done else ""


def _role(body: Record) -> tuple[str, str]:
    return str(body.get("role", "")), str(body.get("stage", body.get("phase", "")))


def _of_role(rng: random.Random, first: Record, records: list[Record]) -> str:
    """Lose what ranks wrote of the tensors of one role, or a part of it."""
    roles = sorted({_role(body) for body in first.get("bodies", ())})
    if not roles:
        return ""
    role, is_one = rng.choice(roles), rng.random() < 0.5
    named = sorted({one["name"] for one in first.get("tensors", ()) if _role(first["bodies"][one["body"]]) == role})
    if not named:
        return ""
    name = rng.choice(named)
    how = rng.choice(("lost", "lost", "without values", "without a layout", "dtype", "shape", "flag"))
    dtype, flag = rng.choice(DTYPES), rng.choice(("assumed", "constant", "dense", "held", "runs", "grad"))
    for record in records:
        bodies = record.get("bodies", [])
        own = [
            one
            for one in record.get("tensors", ())
            if _role(bodies[one["body"]]) == role and (not is_one or one["name"] == name)
        ]
        if how == "lost":
            record["tensors"] = [one for one in record["tensors"] if one not in own]
            continue
        for number in {one["body"] for one in own}:
            _change_body(bodies[number], how, dtype, flag)
        for one in own:
            one.pop("digests", None)
    what = {"dtype": f"of {dtype}", "flag": f"without {flag}"}.get(how, how)
    return f"{' '.join(role)} {name if is_one else 'all'} {what}"


def _change_body(body: Record, how: str, dtype: str, flag: str) -> None:
    if how == "without values":
        body.pop("values", None)
    elif how == "without a layout":
        body.pop("layout", None)
    elif how == "dtype":
        body["dtype"] = dtype
    elif how == "flag":
        body.pop(flag, None)
    elif isinstance(body.get("values"), list) and body["values"]:  # a row less than it should have
        body["values"] = body["values"][:-1]
        body["local_shape"] = [len(body["values"]), *body["local_shape"][1:]]
        if body.get("layout") is None:
            body["shape"] = body["local_shape"]


def _of_section(rng: random.Random, first: Record, records: list[Record]) -> str:
    """Lose a list of a record, half of it, or the entries that have one word in common."""
    sections = sorted(
        key for key, value in first.items() if isinstance(value, list) and value and key not in ("bodies", "tensors")
    )
    if not sections:
        return ""
    section = rng.choice(sections)
    words = sorted(
        {(key, word) for one in first[section] if isinstance(one, dict) for key, word in one.items() if _is_word(word)}
    )
    how = rng.choice(("lost", "half lost", "word", "word", "word"))
    key, word = rng.choice(words) if words else ("", "")
    for record in records:
        entries = record.get(section, [])
        if how == "lost" or not words:
            record[section] = []
        elif how == "half lost":
            record[section] = entries[: len(entries) // 2]
        else:
            record[section] = [one for one in entries if not (isinstance(one, dict) and one.get(key) == word)]
    return f"{section} {how if how != 'word' or not words else f'of {key} {word} lost'}"


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


# Checkpoints


def _of_json(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    try:
        found = json.loads(content)
    except ValueError:
        return content, ""
    done = _of_tree(rng, found)
    return json.dumps(found, separators=(",", ":")).encode(), done


class _Unpickler(pickle.Unpickler):
    """Makes what torch and Python's collections define, and nothing else: some recorded files are hostile."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in ("torch", "collections") or "." in name:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


class _OfCheckpoints:
    """What torch.load takes for the module pickle."""

    Unpickler = _Unpickler
    UnpicklingError = pickle.UnpicklingError


def _of_torch_file(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    import torch

    try:
        found = torch.load(io.BytesIO(content), weights_only=False, pickle_module=_OfCheckpoints)
    except Exception:  # a damaged file of a recorded case may raise anything
        return content, ""
    box, done = {"": found}, ""
    if isinstance(found, dict | list):
        done = _of_tree(rng, found)
    if not done:
        box[""], done = rng.choice(OTHERS), "is no tensor"
    made = io.BytesIO()
    torch.save(box[""], made)
    return made.getvalue(), done


def _of_pickle(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    import torch.distributed.checkpoint  # noqa: F401  # the types of its metadata

    try:
        found = _OfCheckpoints.Unpickler(io.BytesIO(content)).load()
        done = _of_tree(rng, found)
        return pickle.dumps(found), done
    except Exception:  # as above
        return content, ""


def _children(value: Any) -> Iterator[Any]:
    """Yield the keys of what is in a container: a dict, a list or an object with fields."""
    if isinstance(value, dict):
        yield from value
    elif isinstance(value, list):
        yield from range(len(value))
    elif type(value).__module__.startswith("torch.distributed") and hasattr(value, "__dict__"):
        yield from vars(value)


def _get(value: Any, key: Any) -> Any:
    return value[key] if isinstance(value, dict | list) else getattr(value, key)


def _set(value: Any, key: Any, new: Any) -> None:
    if isinstance(value, dict | list):
        value[key] = new
    else:
        object.__setattr__(value, key, new)


def _of_tree(rng: random.Random, tree: Any) -> str:
    """Drop or replace an entry somewhere in a tree: each level is as likely as any other."""
    path: list[Any] = []
    at = tree
    while True:
        keys = list(_children(at))
        if not keys:
            return ""
        key = rng.choice(keys[:INSTEAD] + keys[-INSTEAD:])
        path.append(key)
        inner = _get(at, key)
        if rng.random() < 0.3 or not list(_children(inner)):
            break
        at = inner
    words = "/".join(str(key)[:60] for key in path)
    how = rng.choice(("dropped", "replaced", "replaced", "replaced", "emptied", "reversed"))
    if how == "dropped" and isinstance(at, dict | list):
        del at[key]
    elif how == "emptied" and isinstance(inner, dict | list | tuple):
        _set(at, key, OrderedDict() if isinstance(inner, OrderedDict) else type(inner)())
    elif how == "reversed" and type(inner) in (list, tuple) and len(inner) > 1:
        _set(at, key, inner[::-1])
    else:
        how = "replaced"
        new = rng.choice(OTHERS)
        _set(at, key, new)
        words += f" by {new!r}"
    return f"{words} {how}"
