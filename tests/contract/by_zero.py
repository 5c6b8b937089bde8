"""`python -m tests.contract.by_zero`: the room `zeros`, of folders of DeepSpeed's ZeRO with one entry changed.

Every entry of the model's and of the optimizer's file is dropped, emptied, halved, or something else stands in its
place; folders of stages and of numbers of ranks are compared with each other, rightly and after a rank's buffers were
exchanged, cut or moved; and files of universal checkpoints are lost, or have another tensor.
"""

from __future__ import annotations

import copy
import io
import math
import sys
import tempfile
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from tests.checkpoint.zero_folders import GROUPS, save_universal, save_zero
from tests.contract import store
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Files = dict[str, bytes]
    Keys = tuple[Any, ...]

ROOM = "zeros"
MOST_ALIKE = 2
"""Cases that are kept of those with one verdict."""
STEP = "global_step2"
DROPPED = object()


def instead(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what may stand in the place of a value."""
    yield from {"dropped": DROPPED, "None": None, "text": "text", "7": 7, "-1": -1, "a list": [], "a dict": {}}.items()
    if isinstance(value, torch.Tensor):
        yield from {"halved": value[: len(value) // 2].clone() if value.ndim else value + 1}.items()
        yield from {"in float64": value.double(), "in bfloat16": value.bfloat16(), "of zeros": value * 0}.items()
        yield from {"longer": torch.cat([value.reshape(-1), value.reshape(-1)[:3]]), "as a row": value[None]}.items()
    if isinstance(value, (list, tuple)) and value:
        yield from {"cut": type(value)(value[:-1]), "reversed": type(value)(value[::-1])}.items()
        yield "longer", type(value)([*value, value[-1]])
    if isinstance(value, dict) and value:
        first = next(iter(value))
        yield "without the first", {key: inner for key, inner in value.items() if key != first}
        yield "with another", {**value, "other": value[first]}
    if isinstance(value, int):
        yield from {"one more": value + 1, "in a list": [value]}.items()


def paths(value: Any, path: Keys = ()) -> Iterator[Keys]:
    """Yield where entries are; of many alike the first two."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys[:2] if len(path) > 1 or isinstance(value, list) else keys:
        yield (*path, key)
        yield from paths(value[key], (*path, key))


def changed(content: bytes, path: Keys, new: Any) -> bytes:
    """Return a file in which something else stands at a place."""
    tree = torch.load(io.BytesIO(content), weights_only=True)
    at = tree
    for key in path[:-1]:
        at = at[key]
    if new is DROPPED:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return saved(tree)


def saved(tree: Any) -> bytes:
    """Return the file that torch.save makes."""
    made = io.BytesIO()
    torch.save(tree, made)
    return made.getvalue()


def entries(files: Files) -> Iterator[tuple[str, Files]]:
    """Yield a folder with each entry of its last model file and optimizer file changed."""
    for kind in ("model", "optim"):
        name = max(name for name in files if kind in name)
        tree = torch.load(io.BytesIO(files[name]), weights_only=True)
        for path in paths(tree):
            value = tree
            for key in path:
                value = value[key]
            for how, new in instead(value):
                yield f"{kind} {'/'.join(map(str, path))} {how}", {**files, name: changed(files[name], path, new)}


def of_buffers(files: Files) -> Iterator[tuple[str, Files]]:
    """Yield a folder with the last rank's buffers changed in value, order or place."""
    first, *_, last = sorted(name for name in files if "optim" in name)
    tree, other = (torch.load(io.BytesIO(files[name]), weights_only=True) for name in (last, first))
    inner = tree["optimizer_state_dict"]
    at_masters = "fp32_flat_groups" if "fp32_flat_groups" in inner else "single_partition_of_fp32_groups"

    def state(one: Any) -> Any:
        base = one["optimizer_state_dict"]
        return base.get("base_optimizer_state", base.get("optimizer_state_dict"))["state"]

    def masters(one: Any) -> Any:
        return one["optimizer_state_dict"][at_masters]

    ways: dict[str, Callable[[Any], object]] = {
        "moments exchanged": lambda one: state(one)[0].update(exp_avg=state(one)[0]["exp_avg_sq"]),
        "moments of the first rank": lambda one: state(one).update(copy.deepcopy(state(other))),
        "moments zero": lambda one: state(one)[0]["exp_avg"].zero_(),
        "moments halved": lambda one: state(one)[0]["exp_avg"].mul_(0.5),
        "moments reversed": lambda one: state(one)[0].update(exp_avg=state(one)[0]["exp_avg"].flip(0)),
        "masters off by little": lambda one: masters(one)[0].add_(1e-6),
        "masters off by more": lambda one: masters(one)[0].add_(1e-2),
        "masters reversed": lambda one: masters(one).__setitem__(0, masters(one)[0].flip(0)),
        "masters shifted": lambda one: masters(one).__setitem__(0, masters(one)[0].roll(1)),
        "masters rounded": lambda one: masters(one).__setitem__(0, masters(one)[0].bfloat16().float()),
        "masters in bfloat16": lambda one: masters(one).__setitem__(0, masters(one)[0].bfloat16()),
        "masters not finite": lambda one: masters(one)[0].__setitem__(0, float("nan")),
        "groups exchanged": lambda one: masters(one).reverse(),
        "masters of the first rank": lambda one: masters(one).__setitem__(slice(None), masters(other)),
    }
    for what, change in ways.items():
        one = copy.deepcopy(tree)
        change(one)
        yield what, {**files, last: saved(one)}
    yield "optimizer files exchanged", {**files, first: files[last], last: files[first]}


@dataclass
class Fragment:
    """Where DeepSpeed says that a parameter's numbers are in the buffer of its group; pickled under its name there."""

    start: int
    numel: int


FRAGMENTS = "deepspeed.utils.tensor_fragment"
Fragment.__module__, Fragment.__qualname__ = FRAGMENTS, "fragment_address"


def linked(files: Files) -> Iterator[tuple[str, Files]]:
    """Yield a folder of one rank whose file links parameters to places in the order of the buffers, or in another."""
    name, module = max(name for name in files if "optim" in name), ModuleType("deepspeed")
    vars(module)["fragment_address"] = Fragment
    for order, step in {"their order": 1, "another order": -1}.items():
        tree = torch.load(io.BytesIO(files[name]), weights_only=True)
        links: list[dict[str, Fragment]] = []
        for group in GROUPS:
            sizes = {parameter: math.prod(shape) for parameter, shape in list(group.items())[::step]}
            stops = accumulate(sizes.values())
            places = zip(sizes.items(), stops, strict=True)
            links.append({parameter: Fragment(stop - size, size) for (parameter, size), stop in places})
        tree["optimizer_state_dict"]["param_slice_mappings"] = links
        with patch.dict(sys.modules, dict.fromkeys(("deepspeed", FRAGMENTS), module)):
            yield f"links in {order}", {**files, name: saved(tree)}


def of_files(files: Files) -> Iterator[tuple[str, Files]]:
    """Yield a folder of which each file is lost, empty, or another."""
    every = [name for name in files if name.endswith(".pt")]
    names = every[:2] + every[-6:]
    for at, name in enumerate(names):
        yield f"{name} lost", {path: content for path, content in files.items() if path != name}
        yield f"{name} empty", {**files, name: b""}
        yield f"{name} another", {**files, name: files[names[at - 1]]}
        for how, new in (("a number", 2.0), ("a dict", {"param": torch.ones(3)}), ("a row", torch.ones(1, 36))):
            yield f"{name} {how}", {**files, name: saved(new)}


def folders(folder: Path) -> Iterator[tuple[str, Files]]:
    """Yield the folders that are changed, with what they are."""
    for stage, world in product((1, 3), (1, 2, 3)):
        path = save_zero(folder / f"{stage} {world}", stage, world)
        yield f"stage {stage} of {world}", {name: file.read_bytes() for name, file in store.files_of(path).items()}
    for stage in (1, 3):
        path = save_universal(folder / f"universal {stage}", stage)
        yield f"universal {stage}", {name: file.read_bytes() for name, file in store.files_of(path).items()}


def cases(folder: Path) -> Iterator[tuple[str, list[Files]]]:
    """Yield the folders of each case, with its name."""
    made = dict(folders(folder))
    for (name, one), (other_name, other) in product(made.items(), repeat=2):
        if name != other_name:
            yield f"compared {name} and {other_name}", [one, other]
    yield from ((f"stage 1 of 1, {what}", [changed_]) for what, changed_ in linked(made["stage 1 of 1"]))
    for name, files in made.items():
        if name.startswith("stage") and "of 2" in name:
            yield from ((f"{name} {what}", [changed_]) for what, changed_ in entries(files))
        if not name.startswith("stage") or "of 3" in name:
            yield from ((f"{name} {what}", [changed_]) for what, changed_ in of_files(files))
        if name.startswith("stage") and "of 1" not in name:
            for what, changed_ in of_buffers(files):
                yield f"buffers {name} {what}", [files, changed_]
                yield f"buffers {name} {what}, beside another stage", [made[f"stage {4 - int(name[6])} of 2"], changed_]


def main() -> None:
    """Make the room, judge it, and keep what is judged in many ways."""
    room = store.Room(ROOM)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for name, inputs in cases(Path(folder)):
            command = ("check", "{0}") if len(inputs) == 1 else ("diff", "{0}", "{1}")
            room.add_content(name, command, inputs)
    room.keep(chosen(judge_room(room), MOST_ALIKE, lambda name: " ".join(name.split()[:3])))
    record(room)


if __name__ == "__main__":
    main()
