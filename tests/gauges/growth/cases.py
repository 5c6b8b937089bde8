"""Which inputs grow, from which size, and what is done with each."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gauges.growth import dumps, stored
from tests.gauges.growth.measure import growth_of
from tests.gauges.growth.uses import USES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.gauges.growth.measure import Growth, Work

    Make = Callable[[Path, int], None]

ONE = ("check", "show", "html", "diff", "view")
STEP = ("check", "show", "html", "view", "step")
PLAN = ("show", "html", "diff", "view", "memory")
TWO = ("diff", "diff html")


@dataclass(frozen=True)
class Input:
    """An input that grows.

    Attributes:
        name: What there is more of.
        size: The smaller size.
        makes: Writes the folder, or both folders that are compared.
        uses: What is done with it, names of `USES`.
    """

    name: str
    size: int
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
    Input("tensors", 400, (dumps.tensors,)),
    Input("layers", 1000, (dumps.layers,)),
    Input("ranks", 256, (dumps.ranks,), (*ONE, "memory")),
    Input("ranks with a finding", 256, (dumps.ranks_found,)),
    Input("ranks of which half are lost", 256, (dumps.ranks_lost,)),
    Input("tensors in one finding", 200, (dumps.alike,)),
    Input("tensors with a finding each", 200, (dumps.apart,)),
    Input("tensors that hold others", 200, (dumps.of_other_tensors,)),
    Input("tensors never written", 200, (dumps.never_written,)),
    Input("tensors whose copies differ", 200, (dumps.copies_apart,)),
    Input("ranks on which one tensor is wrong", 64, (dumps.on_one_tensor,)),
    Input("gradients", 200, (dumps.gradients_right,), STEP),
    Input("gradients, each wrong", 100, (dumps.gradients,), STEP),
    Input("gradients, all halved", 100, (dumps.gradients_halved,), STEP),
    Input("modules of a trace", 800, (dumps.trace,), (*STEP, "comms")),
    Input("modules of a trace, half wrong", 800, (dumps.trace_found,), STEP),
    Input("modules of two traces", 800, (dumps.trace, dumps.trace_found), ("diff",)),
    Input("calls of a trace", 800, (dumps.calls,), STEP),
    Input("calls of a trace, half wrong", 800, (dumps.calls_found,), STEP),
    Input("calls of two traces", 800, (dumps.calls, dumps.calls_found), ("diff",)),
    Input("modules of a job", 200, (dumps.job,), ("check", "diff", "diff html", "view")),
    Input("modules of two jobs", 200, (dumps.job, dumps.job_found), TWO),
    Input("calls of a job", 200, (dumps.job_calls,), ("diff", "diff html")),
    Input("calls of two jobs", 200, (dumps.job_calls, dumps.job_calls_found), TWO),
    Input("chunks of a tensor", 400, (stored.chunks,)),
    Input("chunks of a tensor, some twice", 400, (stored.chunks_apart,)),
    Input("files of a checkpoint", 100, (stored.files,)),
    Input("keys of a checkpoint", 400, (stored.keys,)),
    Input("keys renamed", 400, (stored.keys, stored.keys_renamed), ("diff",)),
    Input("keys changed", 400, (stored.keys, stored.keys_changed), ("diff",)),
    Input("keys exchanged", 400, (stored.keys, stored.keys_exchanged), ("diff",)),
    Input("keys scaled", 400, (stored.keys, stored.keys_scaled), ("diff",)),
    Input("keys gone", 400, (stored.keys, stored.keys_gone), ("diff",)),
    Input("ranks of a plan", 512, (stored.planned_ranks,), PLAN),
    Input("stages of a plan", 16, (stored.planned_stages,), PLAN),
)


def uses_of_all() -> Iterator[tuple[Input, str]]:
    """Yield every input with everything that is done with it."""
    for one in INPUTS:
        for use in one.uses:
            yield one, use


def grown(text: str = "") -> Iterator[Growth]:
    """Measure what is done with each input; only those pairs whose name has a text in it."""
    for one, use in uses_of_all():
        what = f"{one.name}: {use}"
        if text in what:
            with tempfile.TemporaryDirectory() as folder:
                yield growth_of(what, functools.partial(one.prepared, Path(folder), use), one.size)
