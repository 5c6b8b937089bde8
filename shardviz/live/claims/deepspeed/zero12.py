"""DeepSpeed's ZeRO-1, ZeRO-2 and bfloat16 optimizer: whole weights, fragmented masters.

Each rank's optimizer steps a part of a flat buffer. `_hp_mapping` of a parameter says which of its elements the part
has (`lp_fragment_address`) and where in the part they are (`hp_fragment_address`). Tried on DeepSpeed 0.19.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed

from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims.deepspeed.fragment import Fragment
from shardviz.live.compat import clean_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import nn


def fragments(engine: nn.Module, model: nn.Module) -> Iterator[Fragment]:
    """Yield this rank's fragment of every parameter that DeepSpeed has linked to a flat buffer.

    Args:
        engine: The engine, whose optimizer has the moments; or the model itself.
        model: The unwrapped model.
    """
    states, visited = _states(engine), set()
    for role, name, tensor in named_tensors(model):
        if role == "param" and hasattr(tensor, "_hp_mapping") and id(tensor) not in visited:
            visited.add(id(tensor))
            yield _fragment(clean_name(name), tensor, states)


def _fragment(name: str, param: Any, of_buffers: Mapping[int, dict[str, torch.Tensor]]) -> Fragment:
    mapping, group = param._hp_mapping, param._dp_group
    ranks = tuple(distributed.get_process_group_ranks(group))
    shape, weight = tuple(param.shape), param.detach().flatten()
    if mapping is None:
        return Fragment(name, shape, ranks, 0, weight[:0].float(), weight, is_whole=True, group=group)
    address, at = mapping.lp_fragment_address, mapping.hp_fragment_address
    flat = mapping.hp_fragment._base
    partition_size = 0 if flat is None else flat.numel()
    offset = ranks.index(distributed.get_rank()) * partition_size + at.start - address.start if partition_size else None
    buffers = {
        kind: state.detach().flatten()
        for kind, state in of_buffers.get(id(flat), {}).items()
        if state.numel() == partition_size
    }
    values = mapping.hp_fragment.detach()
    return Fragment(
        name,
        shape,
        ranks,
        address.start,
        values,
        weight,
        is_whole=True,
        offset=offset,
        part=partition_size,
        states={kind: state[at.start : at.start + at.numel] for kind, state in buffers.items()},
        group=group,
        buffer=int(mapping.param_group_index),
        buffers=buffers,
    )


def _states(engine: nn.Module) -> dict[int, dict[str, torch.Tensor]]:
    """Return the states of each of an engine's flat buffers, by the buffer's identity.

    DeepSpeed itself links a fragment's states when the first buffer is stepped, and the later ones' are never linked.
    """
    optimizer = getattr(getattr(engine, "optimizer", None), "optimizer", None)
    groups = getattr(optimizer, "param_groups", ())
    return {
        id(flat): {
            kind: moment
            for kind, moment in getattr(optimizer, "state", {}).get(flat, {}).items()
            if hasattr(moment, "numel") and moment.ndim
        }
        for group in groups
        for flat in group["params"]
    }
