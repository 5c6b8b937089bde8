"""`python -m tests.contract.by_jobs`: the room `pairs`, of two sharded jobs' steps of one model beside each other.

Each silent bug of the room `bugs` beside its right twin, small ones, as the first of the two or as the second: neither
job is the unsharded one, so that what ranks of one have is put together before it is compared.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.contract import store
from tests.contract.judge import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LARGEST = 320_000
"""Bytes of both that are compared."""
BEFORE_THE_STEP = "test_a_step_before_the_traced_one_is_told_from_other_weights"
OF_STAGES = "a tied weight on two stages"
OF_LOST_GRADIENTS = "rows of other ranks that get no gradient"
STEP = re.compile(r"::test_a_(right|silent)\w+\[(.*)\] step")
"""The names of cases that are a step with its trace, and the unsharded model's."""


def twins(bugs: store.Room) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, str]]]:
    """Yield each bug's name with the files of the right program and of the wrong one."""
    names: dict[str, dict[str, str]] = {}
    for name in bugs.cases:
        if (at := STEP.search(name)) is not None:
            names.setdefault(at[2], {})[at[1]] = name
    for bug, both in names.items():
        if len(both) == 2 and sum(map(bugs.size, both.values())) <= LARGEST:
            right, wrong = (bugs.cases[both[which]].inputs[1] for which in ("right", "silent"))
            yield bug, right, wrong


def with_settings(jobs: store.Room) -> Iterator[tuple[str, list[dict[str, bytes]]]]:
    """Yield a job of one process and one of two whose weights earlier steps moved apart, and what optimizers stepped.

    Args:
        jobs: The room that has them.
    """
    (name,) = (name for name in jobs.cases if f"{BEFORE_THE_STEP}[unreduced" in name)
    both = [{path: jobs.blobs[digest] for path, digest in files.items()} for files in jobs.cases[name].inputs]
    rates, decays = ((("lr", rate),) for rate in ("0.01", "0.02")), (("lr", "0.01"), ("weight_decay", "0.1"))
    first, second = rates
    choices = {
        "equal": (first, first, ""),
        "with another rate": (first, second, ""),
        "with a decay": ((*first, ("weight_decay", "0")), decays, ""),
        "in bfloat16": (first, first, "bfloat16"),
        "in bfloat16, after 20 steps": (first, first, "bfloat16"),
        "in bfloat16, with another rate": (first, second, "bfloat16"),
        "of weights in bfloat16 that are stepped in other copies": (first, (), "bfloat16"),
    }
    for how, (of_one, of_many, dtype) in choices.items():
        steps = 20 if "20" in how else 1
        yield f"earlier steps, {how}", [_stepped(both[0], of_one, "", steps), _stepped(both[1], of_many, dtype, steps)]


def _stepped(
    files: Mapping[str, bytes], options: tuple[tuple[str, str], ...], dtype: str, steps: int
) -> dict[str, bytes]:
    """Return a job's files with the options of all its parameters, and small weights in bfloat16 and 5% larger.

    Args:
        files: What the job wrote.
        options: The options; empty if the optimizer steps none of its parameters.
        dtype: The dtype of small weights; empty if they stay as they are.
        steps: How many optimizer steps it made before.
    """
    changed = dict(files)
    for path in files:
        if path.startswith("trace/rank_") and path.endswith(".json"):
            record = json.loads(files[path])
            bodies, record["steps_before"] = record["bodies"], steps
            names = [name for entry in record["tensors"] for name in _names(entry)]
            record["options"] = [{"options": options, "names": names}] if options else []
            for body in (body for body in bodies if dtype and body["role"] == "param" and "values" in body):
                bits = (np.asarray(body["values"], np.float32) * np.float32(1.05)).view(np.uint32) & 0xFFFF0000
                body |= {"dtype": dtype, "values": bits.view(np.float32).tolist()}
            for entry in record["tensors"] if dtype else ():
                entry.pop("digests")
            changed[path] = json.dumps(record).encode()
    return changed


def _names(entry: Mapping[str, Any]) -> list[str]:
    """Return the names of a record's tensors that differ in a number."""
    prefix, suffix = entry["name"], entry.get("suffix", "")
    return [
        f"{prefix}{number}{suffix}" for start, stop in entry.get("numbers", ()) for number in range(start, stop)
    ] or [prefix]


def in_float16(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a job's files in which small tensors of the trace say that they are float16, which allows them more."""
    changed = dict(files)
    for path in files:
        if "trace/rank_" in path and path.endswith(".json"):
            record = json.loads(files[path])
            for body in (body for body in record["bodies"] if "values" in body and body["dtype"].startswith("float")):
                body["dtype"] = "float16"
            for entry in record["tensors"]:
                entry.pop("digests", None)
            changed[path] = json.dumps(record, separators=(",", ":")).encode()
    return changed


def clipped(files: Mapping[str, bytes], norms: tuple[float, float]) -> dict[str, bytes]:
    """Return a job's files in which ranks say that they clip their gradients to 0.5, by norms that take turns."""
    changed = dict(files)
    for path in files:
        if path.startswith("trace/rank_") and path.endswith(".json"):
            record = json.loads(files[path])
            record["clips"] = [{"norm": norms[record["rank"] % 2], "limit": 0.5}]
            changed[path] = json.dumps(record).encode()
    return changed


def main() -> None:
    """Make the room, and judge it."""
    room, bugs = store.Room("pairs"), store.load("bugs")
    for at, (bug, right, wrong) in enumerate(twins(bugs)):
        both = [{path: bugs.blobs[digest] for path, digest in files.items()} for files in (right, wrong)]
        turned = both[::-1] if at % 2 else both
        room.add_content(bug, ("diff", "{0}", "{1}"), turned)
        if at % 3 == 0:
            room.add_content(f"{bug}, in float16", ("diff", "{0}", "{1}"), [in_float16(files) for files in turned])
        for norms in ((4.5, 25.25), (4.5, 4.5), (0.1, 0.2)) if bug == OF_LOST_GRADIENTS else ():
            room.add_content(f"{bug}, clipped by {norms}", ("diff", "{0}", "{1}"), [both[0], clipped(both[1], norms)])
    of_stages = [case for name, case in bugs.cases.items() if OF_STAGES in name and name.endswith(" step")]
    both = [{path: bugs.blobs[digest] for path, digest in case.inputs[1].items()} for case in of_stages]
    room.add_content("two pipelines", ("diff", "{0}", "{1}"), both)
    for name, contents in with_settings(store.load("jobs")):
        room.add_content(name, ("diff", "{0}", "{1}"), contents)
    record(room)


if __name__ == "__main__":
    main()
