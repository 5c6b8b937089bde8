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
    """

    rule: str
    probes: tuple[str, ...] = ()
    page: str = ""


KINDS: Mapping[Kind, KindPage] = {
    "misordered": KindPage(
        "every element once, not where claimed; the order that fits is named",
        (
            *("left_to_right_2d", "swiglu_interleaved", "fused_qkv_fsdp", "rotary_permuted", "uneven_strided"),
            "fsdp_over_two_axes",
        ),
    ),
    "misordered-within-shard": KindPage(
        "the right elements on each rank, in another order inside", page="tests/check/test_misordered.py"
    ),
    "duplicated": KindPage("an element too often", ("first_shard_everywhere",)),
    "missing": KindPage("an element that no rank holds", ("first_shard_everywhere",)),
    "foreign": KindPage(
        "values that are not this tensor's: another's, padding, memory that nothing wrote to after `to_empty`",
        page="tests/check/test_counts.py",
    ),
    "wrong-shape": KindPage("a local shape that chunking cannot give", ("from_local_without_shape",)),
    "wrong-placement": KindPage(
        "a label that cannot be right; the label that fits is named", page="tests/check/test_misordered.py"
    ),
    "wrong-segment": KindPage("consistent, but cut across what the model reads", ("fused_qkv",)),
    "unreplicated": KindPage("copies that must be equal are not", ("replicas_differ", "buffers_differ")),
    "identical-shards": KindPage(
        "different shards, bitwise the same: one seed everywhere", ("one_seed_on_every_shard",)
    ),
    "unreduced-gradient": KindPage(
        "each rank has its own part of a gradient where the sum belongs",
        ("hybrid_shard_of_one", "sequence_parallel_norm"),
    ),
    "unreduced-output": KindPage(
        "each rank has its own part of an output where the sum belongs", page="tests/check/test_step.py"
    ),
    "unreduced-scalar": KindPage("each rank logs its own part where the sum belongs", ("item_of_partial",)),
    "wrong-scale": KindPage(
        "an axis's size too many or too few, a bias added twice, a number of each rank's own",
        ("row_bias_on_every_rank", "average_for_sum"),
    ),
    "wrong-value": KindPage(
        "not the unsharded model's, and no ratio explains it: where, and which module to look at; weights and "
        "optimizer state after the step too; in a checkpoint, moments that are NaN, negative squares, zero moments "
        "after several steps, and steps of two saves or set back to 0",
        page="tests/check/test_step_causes.py",
    ),
    "untied": KindPage("shared storage before, two tensors now", ("tied_apart",)),
    "name-collision": KindPage("one name, different weights on different ranks", ("experts_renumbered",)),
    "sequence-order": KindPage(
        "what goes along one sequence is split in different orders: context parallel", ("positions_in_plain_order",)
    ),
    "write-not-applied": KindPage(
        "a fill or a load that did not take: what was read back is not what was written",
        page="tests/check/test_writes.py",
    ),
    "collective-mismatch": KindPage("shards are right, torch's own reassembly is not", page="demos/live_bug/README.md"),
    "raised": KindPage(
        "the sharded step raises, and the unsharded one does not", page="tests/live/test_contradictions.py"
    ),
    "rank-order": KindPage(
        "a rank's place in its group is not its place on the mesh", page="tests/check/test_whole_dump.py"
    ),
    "incomplete": KindPage("ranks, tensors or files missing from the dump", page="tests/check/test_whole_dump.py"),
}
"""Every kind, in the order in which a reader would look for it."""
