"""Sources of a job's values: whole tensors given to torch, checkpoints, stamped or not, and opened files."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from shardviz.checkpoint.formats.headers import index_in
from shardviz.checkpoint.optimizer import moment_of
from shardviz.errors import ShardvizError
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name, named_tensors
from shardviz.live.claims.hooks import read_by
from shardviz.live.claims.registry import local_tensors, unwrapped
from shardviz.live.compat.meshes import local_of
from shardviz.live.compat.modules import clean_name
from shardviz.live.compat.worlds import default_store
from shardviz.live.run.hooks.observing import report
from shardviz.live.run.references.values import Values, contains, is_first_here, is_plain, may_write, rank_here, write
from shardviz.live.world.group import kept_random_states
from shardviz.reference.files import Entry, Reference, open_reference
from shardviz.reference.names import matched, wrapped_alone
from shardviz.stamping.fill import EXPONENTS, FEWEST, Fill, looks_filled
from shardviz.stamping.target import SAFETENSORS, json_object

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from shardviz.live.run.options import Options


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that a module has loaded.

    Attributes:
        reference: Its tensors, by the module's names.
        module: The module that loaded it; None if only the tensors are known.
        pointers: The memory of the tensors that were loaded into, if the module is not known.
        has_states: Whether it was loaded into an optimizer's states, too.
        copies: The tensors that were loaded into by name, if the module is not known.
    """

    path: Path
    reference: Reference
    module: weakref.ref[nn.Module] | None = None
    pointers: frozenset[int] = frozenset()
    has_states: bool = False
    copies: Mapping[str, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    is_snapshot = False  # what a job loads is what it wants
    is_guess = False

    def entries(self, root: nn.Module, names: Collection[str]) -> dict[str, Entry]:
        """Return the checkpoint's entries for a model that it, or a part of it, was loaded into."""
        prefix = self._prefix(root)
        if prefix is None:
            return {}
        full_names = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
        loaded = {
            full_names[name]: self.reference.entries[stored_name]
            for name, stored_name in matched(list(full_names), self.reference.entries).names.items()
        }
        return read_by(root, self.reference) | loaded

    def _prefix(self, root: nn.Module) -> str | None:
        if self.module is None:
            pointers = {local.values.data_ptr() for local in local_tensors(root)}
            return "" if pointers & self.pointers else None
        module = self.module()
        for name, submodule in root.named_modules():
            if module is not None and submodule is unwrapped(module):
                return clean_name(f"{name}.") if name else ""
        return "" if module is not None and contains(module, root) else None


STATE_DICT = Path("the state dict that was loaded")
"""The name of whole tensors that the job gave to a sharded model, whatever file they are from."""


def of_state_dict(model: nn.Module, state_dict: Mapping[str, Any], options: Options, number: int) -> Loaded | None:
    """Keep the whole tensors of a state dict that a sharded model loads, without DTensors."""
    tensors = {name: value for name, value in state_dict.items() if is_plain(value)}
    size = sum(value.nbytes for value in tensors.values())
    if not tensors or not may_write(options.session, size, "the values that were loaded"):
        return None
    path = Path(options.session) / f"loaded-{rank_here()}-{number}.safetensors"
    entries = write(path, tensors)
    return Loaded(STATE_DICT, Reference(path, entries), weakref.ref(model))


def of_dcp(state_dict: Mapping[str, Any], folder: str) -> Loaded | None:
    """Open the DCP folder that was loaded into a state dict's tensors."""
    reference = _open(folder)
    pointers = frozenset(local_of(value).data_ptr() for _, value in tensors_in(state_dict) if not value.is_meta)
    copies = {name: weakref.ref(value) for name, value in tensors_in(state_dict)}
    has_states = any(map(moment_of, copies))
    return Loaded(Path(folder), reference, None, pointers, has_states, copies) if reference else None


def has_shards(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict has parts of tensors: those of a model, or copies of them."""
    return any(isinstance(value, DTensor) for _, value in tensors_in(state_dict))


def of_pretrained(model: nn.Module, place: str) -> Loaded | None:
    """Open the local folder that a model was loaded from."""
    folder = Path(place)
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    reference = _open(place)
    return Loaded(folder, reference, weakref.ref(model)) if reference else None


def loaded_whole(model: nn.Module, loaded: Loaded, load: Callable[[], nn.Module], options: Options) -> Loaded | None:
    """Load a sharded model again, unsharded, to get the tensors that its library merges.

    One rank on each disk does so alone, and only if the checkpoint lacks some of the model's tensors by their names,
    and if the machine has memory for the whole model twice: the job needs some, too.
    """
    names = [name for name, _ in _named_tensors(model) if loaded.reference.find(name) is None]
    if not names or not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    if not is_first_here(options.session) or not _has_memory(model, loaded.path):
        return None
    with kept_random_states():
        tensors = dict(_named_tensors(load()))
    path = Path(options.session) / f"whole-{id(model)}.safetensors"
    entries = write(path, {name: tensors[name] for name in names if is_plain(tensors.get(name))})
    return Loaded(loaded.path, Reference(path, entries), weakref.ref(model))


def _has_memory(model: nn.Module, path: Path) -> bool:
    """Whether a whole model fits here; reported if it does not."""
    from shardviz.machine import free_memory

    size = sum(
        tensor.numel() * tensor.element_size() for _, tensor in _named_tensors(model)
    )  # a DTensor counts all elements
    free = free_memory()
    if free is None or size <= free // 2:
        return True
    report(
        f"{path.name} is not loaded whole, so tensors that its library merges are not compared: the model takes "
        f"{size:,} bytes, and {free:,} bytes of memory are free"
    )
    return False


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _open(place: str) -> Reference | None:
    try:
        return open_reference(place)
    except ShardvizError as error:
        report(f"what was loaded from {place} is not compared with it: {error.message}")
        return None


def tensors_in(nested: Any, before: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested state dict by the keys that lead to them."""
    pairs = nested.items() if isinstance(nested, dict) else ()
    for key, child in enumerate(nested) if isinstance(nested, list | tuple) else pairs:
        if isinstance(child, torch.Tensor):
            yield f"{before}{key}", child
        else:
            yield from tensors_in(child, f"{before}{key}.")


MOST = 64
"""Files that are remembered, the newest: a job may keep its data in safetensors files, too."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint that the job opened; whether it loaded anything from it is not known.

    Attributes:
        path: The file, or the folder whose index names it.
    """

    path: Path
    is_snapshot = True  # the job may have changed what it read
    is_guess = True  # it is compared with only if some rank holds what it has, or nothing else is known

    def entries(self, root: nn.Module, names: Collection[str]) -> dict[str, Entry]:
        """Return the checkpoint's entries for a model, by the model's names."""
        reference = self.opened()
        if reference is None:
            return {}
        stored_names = dict(matched(names, reference.entries).names)
        stored_names |= _wrapped_names(
            root, [name for name in names if name not in stored_names], reference, set(stored_names.values())
        )
        return {name: reference.entries[stored_name] for name, stored_name in stored_names.items()}

    def opened(self) -> Reference | None:
        """Return what it has, if it can be read."""
        with suppress(ShardvizError, OSError):  # it may be gone by now, and it was never asked for
            return open_reference(self.path)
        return None


Source = Values | Loaded | Opened
"""Values that a model's may be compared with.

Of snapshots the job may rightly have changed them since; of guesses it is not known that the model has them.
"""


def _wrapped_names(root: nn.Module, names: Iterable[str], reference: Reference, used: set[str]) -> dict[str, str]:
    """Return a checkpoint's names for weights whose modules were wrapped since, such as by LoRA."""
    shapes = {clean_name(name): tuple(tensor.shape) for _, name, tensor in named_tensors(root)}
    unused = {name: entry.shape for name, entry in reference.entries.items() if name not in used}
    return wrapped_alone(names, unused, lambda name, stored_name: shapes.get(name) == unused[stored_name])


def checkpoint_of(file: str | Path) -> tuple[Path, str]:
    """Return a file's checkpoint, and its name there; empty if the file is the checkpoint."""
    path = Path(os.path.abspath(file))
    index = index_in(path.parent) if path.suffix == SAFETENSORS and path.is_file() else None
    named = json_object(index.read_bytes()).get("weight_map") if index else None
    return (path.parent, path.name) if isinstance(named, dict) and path.name in named.values() else (path, "")


MARK = "loaded"
"""The file by which processes of one machine know it, and in the job's store the key for those of others."""


def note_stamped(session: str) -> None:
    """Tell all ranks that this one has loaded stamped values, which may come to them."""
    Path(session, MARK).touch()
    if distributed.is_initialized():
        default_store().set(f"shardviz/{MARK}", "1")


def has_stamped(session: str) -> bool:
    """Whether any process of the job has loaded stamped values, as far as it can be asked: else it may have."""
    if Path(session, MARK).exists():
        return True
    try:
        return distributed.is_initialized() and bool(default_store().check([f"shardviz/{MARK}"]))
    except (RuntimeError, ValueError):  # its server is gone
        return True


def looks_stamped(content: object, reference: str) -> bool:
    """Whether a pickle has weights of a stamped copy, which has no mark there.

    Args:
        reference: The copy. A pickle's tensor counts if it has the values of one of its shape, in whichever dtype.
    """
    nested = content.state_dict() if isinstance(content, nn.Module) else content
    tensors = (local_of(tensor).detach() for _, tensor in tensors_in(nested))
    likely = [tensor for tensor in tensors if _may_be_filled(tensor)]
    entries = open_reference(reference).entries if likely else {}
    return any(
        _has_values_of(tensor, Fill(name, entry.shape, entry.dtype))
        for tensor in likely
        for name, entry in entries.items()
        if entry.shape == tuple(tensor.shape) and entry.dtype in EXPONENTS
    )


def _may_be_filled(tensor: torch.Tensor) -> bool:
    if tensor.numel() < FEWEST or dtype_name(tensor.dtype) not in EXPONENTS or tensor.is_meta:
        return False
    return looks_filled(bits_of_tensor(tensor), dtype_name(tensor.dtype))


def _has_values_of(tensor: torch.Tensor, fill: Fill) -> bool:
    """Whether a tensor begins with the values of a fill, which may have been cast."""
    bits = fill.at(np.arange(FEWEST, dtype=np.uint64))
    values = torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(getattr(torch, fill.dtype)).to(tensor.dtype)
    return torch.equal(tensor.flatten()[:FEWEST].cpu(), values)


def has_tensors(value: Any) -> bool:
    """Whether a value that is saved has tensors in it, as far as that is seen from outside; so if it can't be asked."""
    try:
        return _has_tensors(value, set())
    except Exception:  # somebody's class may raise whatever it likes
        return True


def _has_tensors(value: Any, seen: set[int]) -> bool:
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, torch.Tensor) or hasattr(value, "state_dict"):
        return True
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return any(_has_tensors(child, seen) for child in children)
