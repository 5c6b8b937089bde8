"""Memory that `Module.to_empty` gave to a model's parameters and that nothing has written to since.

A write shows in the values or in the version counter that torch keeps of a tensor: `.data` hides it from the counter,
the same values again from the values. Memory that is the same number throughout, as fresh pages are zero, may have been
written all the same: it counts where another rank shows that nothing was. Buffers are passed over: a cache is written
before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.compat import clean_name, local_of, version_of
from shardviz.live.run.known.values import SAMPLE, sample

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Memory:
    """A parameter's memory on this rank, and what tells whether anything wrote to it.

    Attributes:
        pointer: Its address.
        versions: torch's counters of writes, of the parameter and of this rank's part.
        sample: A checksum of its first values.
        is_alike: Whether these are all the same, by their bits.
    """

    pointer: int
    versions: tuple[int, int]
    sample: int
    is_alike: bool


class Unwritten:
    """What `to_empty` allocated, by the module that owns each parameter."""

    def __init__(self) -> None:
        self._owners: WeakKeyDictionary[nn.Module, dict[str, Memory]] = WeakKeyDictionary()

    def remember(self, module: nn.Module) -> None:
        """Look at a module's memory just after `to_empty`."""
        for part in module.modules():
            self._owners[part] = dict(_memories(part))

    def names(self, root: nn.Module) -> frozenset[str]:
        """Return a model's parameters that hold what their memory held when it was allocated. Every rank calls this."""
        mine = {
            clean_name(f"{prefix}.{name}" if prefix else name): memory.is_alike
            for prefix, module in root.named_modules(remove_duplicate=False)
            if module in self._owners
            for name, memory in _memories(module)
            if self._owners[module].get(name) == memory
        }
        seen = {name for of_rank in of_all_ranks(mine) for name, is_alike in of_rank.items() if not is_alike}
        return frozenset(mine) & seen


def _memories(module: nn.Module) -> Iterator[tuple[str, Memory]]:
    """Yield the memory of a module's own parameters, as far as it has any."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        local = local_of(parameter).detach()
        if type(local) is torch.Tensor and not local.is_meta and local.layout == torch.strided and local.numel():
            yield name, Memory(local.data_ptr(), version_of(parameter), sample(local), _is_alike(local))


def _is_alike(local: torch.Tensor) -> bool:
    bits = local.reshape(-1)[:SAMPLE].contiguous().view(torch.uint8).view(-1, local.element_size())
    return bool((bits == bits[:1]).all())
