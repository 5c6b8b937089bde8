"""Variants of dumps: one change in the values, the layouts or the text of what ranks wrote."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shardviz.dump.records.tensors import Body
from shardviz.dump.tensor import DIGEST_LENGTH
from shardviz.dump.validate import digests_of
from shardviz.errors import ShardvizError
from tests.contract.changes import any_change

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from tests.contract.changes import Change

    Files = dict[str, bytes]


def of_dump(rng: random.Random, files: Files, small: tuple[str, Change] | None) -> str:
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
    name, change = small or any_change(rng)
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
        digests = digests_of(msgspec.convert(_named_as_now(_at(record, path)), Body))
    except (msgspec.ValidationError, ShardvizError):
        return
    for tensor in record.get("tensors", ()):
        if tensor.get("body") == path[1] and tensor.get("digests"):
            num_names = len(tensor["digests"]) // DIGEST_LENGTH
            tensor["digests"] = digests[0] * num_names if digests else ""


def _named_as_now(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body with the name that its phase has now: recorded cases may call it stage, as readers know."""
    return {"phase" if key == "stage" else key: value for key, value in body.items()}


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
