"""Which inputs grow, and what is done with each."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.check.report import grouped
from shardviz.explain.step.whole_step import WeightOnSomeRanks
from tests.gauges.growth import dumps, stored
from tests.gauges.growth.measure import growth_of
from tests.gauges.growth.uses import USES, verb

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from shardviz.explain.finding import Finding
    from tests.gauges.growth.measure import Growth, Work

    Make = Callable[[Path, int], None]

ONE = ("check", "show", "html", "diff", "view")
STEP = ("check", "show", "html", "view", "step")
PLAN = ("show", "html", "diff", "view", "memory")
TWO = ("diff", "diff html")
SMALLEST = 64
"""The size from which inputs are doubled until the work takes long enough."""


@dataclass(frozen=True)
class Input:
    """An input that grows.

    Attributes:
        name: What there is more of.
        makes: Writes the folder, or both folders that are compared.
        uses: What is done with it, names of `USES`.
    """

    name: str
    makes: tuple[Make, ...]
    uses: Sequence[str] = ONE

    def prepared(self, folder: Path, use: str, size: int) -> Work:
        """Write folders of a size, unless they are there, and return the work to do with them."""
        paths = []
        for make in self.makes:
            path = folder / f"{self.name.replace(' ', '-')}-{size}" / f"{make.__name__}.shardviz"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _in_a_child(functools.partial(make, path, size))
            paths.append(path)
        return functools.partial(USES[use], *paths)


def _in_a_child(make: Callable[[], None]) -> None:
    """Write a folder in a process of its own: what it imports and allocates is gone with it.

    Raises:
        RuntimeError: It failed.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            make()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"could not make {make}")


INPUTS = (
    Input("tensors", (dumps.tensors,)),
    Input("layers", (dumps.layers,)),
    Input("ranks", (dumps.ranks,), (*ONE, "memory")),
    Input("ranks with a finding", (dumps.ranks_found,)),
    Input("ranks of which half are lost", (dumps.ranks_lost,)),
    Input("tensors in one finding", (dumps.alike,)),
    Input("tensors with a finding each", (dumps.apart,)),
    Input("tensors that hold others", (dumps.of_other_tensors,)),
    Input("tensors never written", (dumps.never_written,)),
    Input("tensors whose copies differ", (dumps.copies_apart,)),
    Input("ranks on which one tensor is wrong", (dumps.on_one_tensor,)),
    Input("gradients", (dumps.gradients_right,), STEP),
    Input("gradients, each wrong", (dumps.gradients,), STEP),
    Input("gradients, all halved", (dumps.gradients_halved,), STEP),
    Input("modules of a trace", (dumps.trace,), (*STEP, "comms")),
    Input("modules of a trace, half wrong", (dumps.trace_found,), STEP),
    Input("modules of two traces", (dumps.trace, dumps.trace_found), ("diff",)),
    Input("calls of a trace", (dumps.calls,), STEP),
    Input("calls of a trace, half wrong", (dumps.calls_found,), STEP),
    Input("calls of two traces", (dumps.calls, dumps.calls_found), ("diff",)),
    Input("modules of a job", (dumps.job,), ("check", "diff", "diff html", "view")),
    Input("modules of two jobs", (dumps.job, dumps.job_found), TWO),
    Input("calls of a job", (dumps.job_calls,), ("diff", "diff html")),
    Input("calls of two jobs", (dumps.job_calls, dumps.job_calls_found), TWO),
    Input("modules of a job, with its checkpoint", (dumps.job, stored.keys_of_job), TWO),
    Input("chunks of a tensor", (stored.chunks,)),
    Input("chunks of a tensor, some twice", (stored.chunks_apart,)),
    Input("files of a checkpoint", (stored.files,)),
    Input("keys of a checkpoint", (stored.keys,)),
    Input("keys renamed", (stored.keys, stored.keys_renamed), ("diff",)),
    Input("keys changed", (stored.keys, stored.keys_changed), ("diff",)),
    Input("keys exchanged", (stored.keys, stored.keys_exchanged), ("diff",)),
    Input("keys scaled", (stored.keys, stored.keys_scaled), ("diff",)),
    Input("keys gone", (stored.keys, stored.keys_gone), ("diff",)),
    Input("ranks of a plan", (stored.planned_ranks,), PLAN),
    Input("stages of a plan", (stored.planned_stages,), PLAN),
)


def findings_of_one_tensor(num: int) -> Work:
    """Group findings of one tensor that are all alike, as a weight and its states may have them."""
    return functools.partial(grouped, [_finding("weight") for _ in range(num)])


def tensors_of_one_finding(num: int) -> Work:
    """Group findings that differ in their tensor alone."""
    return functools.partial(grouped, [_finding(f"layers.{at}.weight") for at in range(num)])


def _finding(tensor: str) -> Finding:
    return WeightOnSomeRanks((0, 1), "bias").finding(tensor, (0, 1), "the gradient is off by up to 0.25 on rank 0")


def planned(num: int) -> Work:
    """Plan a mesh of as many ranks, with as many rows in the batch."""
    return functools.partial(_plan, f"fsdp={num // 8},tp=8", f"{num},12")


def _plan(mesh: str, batch: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        verb("plan", "tp_fsdp", "--mesh", mesh, "--batch", batch, "-o", f"{folder}/plan.shardviz")


WORKS: Mapping[str, Callable[[int], Work]] = {
    "findings of one tensor: grouped": findings_of_one_tensor,
    "tensors of one finding: grouped": tensors_of_one_finding,
    "ranks of a mesh: plan": planned,
}
"""What reads no folder, by name."""


def grown(text: str = "", leave_out: Container[str] = ()) -> Iterator[tuple[str, Callable[[], Growth]]]:
    """Yield what is done with each input, and how to measure it; only names with a text in them, without some."""
    for what, made in WORKS.items():
        if text in what and what not in leave_out:
            yield what, functools.partial(growth_of, what, made, SMALLEST)
    for one in INPUTS:
        with tempfile.TemporaryDirectory() as folder:
            for use in one.uses:
                if text in (what := f"{one.name}: {use}") and what not in leave_out:
                    made = functools.partial(one.prepared, Path(folder), use)
                    yield what, functools.partial(growth_of, what, made, SMALLEST)
