"""Variants of what ranks write of a module's lines: a call, what it is given, or a tensor's numbers are others.

A call has another function, on all sides or on one, is missing, reads another tensor or gives its tensors in another
order, has other numbers or ranks; a tensor comes from elsewhere, has no gradient or stands in another memory; values
or those of gradients are changed, on ranks or in the unsharded model.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.contract.changed_dumps import apply
from tests.contract.changes import any_change, small_change

if TYPE_CHECKING:
    import random

    Files = dict[str, bytes]
    Record = dict[str, Any]

LINE = "line "
"""What the seed of such a variant begins with."""

FUNCTIONS = (
    *("linear", "matmul", "add", "sub", "mul", "div", "sum", "mean", "softmax", "log_softmax", "dropout", "normal_"),
    *("getitem", "narrow", "chunk", "split", "view", "reshape", "contiguous", "clone", "detach", "to", "cat", "roll"),
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all_single", "empty", "empty_like", "zeros", "copy_"),
    *("clamp", "where", "masked_fill", "cumsum", "setitem", "_FromTorchTensor", "_ToTorchTensor", "Redistribute"),
    *(
        "scaled_dot_product_attention",
        "layer_norm",
        "cross_entropy",
        "backward",
        "add_",
        "div_",
        "to_local of a weight",
    ),
)
ORIGINS = ("", "input 0", "input 1", "output 0 0", "elsewhere", "weight up", "buffer mask")
NUMBERS = ("", "0", "1", "-1", "2", "0 1", "1 True", "True", "0.5", "2.0", "8", "0 2 4")
SIZES = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)


def of_lines(rng: random.Random, files: Files) -> str:
    """Change the lines of a dump, and say how."""
    names = sorted(name for name in files if name.rpartition("/")[2].startswith("rank_") and name.endswith(".json"))
    records: dict[str, Record] = {name: json.loads(files[name]) for name in names}
    sides = [(name, lines) for name, record in records.items() for lines in record.get("lines", ())]
    if not any(lines.get("lines") for _, lines in sides):
        return ""
    ranks = [lines for _, lines in sides if not lines.get("is_unsharded")]
    whole = [lines for _, lines in sides if lines.get("is_unsharded")]
    way = rng.choice((None, None, _of_function, _of_call, _of_call, _of_tensor))
    chosen = rng.choice((ranks, ranks, [*ranks, *whole], whole or ranks, ranks[-1:]))
    done = _of_values(rng, records) if way is None else way(rng, chosen)
    for name, record in records.items():
        files[name] = json.dumps(record, separators=(",", ":")).encode()
    return done


def _of_values(rng: random.Random, records: dict[str, Record]) -> str:
    """Change the values of a tensor, or of its gradient, on some ranks or in the unsharded model."""
    moment = rng.choice(("step", "step", "step", "reference"))
    first = records[min(records)]
    held: dict[str, int] = {}
    for tensor in first.get("tensors", ()):
        body = first["bodies"][tensor["body"]]
        name = str(tensor.get("name", ""))
        if ": " in name and "value " in name and body.get("phase", body.get("stage")) == moment:
            held[name] = tensor["body"]
    if not held:
        return ""
    name = rng.choice(sorted(held))
    what, change = any_change(rng) if rng.random() < 0.7 else small_change(rng, rng.choice(SIZES))
    ranks = sorted(records) if moment == "step" and rng.random() < 0.6 else [min(records)]
    if moment == "step" and ranks == [min(records)] and rng.random() < 0.5:
        ranks = [max(records)]
    done = False
    for rank in ranks:
        body = next((one["body"] for one in records[rank]["tensors"] if one["name"] == name), None)
        if moment == "step" and body is not None:
            done |= apply(rng, records, [rank], [("bodies", body)], change)
        elif moment == "reference":
            done |= apply(rng, records, [rank], [("bodies", held[name])], change)
    return f"{moment} {name} {what} on {len(ranks)} ranks" if done else ""


def _call_of(rng: random.Random, sides: list[Record]) -> int:
    return rng.randrange(min(len(side["lines"]) for side in sides))


def _of_function(rng: random.Random, sides: list[Record]) -> str:
    """Let a call be of another function; on all sides it is the same call still."""
    at = _call_of(rng, sides) if all(side.get("lines") for side in sides) else -1
    if at < 0:
        return ""
    function, line = rng.choice(FUNCTIONS), sides[0]["lines"][at]
    key = line["function"], json.dumps(line["frames"])
    for side in sides:
        for other in side["lines"]:
            if (other["function"], json.dumps(other["frames"])) == key:
                other["function"] = function
    return f"call {at} {key[0]} -> {function} on {len(sides)} sides"


def _of_call(rng: random.Random, sides: list[Record]) -> str:
    """Let a call be missing, or change what it is given, what it gives, its numbers, ranks or frames."""
    at = _call_of(rng, sides) if all(side.get("lines") for side in sides) else -1
    if at < 0:
        return ""
    how = rng.choice(("dropped", "doubled", "inputs", "inputs", "order", "outputs", "numbers", "ranks", "line", "own"))
    number, texts = rng.randrange(20), rng.choice(NUMBERS)
    for place, side in enumerate(sides):
        lines = side["lines"]
        line: Record = dict(lines[at])
        if how == "dropped":
            del lines[at]
            continue
        if how == "doubled":
            lines.insert(at, line)
            continue
        inputs, outputs = list(line.get("inputs", ())), list(line.get("outputs", ()))
        if how == "inputs":
            line["inputs"] = [*inputs[:-1], number % len(side["values"])] if side.get("values") else inputs
        elif how == "order":
            line["inputs"], line["outputs"] = inputs[::-1], outputs[::-1]
        elif how == "outputs":
            line["outputs"] = outputs[:-1] if number % 2 else [*outputs, number % max(1, len(side.get("values", [0])))]
        elif how == "numbers":
            line["numbers"] = f"{texts} {place}" if number % 3 == 0 else texts
        elif how == "ranks":
            line["ranks"] = [] if line.get("ranks") and number % 2 else list(range(min(2, 1 + number % 4)))
            line["is_collective"] = bool(line["ranks"]) and number % 5 > 0
        elif how == "line":
            frame = line["frames"][-1]
            line["frames"] = [*line["frames"][:-1], {**frame, "line": frame["line"] + 100}]
        else:
            line["frames"] = [*line["frames"], line["frames"][-1]]
            line["own"] = len(line["frames"]) - 1 if number % 2 else 0
        lines[at] = line
    return f"call {at} {how} {number} on {len(sides)} sides"


def _of_tensor(rng: random.Random, sides: list[Record]) -> str:
    """Let a tensor come from elsewhere, have no gradient, stand in another memory, or be what is returned."""
    number = rng.randrange(max(1, min(len(side.get("values", ())) for side in sides)))
    how, origin = rng.choice(("origin", "gradient", "memory", "returned", "result", "placements")), rng.choice(ORIGINS)
    label = rng.choice(("", "Replicate()", "Shard(0)", "Partial()"))
    for side in sides:
        tensor = side["values"][number] if number < len(side.get("values", ())) else {}
        if how == "origin":
            tensor["origin"] = origin
        elif how == "gradient":
            tensor["has_gradient"] = tensor["needs_grad"] = not tensor.get("has_gradient", False)
        elif how == "memory":
            tensor["memory"] = 0 if tensor.get("memory") else 1
        elif how == "placements":
            tensor["placements"] = label
        elif how == "returned":
            side["returned"] = [[number]]
        elif side.get("results"):
            side["results"] = [[name, number if at == 0 else of] for at, (name, of) in enumerate(side["results"])]
    return f"tensor {number} {how} {origin or label} on {len(sides)} sides"
