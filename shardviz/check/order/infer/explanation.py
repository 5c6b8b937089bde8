"""An explanation: a disorder with a name that fits everything that the ranks hold of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shardviz.layout.layout import Layout

Disorder = Literal[
    "another-order",
    "cut-inner-first",
    "flattened",
    "mesh-order",
    "segments",
    "segments-under-fsdp",
    "unequal-segments",
    "across-segments",
    "round-robin",
    "one-factor",
    "another-dim",
    "another-axis",
    "replicated",
    "split",
    "another-layout",
    "same-shard",
    "repeated-shards",
    "shared-shards",
    "exchanged-ranks",
    "unread-shards",
    "reversed",
    "rotated",
    "global-rank",
    "permuted-ranks",
    "head-tail",
    "balanced",
    "reversed-dim",
    "rotated-dim",
    "interleaved",
    "rotary",
    "blocks",
    "as-text",
    "grouped",
    "within-shards",
    "alike-within-shards",
    "one-shard",
    "permuted-dim",
    "transposed",
    "transposed-shards",
    "without-strides",
    "padded",
    "other-tensor",
    "sequence-order",
    "sequence-restart",
    "odd-copies",
    "slices",
    "scrambled",
]
"""What happened to a tensor; `shardviz.check.order.advice` has the cause and the fix of each."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One disorder that fits.

    Attributes:
        name: Which disorder.
        sentence: What it means here, with the numbers in it.
        fix: What to change, in torch's own words.
        held: Where the elements are: in the notation where it has a word for it, in words otherwise.
        layout: The held layout, where the notation has one.
        details: Clauses that follow the sentence.
    """

    name: Disorder
    sentence: str
    fix: str
    held: str
    layout: Layout | None = None
    details: tuple[str, ...] = ()
