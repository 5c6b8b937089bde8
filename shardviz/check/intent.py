"""`wrong-segment`, and other differences between what is held and what the author wants.

The run names layouts by patterns over names (`expect` in a probe). A tensor that is labelled and held alike can still
be split across the segments that the model reads: a fused q,k,v wants `[24/3/tp, 8]`, and `[24/tp, 8]` gives a rank
rows of q and half of k. What differs in its segments is `wrong-segment`; anything else is `wrong-placement`, for the
label is not the one that was meant.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardviz.check.finding import Finding, Kind
from shardviz.check.infer.labels import right_label
from shardviz.check.infer.layout import same_region
from shardviz.errors import ShardvizError
from shardviz.notation import Pattern, parse, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.check.case import Case
    from shardviz.dump.tensors import Tensor
    from shardviz.layout import Layout

CAUSE = "The dim was split as a whole, across the segments that the model reads, as ColwiseParallel does a fused weight"
REFS = ("Automodel#1324", "pytorch#140069", "DeepSpeed#3844")


def intended_text(intended: Mapping[str, str], name: str) -> str:
    """Return the layout that is wanted for a name, in the notation; empty where nothing was said."""
    return next((text for pattern, text in intended.items() if fnmatchcase(name, pattern)), "")


def is_intended(tensor: Tensor, text: str) -> bool:
    """Whether a tensor that holds what it claims claims what is wanted, or nothing is; False where that is unclear."""
    if not text:
        return True
    try:
        return tensor.claimed is not None and parse(text).matches(tensor.claimed)
    except ShardvizError:
        return False


def check_intent(case: Case, text: str) -> Iterator[Finding]:
    """Yield the difference between what a case holds, rightly labelled or plain, and the layout in `text`.

    Raises:
        ShardvizError: The text is no layout, or does not fit the tensor or its mesh.
    """
    pattern = parse(text)
    if case.claimed is not None and pattern.matches(case.claimed):
        return
    wanted = _layout(case, pattern)
    wrong = [
        shard.rank
        for coord, shard in case.shards.items()
        if coord not in case.regions or not same_region(wanted.region(coord), case.regions[coord])
    ]
    if not wrong and not _pending_differs(case, wanted):
        return
    held = write(case.held) if case.held is not None else "no layout of the notation"
    kind = _kind(wanted, case.held)
    yield Finding(
        kind,
        "error",
        case.name,
        tuple(sorted(wrong)),
        f"{len(wrong)} of {len(case.shards)} ranks hold other elements than intended: held {held}, intended {text}",
        case.claimed_text,
        held,
        text,
        CAUSE if kind == "wrong-segment" else "The plan shards this tensor in another way than its author expects",
        f"split it by {right_label(wanted)}, or change what is expected to {held}",
        REFS if kind == "wrong-segment" else (),
    )


def _layout(case: Case, pattern: Pattern) -> Layout:
    shape = case.tensor.shape if case.claimed is not None else case.shape
    if pattern.flat is None and not pattern.fits_shape(shape):
        raise ShardvizError(f"intended {pattern} does not fit the tensor's shape {list(shape)}")
    wanted = pattern.layout(case.mesh, None if pattern.flat else shape)
    if wanted.index_shape != case.shape:
        raise ShardvizError(
            f"intended {pattern} is not how the tensor is held: {case.claimed_text or list(case.shape)}"
        )
    return wanted


def _pending_differs(case: Case, wanted: Layout) -> bool:
    return case.claimed is not None and set(case.claimed.partial) != set(wanted.partial)


def _kind(wanted: Layout, held: Layout | None) -> Kind:
    numbers = [[link for link in chain if isinstance(link, int)] for chain in wanted.chains]
    own = [[link for link in chain if isinstance(link, int)] for chain in held.chains] if held is not None else []
    return "wrong-segment" if any(numbers) and numbers != own else "wrong-placement"
