"""The kinds of finding, each in one line, with probes that show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.explain.finding import Kind


class KindPage(NamedTuple):
    """What a kind of finding means.

    Attributes:
        rule: What is wrong, in one line.
        probes: Probes of `probes/bugs` that show it.
        page: What shows it if no probe does: tests or a demo, from the repository's root.
        follows_from: The kinds of which it is a consequence: next to one of them, of the same tensor, it is left out.
            In a step, whose results are computed from each other, next to one of any tensor.
        unexplained_from: The same of findings without a cause, in addition.
    """

    rule: str
    probes: tuple[str, ...] = ()
    page: str = ""
    follows_from: frozenset[Kind] = frozenset()
    unexplained_from: frozenset[Kind] = frozenset()


ORDER: frozenset[Kind] = frozenset({"misordered", "misordered-within-shard", "wrong-placement", "wrong-shape"})
"""Every element is there, but not where the label says."""

PLACES: frozenset[Kind] = ORDER | {"missing", "duplicated", "foreign", "name-collision"}
"""The shards do not hold the elements they claim: some are lost, repeated, not the tensor's own, or out of order."""

LABELS: frozenset[Kind] = frozenset({"wrong-placement", "wrong-shape", "sequence-order"})
"""Why the order does not match the label: one that cannot be right, or context parallel, which reorders on purpose."""

UNCOMPARED: frozenset[Kind] = PLACES | {"wrong-segment", "collective-mismatch", "sequence-order"}
"""Why copies cannot be compared: ranks do not hold what the label says, or the label is not the intended one."""

SEQUENCES: frozenset[Kind] = frozenset({"sequence-order"})

VALUES: frozenset[Kind] = frozenset({"unreplicated", "identical-shards"})
"""Values that replaced the ids: how they differ between ranks says what wrote them."""

RESULTS: frozenset[Kind] = frozenset(
    {"misordered", "wrong-scale", "wrong-value", "unreduced-output", "unreduced-scalar"}
)
"""Wrong results of a step from which others, that no rule explains, may be computed."""


KINDS: Mapping[Kind, KindPage] = {
    "misordered": KindPage(
        "each element is held once, but not where the placements claim",
        (
            *("left_to_right_2d", "swiglu_interleaved", "fused_qkv_fsdp", "rotary_permuted", "uneven_strided"),
            "fsdp_over_two_axes",
        ),
        follows_from=LABELS,
    ),
    "misordered-within-shard": KindPage(
        "each rank holds the right elements, but in a different order",
        page="tests/contract/texts/dumps.txt",
        follows_from=LABELS,
    ),
    "duplicated": KindPage("an element is held too often", ("first_shard_everywhere",), follows_from=SEQUENCES),
    "missing": KindPage("an element is held by no rank", ("first_shard_everywhere",), follows_from=SEQUENCES),
    "foreign": KindPage(
        "values of a different tensor, padding, or memory that nothing wrote to after `to_empty`",
        page="tests/contract/texts/dumps.txt",
        follows_from=SEQUENCES,
        unexplained_from=VALUES,
    ),
    "wrong-shape": KindPage(
        "a local shape that chunking cannot give", ("from_local_without_shape",), follows_from=LABELS
    ),
    "wrong-placement": KindPage(
        "the placements cannot be right; the finding names those that fit",
        page="tests/contract/texts/dumps.txt",
        follows_from=LABELS,
    ),
    "wrong-segment": KindPage(
        "consistent shards, but cut across the segments that the model reads", ("fused_qkv",), follows_from=SEQUENCES
    ),
    "unreplicated": KindPage(
        "copies that must be equal are not", ("replicas_differ", "buffers_differ"), follows_from=UNCOMPARED
    ),
    "identical-shards": KindPage(
        "shards that should differ are bitwise equal: one seed everywhere",
        ("one_seed_on_every_shard",),
        follows_from=UNCOMPARED,
    ),
    "unreduced-gradient": KindPage(
        "each rank has its own part of a gradient instead of the sum",
        ("hybrid_shard_of_one", "sequence_parallel_norm"),
    ),
    "unreduced-output": KindPage(
        "each rank has its own part of an output instead of the sum", page="tests/contract/texts/dumps.txt"
    ),
    "unreduced-scalar": KindPage("each rank logs its own part instead of the sum", ("item_of_partial",)),
    "wrong-scale": KindPage(
        "off by a factor: the size of an axis, a bias added twice, a count of the rank's own part",
        ("row_bias_on_every_rank", "average_for_sum", "mean_over_shards"),
    ),
    "wrong-value": KindPage(
        "differs from the unsharded model's, and no ratio explains it: the finding names the place and the module to "
        "look at; also weights and optimizer state after the step; in a checkpoint, moments that are NaN, negative "
        "squares, zero moments after several steps, and steps of two saves or set back to 0",
        page="tests/contract/texts/dumps.txt",
        unexplained_from=RESULTS,
    ),
    "untied": KindPage("two tensors that shared storage before sharding", ("tied_apart",)),
    "name-collision": KindPage(
        "one name stands for different weights on different ranks", ("experts_renumbered",), follows_from=SEQUENCES
    ),
    "sequence-order": KindPage(
        "tensors of one sequence are split in different orders, under context parallel", ("positions_in_plain_order",)
    ),
    "write-not-applied": KindPage(
        "a fill or a load that did not take: what was read back is not what was written",
        page="tests/contract/texts/dumps.txt",
    ),
    "collective-mismatch": KindPage(
        "shards are right, but what torch gathers from them is not",
        page="demos/live_bug/README.md",
        follows_from=PLACES,
    ),
    "raised": KindPage(
        "the sharded step raises, and the unsharded one does not", page="tests/live/test_contradictions.py"
    ),
    "rank-order": KindPage(
        "a rank's place in its group is not its place on the mesh", page="tests/contract/texts/dumps.txt"
    ),
    "incomplete": KindPage("ranks, tensors or files missing from the dump", page="tests/contract/texts/dumps.txt"),
}
"""Every kind, in the order in which a reader would look for it."""
