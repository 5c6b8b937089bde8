"""`wrong-placement` of an optimizer's state that is not laid out as its author wants.

A pattern of `expect` is about states if it fits no weight: `*.exp_avg`, `up.weight.*`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardviz.explain.states import StateOfAnotherLayout
from shardviz.layout.intended import parse_intended
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.layout.notation import Pattern


def check_states(dump: Dump) -> Iterator[Finding]:
    """Yield the states whose layout is not the intended one."""
    patterns = of_states(dump)
    for tensor in dump.at("step") if patterns else ():
        for name in tensor.names if tensor.role == "optim" else ():
            text = next((text for pattern, text in patterns.items() if fnmatchcase(name, pattern)), "")
            if text and (finding := _compared(tensor, name, text)) is not None:
                yield finding


def of_states(dump: Dump) -> Mapping[str, str]:
    """Return the intentions that fit a state and no weight."""
    states = {name for tensor in dump.at("step") if tensor.role == "optim" for name in tensor.names}
    return {
        pattern: text
        for pattern, text in dump.files.run.intended.items()
        if not any(fnmatchcase(name, pattern) for name in dump.stamped)
        and any(fnmatchcase(name, pattern) for name in states)
    }


def _compared(tensor: Tensor, name: str, text: str) -> Finding | None:
    wanted = parse_intended(text)
    wrong = [shard for shard in tensor.shards.values() if not _fits(tensor, shard.rank, wanted)]
    if not wrong:
        return None
    first = wrong[0]
    held = write(first.layout) if first.layout is not None else f"{list(first.body.local_shape)}, plain"
    return StateOfAnotherLayout().finding(
        name,
        tuple(sorted(shard.rank for shard in wrong)),
        f"the optimizer's state is {held} on {len(wrong):,} of {len(tensor.shards):,} ranks, not the intended {text}",
        claimed=write(first.layout) if first.layout is not None else "",
        held=held,
        intended=text,
    )


def _fits(tensor: Tensor, rank: int, wanted: Pattern) -> bool:
    shard = tensor.shards[rank]
    if shard.layout is not None:
        return wanted.matches(shard.layout)
    splits = any(wanted.chains) or wanted.partial or wanted.flat
    return not splits and wanted.fits_shape(shard.body.local_shape)
