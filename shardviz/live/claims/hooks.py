"""Modules whose load hooks split or merge tensors: torchtitan's `wqkv`, which a checkpoint has as `wq`, `wk` and `wv`.

The hook is run on the reference's own tensors, so that a weight is compared under the name that the model has for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardviz.live.capture.stamp import dtype_name
from shardviz.live.claims.made import Made, outline, values_of
from shardviz.live.compat import clean_name, load_hooks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from shardviz.reference.files import Entry, Reference


def checkpoint(model: nn.Module, reference: Reference) -> Reference | None:
    """Return a reference with what a model's own load hooks make of it; None where they make nothing new."""
    made: dict[str, Entry] = {}
    for name, module in model.named_modules():
        prefix = f"{clean_name(name)}." if name else ""
        if any(True for _ in load_hooks(module)):
            own = {key: entry for key, entry in reference.entries.items() if key.startswith(prefix)}
            made |= _made(module, prefix, own)
    return replace(reference, entries={**reference.entries, **made}) if made else None


def read_by(model: nn.Module, reference: Reference) -> dict[str, Entry]:
    """Return what a model's load hooks may read of a reference: a checkpoint's names, which are not the model's."""
    prefixes = tuple(
        f"{clean_name(name)}."
        for name, module in model.named_modules()
        if name and any(True for _ in load_hooks(module))
    )
    return {name: entry for name, entry in reference.entries.items() if name.startswith(prefixes)}


def _made(module: nn.Module, prefix: str, own: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the tensors that a module's hooks add, none where they cannot do with what the reference has."""
    try:
        loaded = _hooked(module, prefix, {key: outline(entry) for key, entry in own.items()})
    except Exception:  # a hook of somebody else's, that wants a checkpoint of another kind
        return {}

    def values(name: str) -> torch.Tensor:
        return _hooked(module, prefix, {key: values_of(entry) for key, entry in own.items()})[name]

    return {
        name: Made(dtype_name(one.dtype), tuple(one.shape), partial(values, name))
        for name, one in loaded.items()
        if name not in own and isinstance(one, torch.Tensor)
    }


def _hooked(module: nn.Module, prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for hook in load_hooks(module):
        hook(state, prefix, {}, True, [], [], [])
    return state
