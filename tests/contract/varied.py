"""Variants of recorded cases: one seeded change each, in the values, the layouts or the text of what ranks wrote.

`variant(case, blobs, seed)` returns the files of a variant and what was done to them, or nothing if the change drawn
does not fit. Values are scaled, moved by a little, exchanged between ranks, put in another order, transposed, rounded,
emptied; records, files and parts of files are dropped, doubled or exchanged; the calls of a module's lines change.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from tests.contract.changed_dumps import of_dump
from tests.contract.changed_files import is_safetensors, of_bytes, of_safetensors
from tests.contract.changed_lines import LINE, of_lines
from tests.contract.changes import small_change
from tests.contract.gaps import GAP, of_gap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.contract.store import Case

    Files = dict[str, bytes]

HOSTILE = re.compile("hostile|fuzz|damaged|refused|nothing_of|a_pickle")
"""Names of cases whose pickles may run without end where they are read as pickles are."""

EDGE = " by "
"""What stands in a seed before the size of a change that is as small, or as large, as still makes a difference."""


def variant(case: Case, blobs: Mapping[str, bytes], seed: str) -> tuple[str, list[Files]] | None:
    """Return what was changed in a case, and the files of its inputs."""
    edge, _, size = seed.partition(EDGE)
    rng = random.Random(f"{case.name} {edge}")
    inputs = [{name: blobs[digest] for name, digest in files.items()} for files in case.inputs]
    which = rng.randrange(len(inputs))
    files = inputs[which]
    change = small_change(rng, float(size)) if size else None
    if seed.startswith(LINE):
        done = of_lines(rng, files)
    elif seed.startswith(GAP):
        done = "" if HOSTILE.search(case.name) else of_gap(rng, files)
    elif any(name.endswith("run.json") for name in files):
        done = of_dump(rng, files, change)
    elif tensors := [name for name, content in files.items() if is_safetensors(content)]:
        done = of_safetensors(rng, files, rng.choice(tensors), change)
    else:
        done = "" if change else of_bytes(rng, files)
    is_changed = any(files.get(name) != blobs[digest] for name, digest in case.inputs[which].items())
    return (f"{which}: {done}", inputs) if done and is_changed else None
