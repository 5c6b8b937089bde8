"""Modules whose load hooks split or merge tensors, such as torchtitan's `wqkv`.

A checkpoint has it as `wq`, `wk` and `wv`. The hook is run on the reference's own tensors, so that a weight is compared
under the name that the model has for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardviz.live.capture.agreement import in_a_line
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name, values_of
from shardviz.live.compat.modules import clean_name, load_hooks
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import nn

    from shardviz.layout.region import Region
    from shardviz.reference.files import Entry, Reference


def checkpoint(model: nn.Module, reference: Reference) -> Reference | None:
    """Run a model's own load hooks on a reference; return None if they make no new tensors."""
    from_hooks: dict[str, Entry] = {}
    why: dict[str, str] = {}
    for name, module in model.named_modules():
        prefix = f"{clean_name(name)}." if name else ""
        if any(True for _ in load_hooks(module)):
            own_entries = {key: entry for key, entry in reference.entries.items() if key.startswith(prefix)}
            try:
                from_hooks |= _hook_tensors(module, prefix, own_entries)
            except Exception as error:  # a hook of somebody else's, that wants a checkpoint of another kind
                why |= _refusals(module, prefix, reference, error)
    if not from_hooks and not why:
        return None
    entries = {**reference.entries, **from_hooks}
    lacking = {name: text for name, text in why.items() if name not in entries}
    return replace(reference, entries=entries, why={**reference.why, **lacking})


def _refusals(module: nn.Module, prefix: str, reference: Reference, error: Exception) -> dict[str, str]:
    """Return why nothing is known of a module's tensors, by name."""
    hooks = f"the load hooks of {type(module).__name__} refuse its state: {in_a_line(error)}"
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {
        prefix + clean_name(name): f"{reference.path.name} has no tensor of this name, and {hooks}"
        for name, _ in tensors
    }


def read_by(model: nn.Module, reference: Reference) -> dict[str, Entry]:
    """Return the entries under checkpoint names that a model's load hooks may read."""
    prefixes = tuple(
        f"{clean_name(name)}."
        for name, module in model.named_modules()
        if name and any(True for _ in load_hooks(module))
    )
    return {name: entry for name, entry in reference.entries.items() if name.startswith(prefixes)}


def _hook_tensors(module: nn.Module, prefix: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the tensors that a module's hooks add.

    Raises:
        Exception: What a hook raises that cannot do with what the reference has.
    """
    loaded = _hooked(module, prefix, {key: outline(entry) for key, entry in entries.items()})

    def values(name: str) -> torch.Tensor:
        return _hooked(module, prefix, {key: values_of(entry) for key, entry in entries.items()})[name]

    return {
        name: Made(dtype_name(tensor.dtype), tuple(tensor.shape), partial(values, name))
        for name, tensor in loaded.items()
        if name not in entries and isinstance(tensor, torch.Tensor)
    }


def _hooked(module: nn.Module, prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for hook in load_hooks(module):
        hook(state, prefix, {}, True, [], [], [])
    return state


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor of the model that a loader makes of one or more tensors of a file.

    Attributes:
        make: Returns it; asked whenever it is compared, so that no more than one is in memory.
    """

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def bits(self) -> NDArray[Any]:
        """Its bits as unsigned integers."""
        return bits_of_tensor(self.make()).reshape(self.shape)

    def read(self, region: Region) -> NDArray[Any]:
        """Return the bits of a part, in the region's order."""
        return part_of(self.bits, region)


def outline(entry: Entry) -> torch.Tensor:
    """Return a tensor of a reference without its values."""
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
