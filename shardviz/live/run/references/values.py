"""Values from just before sharding, kept on disk: what shards must be pieces of.

Beside them, the memory that `Module.to_empty` gave to parameters and that nothing has written to since. A write shows
in the values or in the version counter that torch keeps of a tensor: `.data` hides it from the counter, the same values
again from the values. Memory that is the same number throughout, as fresh pages are zero, may have been written all the
same: it counts if another rank shows that nothing was. Buffers are passed over: a cache is written before it is read.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import sys
import zlib
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary
from weakref import ref as weakref

import torch
from torch import distributed, nn

from shardviz.checkpoint.formats.headers import DTYPES
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import dtype_name, storage_key
from shardviz.live.claims.registry import marks, of_tensor
from shardviz.live.compat.meshes import local_of
from shardviz.live.compat.modules import name_in
from shardviz.live.compat.tensors import tensor_behind, version_of
from shardviz.live.compat.worlds import default_store, have_come
from shardviz.live.run.hooks.observing import rank_of_environment, report
from shardviz.live.step.steppers import parameters_of
from shardviz.reference.files import Entry, open_reference

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping

    from shardviz.live.run.options import Options
    from shardviz.reference.files import Entry


NAME = "the values before sharding"

SAMPLE = 4096
"""Elements of a tensor that tell whether ranks had the same values: seeds that differ show in the first ones."""

UNINTERRUPTED = 60.0
"""Seconds for which Python would not let another thread run."""

META = (
    "it was on the meta device when it was sharded, and no checkpoint that was loaded afterwards has it, so the only "
    "question was whether ranks' shards are equal; make weights before you shard them, without the meta device, and "
    "every shard is compared"
)
UNSEEN = "its values before sharding were not seen, and no checkpoint that was loaded afterwards has it"
TOO_LARGE = "its values before sharding were not kept, and no checkpoint that was loaded afterwards has it"


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of one tensor from before it was sharded.

    Attributes:
        entry: Where its values are; None if this rank did not write them.
        sample: A checksum of its first values; None if it had none.
        why: Why it has no values.
        storage: The same for all parameters that shared storage.
    """

    entry: Entry | None
    sample: int | None
    why: str = ""
    storage: Hashable = None


class Values:
    """Values from before sharding, by the module that owns each tensor."""

    path = Path(NAME)
    is_snapshot = True
    is_guess = False

    def __init__(self, options: Options) -> None:
        self._session = Path(options.session)
        self._owners: WeakKeyDictionary[nn.Module, dict[str, Kept]] = WeakKeyDictionary()
        self._pointers: set[int] = set()
        self._num_files = 0
        self._num_looks = 0
        self._tied: list[list[tuple[weakref[nn.Module], str]]] = []
        self._parameters: WeakKeyDictionary[nn.Module, dict[str, weakref[torch.Tensor]]] = WeakKeyDictionary()

    def remember(self, module: nn.Module) -> None:
        """Keep the values of the whole model around a module, as far as they are new."""
        if all(part in self._owners for part in module.modules()):
            return
        self._num_looks += 1
        parts = [part for part in outermost(module).modules() if part not in self._owners]
        tensors = {(part, name): tensor for part in parts for name, tensor in _own_tensors(part)}
        plain = {where: tensor for where, tensor in tensors.items() if is_plain(tensor) and not _is_part(tensor)}
        entries = self._write(plain)
        for submodule in parts:
            self._owners[submodule] = {}
            own_parameters = submodule.named_parameters(recurse=False, remove_duplicate=False)
            self._parameters[submodule] = {name: weakref(parameter) for name, parameter in own_parameters}
        for (submodule, name), tensor in tensors.items():
            here = (submodule, name) in plain
            why = "" if (submodule, name) in entries else META if tensor.is_meta else TOO_LARGE if here else UNSEEN
            is_parameter = type(tensor) is nn.Parameter and tensor.numel()
            # A key that only parameters on the same memory share while they live.
            storage = (self._num_looks, storage_key(tensor)) if is_parameter else None
            entry_and_sample = entries.get((submodule, name)), sample(tensor) if here else None
            self._owners[submodule][name] = Kept(*entry_and_sample, why, storage)

    def knows(self, tensor: Any) -> bool:
        """Whether a tensor's memory belongs to a module that is known."""
        return isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.data_ptr() in self._pointers

    def owner_of(self, tensor: Any) -> nn.Module | None:
        """Return the living module that has a tensor, or another view of its memory."""
        if not is_plain(tensor):
            return None
        where = tensor.data_ptr()
        return next(
            (
                module
                for module in living_modules()
                for _, tensor in _own_tensors(module)
                if is_plain(tensor) and tensor.data_ptr() == where
            ),
            None,
        )

    def kept(self, root: nn.Module) -> dict[str, Kept]:
        """Return what is known of a model's tensors, by their names in it."""
        by_name: dict[str, Kept] = {}
        for prefix, module in root.named_modules(remove_duplicate=False):
            for name, values in self._owners.get(module, {}).items():
                by_name[name_in(prefix, name)] = values
        return by_name

    def replaced(self, root: nn.Module) -> Iterator[str]:
        """Yield parameters that an optimizer steps as they were before sharding, and none as they are in the model."""
        optimizers = living_optimizers() if root.training else ()
        stepped = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
        for prefix, module in root.named_modules():
            for name, before in self._parameters.get(module, {}).items():
                now, old = getattr(module, name, None), tensor_behind(before)
                is_trained = isinstance(now, torch.Tensor) and now.requires_grad and id(now) not in stepped
                if is_trained and old is not None and id(old) in stepped:
                    yield name_in(prefix, name)

    def remember_ties(self, module: nn.Module) -> None:
        """Keep which parameters are tied, before `to_empty` gives each module its own."""
        groups: dict[int, list[tuple[weakref[nn.Module], str]]] = defaultdict(list)
        for submodule in module.modules():
            for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
                groups[id(parameter)].append((weakref(submodule), name))
        self._tied += [group for group in groups.values() if len(group) > 1]

    def tied(self, root: nn.Module) -> list[tuple[str, ...]]:
        """Return the groups of a model's parameters that shared storage, as on the meta device too."""
        groups: dict[Hashable, list[str]] = defaultdict(list)
        for name, values in self.kept(root).items():
            if values.storage is not None:
                groups[values.storage].append(name)
        tied_names = [tuple(names) for names in groups.values() if len(names) > 1]
        return tied_names + [
            group for group in self._tied_names(root) if not any(set(group) & set(tied) for tied in tied_names)
        ]

    def _tied_names(self, root: nn.Module) -> Iterator[tuple[str, ...]]:
        prefixes = {id(module): prefix for prefix, module in root.named_modules(remove_duplicate=False)}
        for group in self._tied:
            owners = ((prefixes.get(id(module())), name) for module, name in group)
            names = [name_in(prefix, name) for prefix, name in owners if prefix is not None]
            if len(names) > 1:
                yield tuple(names)

    def entries(self, root: nn.Module, names: Collection[str]) -> dict[str, Entry]:
        """Return where a model's values are."""
        return {name: kept.entry for name, kept in self.kept(root).items() if kept.entry is not None}

    def _write(self, tensors: dict[tuple[nn.Module, str], torch.Tensor]) -> dict[tuple[nn.Module, str], Entry]:
        """Write values if this rank writes and the disk has room; shared memory is written once."""
        self._pointers |= {tensor.data_ptr() for tensor in tensors.values()}
        size = sum(tensor.nbytes for tensor in tensors.values())
        if not tensors or not may_write(self._session, size, "the values before sharding"):
            return {}
        by_memory = {
            where: (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            for where, tensor in tensors.items()
        }
        once = {memory: tensors[where] for where, memory in by_memory.items()}
        numbers = {memory: str(number) for number, memory in enumerate(once)}
        path = self._session / f"values-{rank_here()}-{self._num_files}.safetensors"
        self._num_files += 1
        written = write(path, {numbers[memory]: tensor for memory, tensor in once.items()})
        return {where: written[numbers[memory]] for where, memory in by_memory.items()}


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor was born split, as those of Megatron-core's layers and of DeepSpeed's `zero.Init` are."""
    return marks(tensor) and of_tensor("", "param", tensor).shape != tuple(tensor.shape)


def sample(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's first values."""
    values = tensor.detach().reshape(-1)[:SAMPLE].contiguous().cpu()
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes()) if values.numel() else 0


def _living(kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
    """Return every object of a class, or of some, in this process.

    No other thread runs meanwhile: torch 2.6.0 warns of each tensor that one of gloo's frees while all are in a list.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(UNINTERRUPTED)
    try:
        # By type(): isinstance would run the code of lazy proxies that say that they are something else.
        return [living for living in gc.get_objects() if issubclass(type(living), kind)]
    finally:
        sys.setswitchinterval(interval)


def living_modules() -> list[nn.Module]:
    """Return every module of this process."""
    modules = _living(nn.Module)
    return [module for module in modules if "_modules" in vars(module)]  # a wrapper that is being made has none yet


def living_collections() -> list[dict[Any, Any] | list[Any]]:
    """Return every dict and list of this process, none of a class that may answer with code of its own."""
    return [one for one in _living((dict, list)) if type(one) in (dict, OrderedDict, list)]


def living_optimizers() -> list[torch.optim.Optimizer]:
    """Return every optimizer of this process that has its groups."""
    return [optimizer for optimizer in _living(torch.optim.Optimizer) if "param_groups" in vars(optimizer)]


def outermost(module: nn.Module) -> nn.Module:
    """Return the largest living module around one: layers are sharded before the model."""
    return max((model for model in living_modules() if contains(model, module)), key=num_modules, default=module)


def contains(model: nn.Module, module: nn.Module) -> bool:
    """Whether a module is a model, or in it."""
    return any(part is module for part in model.modules())


def num_modules(model: nn.Module) -> int:
    """Return of how many modules a model is made, with itself."""
    return sum(1 for _ in model.modules())


@dataclass(frozen=True, slots=True)
class Memory:
    """A parameter's memory on this rank, and what tells whether anything wrote to it.

    Attributes:
        versions: torch's counters of writes, of the parameter and of this rank's part.
        sample: A checksum of its first values.
        is_alike: Whether these are anyway, by their bits.
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
        for submodule in module.modules():
            self._owners[submodule] = dict(_memories(submodule))

    def names(self, root: nn.Module) -> frozenset[str]:
        """Return parameters that still hold their memory's first content. Every rank calls this."""
        alike_here = {
            name_in(prefix, name): memory.is_alike
            for prefix, module in root.named_modules(remove_duplicate=False)
            if module in self._owners
            for name, memory in _memories(module)
            if self._owners[module].get(name) == memory
        }
        written = {name for of_rank in of_all_ranks(alike_here) for name, is_alike in of_rank.items() if not is_alike}
        return frozenset(alike_here) & written


def _memories(module: nn.Module) -> Iterator[tuple[str, Memory]]:
    """Yield the memory of a module's own parameters, as far as it has any."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        local = local_of(parameter).detach()
        if type(local) is torch.Tensor and not local.is_meta and local.layout == torch.strided and local.numel():
            yield name, Memory(local.data_ptr(), version_of(parameter), sample(local), _is_alike(local))


def _is_alike(local: torch.Tensor) -> bool:
    bits = local.reshape(-1)[:SAMPLE].contiguous().view(torch.uint8).view(-1, local.element_size())
    return bool((bits == bits[:1]).all())


SMALL = 16 << 20
"""Bytes of a model that every rank writes, so that what only another rank than rank 0 has is known too."""

PATIENCE = 10.0
"""Seconds that the first rank of another machine waits for rank 0 to say so."""


def rank_here() -> int:
    """Return this process's rank, before it has joined the others too."""
    return distributed.get_rank() if distributed.is_initialized() else rank_of_environment()


def may_write(session: Path | str, size: int, what: str) -> bool:
    """Whether this rank writes a model's values to its session's folder, with enough room.

    One rank on each disk does; all of them in a pipeline, whose layers differ, and of a small model.

    Args:
        what: What they are, for a report that there is no room.
    """
    is_of_all = size <= SMALL or "torch.distributed.pipelining" in sys.modules
    return (is_of_all or is_first_here(session)) and _has_room(session, size, what)


def is_first_here(folder: Path | str, what: str = "session") -> bool:
    """Whether this is rank 0, or the first rank of a machine without rank 0's folder."""
    if rank_here() == 0:
        if distributed.is_initialized():
            default_store().set(f"shardviz/{what}", str(folder))
        return True
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    return local_rank == "0" and distributed.is_initialized() and not _reaches_rank_0(what)


def _reaches_rank_0(what: str) -> bool:
    """Whether this machine reaches rank 0's folder; assumed so if rank 0 does not say."""
    store, key = default_store(), f"shardviz/{what}"
    return not have_come(store, [key], PATIENCE) or Path(store.get(key).decode()).is_dir()


def _has_room(folder: Path | str, size: int, what: str) -> bool:
    """Whether a disk has twice the room that values need; reported if not."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        report(f"{what} are not kept: {folder} is not reached on {socket.gethostname()}: {error.strerror}")
        return False
    if size > free // 2:
        report(
            f"{what} are not kept: they take {size:,} bytes, and {free:,} bytes are free in {folder}: give the "
            "checkpoint by --reference"
        )
        return False
    return True


def is_plain(tensor: Any) -> bool:
    """Whether a tensor has values that safetensors can hold as they are."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and dtype_name(tensor.dtype) in DTYPES.values()
    )


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Entry]:
    """Write tensors and return where each is; they are neither changed nor shared."""
    from safetensors.torch import save_file

    storages: set[int] = set()
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        values = tensor.detach().contiguous()
        storage = values.untyped_storage().data_ptr()
        whole[name] = values.clone() if storage in storages else values  # safetensors refuses tensors that share memory
        storages.add(storage)
    save_file(whole, path)
    return open_reference(path).entries
