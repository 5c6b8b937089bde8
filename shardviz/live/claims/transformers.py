"""transformers: checkpoints that its loader renames and merges, such as a MoE's experts.

Its parameters are DTensors. What differs is the file: `experts.3.w1.weight` is a part of `experts.gate_up_proj`. The
library's own mapping from the names of files to those of the model says which, and how they are put together.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardviz.live.capture.stamp import values_of
from shardviz.live.claims.hooks import Made, outline
from shardviz.text import natural_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn

    from shardviz.reference.files import Entry, Reference


def checkpoint(model: nn.Module, reference: Reference) -> Reference | None:
    """Return a checkpoint under a transformers model's names; None if it has these already."""
    transforms = _transforms(model)
    if not transforms:
        return None
    loading = sys.modules["transformers.core_model_loading"]
    converters = [transform for transform in transforms if isinstance(transform, loading.WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    known_names: dict[str, Any] = {name: name for name, _ in tensors}
    entries: dict[str, Entry] = {}
    parts: dict[str, list[tuple[str, str]]] = {}
    for key, stored in reference.entries.items():
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, known_names)
        # as the loader does: a pattern for other tensors fits this name too
        if name not in known_names and key in known_names:
            name, pattern = loading.rename_source_key(key, [], [], model.base_model_prefix, known_names)
        if pattern is None:
            entries[name] = stored
        else:
            parts.setdefault(name, []).append((pattern, key))
    for name, sources in parts.items():
        entries |= _merge(model, by_pattern[sources[0][0]], name, sources, reference.entries)
    return replace(reference, entries=entries)


def _transforms(model: nn.Module) -> list[Any]:
    """Return transformers' conversions from checkpoint to model; empty if there are none."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        return []
    mapping = sys.modules.get("transformers.conversion_mapping")
    find = getattr(mapping, "get_model_conversion_mapping", None)
    return copy.deepcopy(find(model)) if find is not None else []


def _merge(
    model: nn.Module, converter: Any, name: str, sources: list[tuple[str, str]], entries: Mapping[str, Entry]
) -> dict[str, Entry]:
    """Return a converter's tensors, with their shapes, without reading the file's."""

    def outputs(read: Callable[[Entry], torch.Tensor]) -> dict[str, torch.Tensor]:
        fresh_converter = copy.deepcopy(converter)
        for pattern, key in sorted(sources, key=lambda pair: natural_key(pair[1])):
            fresh_converter.add_tensor(name, key, pattern, partial(read, entries[key]))
        results = fresh_converter.convert(name, model=model, config=getattr(model, "config", None))
        return {
            called: converted[0] if isinstance(converted, list) else converted for called, converted in results.items()
        }

    def made_alone(called: str) -> torch.Tensor:
        return outputs(values_of)[called]

    first = entries[sources[0][1]]
    return {
        called: Made(first.dtype, tuple(output.shape), partial(made_alone, called))
        for called, output in outputs(outline).items()
    }
