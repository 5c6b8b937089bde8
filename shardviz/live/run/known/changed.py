"""How a tensor differs from what a file has, where all of its elements follow one rule: a factor, a number, the type.

Whether the rule was meant is the job's business: weights are scaled on purpose, and scales of quantized
ones are forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardviz.errors import DumpError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import stored_slice
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name, from_bits
from shardviz.relate.casts import cast
from shardviz.relate.relations import Offset, Scaled
from shardviz.relate.stored import line_between
from shardviz.relate.tolerance import ROUNDINGS_OF_RULE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from shardviz.live.capture.locals import Local
    from shardviz.reference.files import Entry

HALVES = (torch.float16, torch.bfloat16)

LEAST = 8
"""Elements that a rule needs: a few numbers may follow any rule by chance."""


def changes(locals_: Iterable[Local], entries: Mapping[str, Entry]) -> Callable[[Collection[str]], dict[str, str]]:
    """Return a function that says how tensors differ from a reference, where all ranks agree. Every rank calls it."""
    own = {local.name: local for local in locals_}

    def found(names: Collection[str]) -> dict[str, str]:
        mine = {name: _how(own[name], entries[name]) for name in names if name in own and own[name].values.numel()}
        by_name: dict[str, set[str]] = {}
        for of_rank in of_all_ranks(mine):
            for name, text in of_rank.items():
                by_name.setdefault(name, set()).add(text)
        return {name: texts.pop() for name, texts in by_name.items() if len(texts) == 1 and texts != {""}}

    return found


def _how(local: Local, entry: Entry) -> str:
    """Return how a shard differs from the slice that it claims, as the rest of a sentence; empty where no rule fits."""
    if local.values.is_meta or not local.values.dtype.is_floating_point or local.values.numel() < LEAST:
        return ""
    try:
        bits = stored_slice(local, entry)
    except (DumpError, OSError):  # not readable here: the look-up of the tensor says so
        return ""
    stored = getattr(torch, entry.dtype, None)
    if bits is None or stored is None or not stored.is_floating_point:
        return ""
    return _by_type(local.values.detach().cpu(), from_bits(bits, stored)) or _by_number(local, bits, entry.dtype)


def _by_number(local: Local, bits: NDArray[Any], stored: str) -> str:
    """Return the factor, or the number, by which all elements differ."""
    dtype = dtype_name(local.values.dtype)
    before = cast(bits, stored, dtype)
    after = bits_of_tensor(local.values)
    relation = line_between(before, after, dtype, ROUNDINGS_OF_RULE) if before is not None else None
    if isinstance(relation, Scaled):
        return f"each element is {relation.factor:.4g} times what it has there: a scale was applied, or left out"
    if isinstance(relation, Offset):
        sign = "+" if relation.number > 0 else "-"
        return f"each element is what it has there {sign} {abs(relation.number):.4g}"
    return ""


def _by_type(own: torch.Tensor, stored: torch.Tensor) -> str:
    """Return the dtype as which the file's bytes were read, whether or not they were cast afterwards."""
    for taken in HALVES:
        is_another = taken != stored.dtype and taken.itemsize == stored.dtype.itemsize
        if is_another and torch.equal(stored.view(taken).to(own.dtype).nan_to_num(), own.nan_to_num()):
            was, now = (str(one).removeprefix("torch.") for one in (stored.dtype, taken))
            return f"its bytes there, which are {was}, were read as {now}"
    return ""
