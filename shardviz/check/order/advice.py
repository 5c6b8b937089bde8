"""The catalogue: for every disorder that a tensor can be found in, its most likely cause, its fix, and upstream bugs.

Fixes are templates; the fields in braces are filled by the module that recognised the disorder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardviz.check.order.infer.explanation import Disorder

FSDP_OVER_TP = ("pytorch#129229", "pytorch#129206", "pytorch#130760")
SWIGLU = ("Megatron-LM#2769", "ROCm/Megatron-LM#63")
FUSED_QKV = ("Automodel#1324", "pytorch#140069", "DeepSpeed#3844")


@dataclass(frozen=True, slots=True)
class Advice:
    """Why it happened and what to do, and how a finding says so.

    Attributes:
        cause: The most likely cause, one sentence.
        fix: What to change, in torch's own words.
        refs: Known upstream bugs of this kind.
        clause: How the finding's sentence ends.
        details: What follows the sentence.
        also: What else fits.
    """

    cause: str
    fix: str
    refs: tuple[str, ...] = ()
    clause: str = ""
    details: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


CATALOGUE: dict[Disorder, Advice] = {
    "another-order": Advice(
        "One library split the dim over the inner axis first and another split each part again, while the placements "
        "read as if the axes had been applied left to right: FSDP2 over tensor parallel before torch 2.5 did so",
        "upgrade torch to 2.5 or newer, or label the local tensors by {placements}",
        FSDP_OVER_TP,
    ),
    "cut-inner-first": Advice(
        "The shards were cut over the inner axis first, as FSDP2 over tensor parallel does or a number that counts the "
        "outer axis fastest, while the placements, written by hand, read as if the axes had been applied left to right",
        "label the local tensors by {placements}, which fully_shard writes itself, or cut each shard by its "
        "placements, as distribute_tensor does",
        FSDP_OVER_TP,
    ),
    "flattened": Advice(
        "The shard was chosen by a number that was computed from the coordinates on the axes that were flattened, and "
        "not as flattening counts them: the last axis fastest",
        "choose the shard by get_local_rank() of the flattened mesh itself, or by {number}",
    ),
    "mesh-order": Advice(
        "The parts were cut, read or put together by the rank's number, the mesh's first axis first, while the "
        "placements are those of FSDP2 over tensor parallel, which split the dim over the inner axis first: a "
        "checkpoint of a job on another mesh, or weight.chunk(world_size)[rank]",
        "cut each shard by its placements, as distribute_tensor and torch.distributed.checkpoint do, or label the "
        "local tensors by {placements}",
    ),
    "segments": Advice(
        "A fused weight (q,k,v or gate/up) was split segment by segment, but labelled as one dim",
        "label the local tensors by {placements}, or split the dim as a whole",
        SWIGLU,
    ),
    "segments-under-fsdp": Advice(
        "FSDP2 splits what each rank has of a fused weight (q,k,v or gate/up) as one stretch. No placements say that: "
        "its label has one split_factor for the ranks and one for the segments, which torch reads as another order",
        "{way}give each segment a Linear of its own",
        FUSED_QKV,
    ),
    "unequal-segments": Advice(
        "A fused weight whose segments differ in size (q,k,v with fewer key and value heads) was split segment by "
        "segment, but labelled as one dim; no placements say such a split",
        "give each segment a Linear of its own, or treat the weight as stored in rank order: full_tensor() needs its "
        "rows put back",
        SWIGLU,
    ),
    "across-segments": Advice(
        "The placements say that the dim was split segment by segment, but it was split as a whole",
        "label the local tensors by {placements}, or split each segment with torch.chunk by itself",
        FUSED_QKV,
    ),
    "one-factor": Advice(
        "FSDP2 splits a dim that several axes split unevenly before it; its label has one split_factor for all of "
        "them, which says the same only where every size divides",
        "make the dim divide by all axes but the last (pad it), or split it over one axis besides fsdp",
    ),
    "another-dim": Advice(
        "The tensor was split on another dim than its placements name, as when ColwiseParallel and RowwiseParallel "
        "are confused or the weight is stored transposed",
        "label the local tensors by {placements}, or split the dim that the placements name",
    ),
    "replicated": Advice(
        "The whole tensor was given to DTensor.from_local where a shard was wanted",
        "label the local tensors by {placements}, or use distribute_tensor, which cuts the shards itself",
    ),
    "split": Advice(
        "Local shards were given to DTensor.from_local with Replicate(), which does not look at them",
        "label the local tensors by {placements}",
    ),
    "round-robin": Advice(
        "The dim was dealt out in turn, as by weight[rank::size], or segment by segment, where Shard means one stretch",
        "choose the shard by torch.chunk, or label the local tensors by {placements}",
    ),
    "another-axis": Advice(
        "The shard was chosen by the coordinate on another axis than the one that the placements name: the axes were "
        "confused, or the coordinate was computed from the global rank",
        "choose the shard by mesh.get_local_rank({axis!r}), or label the local tensors by {placements}",
    ),
    "another-layout": Advice(
        "The tensor was split in another way than its placements say",
        "label the local tensors by {placements}, or redistribute after labelling",
    ),
    "same-shard": Advice(
        "The loader chose the shard without the rank's coordinate on the axis: a tp_rank left at its default, or one "
        "file that all ranks read",
        "choose the shard by mesh.get_local_rank({axis!r})",
        ("vllm-gguf-plugin#103",),
    ),
    "repeated-shards": Advice(
        "Several ranks read the same part: the shard was chosen by less than the whole coordinate, as where a "
        "file that several ranks share is read from its start, or the coordinate was divided or wrapped by the number "
        "of ranks of another job",
        "choose the shard by {coordinate}, undivided; read a file with the shards of several ranks at each rank's own "
        "offset",
    ),
    "shared-shards": Advice(
        "A few ranks read another rank's part: an index that was clamped or is off by one at its end, a part that was "
        "saved or copied under several names",
        "look for how these ranks choose what they read (min(), a last index, a list of files), and compare the files "
        "of both",
    ),
    "exchanged-ranks": Advice(
        "A few ranks have each other's parts: files or hosts were exchanged, or entries of a list of files or hosts",
        "look for the list or the file names by which these ranks find their parts",
    ),
    "unread-shards": Advice(
        "A few ranks have the parts of ranks that were not read: files or hosts were exchanged, or entries of a list "
        "of them, or a part was copied under several names",
        "look for the list or the file names by which these ranks find their parts, and check again with the files of "
        "all ranks",
    ),
    "reversed": Advice(
        "The loader counts the coordinate from the other end, or the mesh was built from ranks in falling order",
        "choose the shard by mesh.get_local_rank({axis!r}), and build the mesh by init_device_mesh",
    ),
    "rotated": Advice(
        "Shards were sent on to a neighbour, as in a ring, or the coordinate has an offset",
        "choose the shard by mesh.get_local_rank({axis!r})",
    ),
    "global-rank": Advice(
        "The shard was chosen by the global rank, where the coordinate on one axis of the mesh was meant",
        "choose the shard by mesh.get_local_rank({axis!r}), not by torch.distributed.get_rank()",
    ),
    "permuted-ranks": Advice(
        "The loader numbers the ranks in another order than the mesh, as with a DeviceMesh whose ranks are not rising",
        "choose the shard by mesh.get_coordinate(), not by the global rank, or build the mesh by init_device_mesh",
    ),
    "head-tail": Advice(
        "The dim is in the head-tail order that balances causal attention in context parallel, but is labelled as if "
        "it were in its own order",
        "undo the order before anything reads the dim by placement: context_parallel_unshard does, by the load "
        "balancer's restore indices",
    ),
    "balanced": Advice(
        "The dim was split as evenly as possible (numpy.array_split, tensor_split), where Shard means torch.chunk: "
        "full chunks first, the remainder last",
        "split with torch.chunk, or pad the dim to a multiple of the axis",
    ),
    "reversed-dim": Advice(
        "The dim was reversed before it was split", "undo it: full_tensor().flip({dim}) is the tensor in order"
    ),
    "rotated-dim": Advice(
        "The dim was rolled before it was split", "undo it: full_tensor().roll({undo}, {dim}) is the tensor in order"
    ),
    "interleaved": Advice(
        "The segments of a fused weight (gate/up, q/k/v) or of shards were interleaved on load",
        "undo it where the weight is loaded: {undo}",
        SWIGLU,
    ),
    "rotary": Advice(
        "The weight has the rotary order of the other convention: Hugging Face's halves where the model reads "
        "interleaved pairs, or the other way round: permuted on load",
        "undo it where the weight is loaded: {undo}",
        ("torchtitan#1483",),
    ),
    "blocks": Advice(
        "Segments of the dim (gate and up; q, k, v; experts) were put together in another order than the model reads",
        "put the segments together in the order that the model reads",
    ),
    "as-text": Advice(
        "Names that end in numbers were sorted as text, where 10 comes before 2: sorted(names), glob and os.listdir "
        "put experts, layers and files of shards in that order",
        "sort by the number: sorted(names, key=lambda name: int(re.findall(r'\\d+', name)[-1]))",
    ),
    "grouped": Advice(
        "All groups of this size were reordered by one and the same index: the rows of a head, of an expert or of a "
        "block where it was before the split, or those of every shard where it was after it",
        "undo it where the weight is loaded: {undo}",
    ),
    "within-shards": Advice(
        "Shards were reordered after the split, by an index that is not the same on all ranks: one that was drawn, "
        "sorted or computed on each rank by itself",
        "look for the index or sort that runs on the local shard, and leave its elements in order",
    ),
    "alike-within-shards": Advice(
        "Shards were reordered after the split, each one that is out of order by the same rule; or these stretches of "
        "the dim were before it",
        "look for the index, flip or sort that runs on the local shard, and leave its elements in order",
    ),
    "one-shard": Advice(
        "One shard was reordered after the split: by what only its ranks run or read, or by a sort that finds others "
        "in order; or this stretch of the dim was before it",
        "look for the index, flip or sort that runs on this shard, or the file that it was read from, and leave its "
        "elements in order",
    ),
    "permuted-dim": Advice(
        "The dim was reordered before it was split, and no simple rule fits the order",
        "look for the index or gather that reorders this dim where the weight is loaded",
    ),
    "transposed": Advice(
        "The weight was transposed before it was split: Conv1D and Linear store theirs the other way round",
        "transpose it where it is loaded: {undo}",
    ),
    "transposed-shards": Advice(
        "Each local shard was transposed after the split", "give DTensor.from_local the local tensor transposed back"
    ),
    "without-strides": Advice(
        "The memory of a transposed tensor was read or written as if it were contiguous, without its strides",
        "call .contiguous() on the tensor before its memory is read, or copy it by Tensor.copy_, which heeds strides",
    ),
    "padded": Advice(
        "Padding was put before the content, so that every index moved up",
        "pad at the end of the dim, and cut the padding off before the tensor is labelled",
    ),
    "other-tensor": Advice(
        "The names were mixed up where the weights were loaded or the modules were renamed",
        "load each tensor under its own name; compare the keys of the two state_dicts",
    ),
    "sequence-order": Advice(
        "Context parallel reorders what it is given to balance causal attention (head and tail): one of them went "
        "through it, the other was cut by itself",
        "give {name} and {other} to one context_parallel(mesh, buffers=[...], buffer_seq_dims=[...]), or index both by "
        "the same positions",
    ),
    "sequence-restart": Advice(
        "Every rank counts its own part of the sequence from the start, as by arange(local_length) or freqs[:length]",
        "take {name} at the global positions that {other} has on this rank, or give both to context_parallel",
    ),
    "odd-copies": Advice(
        "Copies of one shard were not made by the same code: what loaded or changed these depends on the coordinate "
        "along an axis that does not split the tensor",
        "choose and load each shard by the axes that split the tensor alone, or torch.distributed.broadcast it along "
        "{axis} from {axis}={right}",
    ),
    "slices": Advice(
        "Some slices of a stack (experts, heads, layers) were loaded in another way than the rest: from a file of "
        "another convention, or through code that only they go through",
        "look for code that treats these slices differently where they are loaded; to undo it for them alone: {undo}",
    ),
    "scrambled": Advice(
        "Nothing that shardviz knows fits: shards were written by ranks or in an order that follow no simple rule",
        "start from the first differences above: which code wrote these elements?",
    ),
}
