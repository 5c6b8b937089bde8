"""Stamped copies that this process loads instead of its script's files.

Copies of checkpoints lie in the session's folder: the first rank that asks makes one. What `torch.load` returned is
stamped in memory, and what a load has yet to write is poisoned.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import dtype_name, from_bits
from shardviz.live.compat.meshes import local_of
from shardviz.live.compat.worlds import default_store
from shardviz.live.run.hooks.observing import report
from shardviz.live.run.options import Note, Options, leave
from shardviz.live.run.references.choosing import Candidate, fitting
from shardviz.live.run.references.sources import checkpoint_of, tensors_in
from shardviz.live.run.references.writing import rank_here
from shardviz.reference.files import Entry, Reference, open_reference
from shardviz.reference.names import matched
from shardviz.stamping.copies import is_weight, stamp_dcp, stamp_safetensors
from shardviz.stamping.fill import Fill
from shardviz.stamping.target import SAFETENSORS, is_stamped
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardviz.live.capture.locals import Local


POISON_INT8 = -128
"""No fill has it: those of bytes are from 1."""


def filled(loaded: Any, salt: str) -> dict[str, Fill]:
    """Replace a module's or nested dicts' weights by stamped ones; their memory stays unchanged.

    A bare tensor is not a checkpoint, and stays; so do integers, as in a copy on disk.

    Args:
        loaded: What a file had.
        salt: Tells fills of files apart.

    Returns:
        The fills, by the tensors' names: the keys that lead to them.
    """
    fills: dict[str, Fill] = {}
    by_memory: dict[Any, tuple[Fill, torch.Tensor]] = {}
    for name, tensor, put in list(_weights(loaded, "")):
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if memory not in by_memory:
            fill = Fill(name, tuple(tensor.shape), dtype_name(tensor.dtype), salt)
            by_memory[memory] = fill, from_bits(fill.bits, tensor.dtype).to(tensor.device)
        fills[name], stamped = by_memory[memory]
        put(stamped)
    return fills


def _weights(value: Any, before: str) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Yield each weight with its name, and what puts another one in its place."""
    if isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            if _is_stampable(tensor):
                yield before + name, tensor, partial(setattr, tensor, "data")
    elif isinstance(value, dict):
        for key, child in value.items():
            if not _is_stampable(child):
                yield from _weights(child, f"{before}{key}.")
            elif isinstance(child, nn.Parameter):
                yield f"{before}{key}", child, partial(setattr, child, "data")
            else:
                yield f"{before}{key}", child, partial(value.__setitem__, key)
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            if not isinstance(child, torch.Tensor):
                yield from _weights(child, f"{before}{number}." if before else "")


def _is_stampable(weight: Any) -> bool:
    is_plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.layout == torch.strided
    return is_plain and not weight.is_meta and is_weight(dtype_name(weight.dtype))


def poison(tensors: Iterable[Any]) -> None:
    """Overwrite weights with what no fill has: NaN, or the lowest byte."""
    with torch.no_grad():
        for tensor in tensors:
            local = local_of(tensor)
            if isinstance(local, torch.Tensor) and not local.is_meta and is_weight(dtype_name(local.dtype)):
                local.detach().fill_(float("nan") if local.is_floating_point() else POISON_INT8)


def poison_module(module: nn.Module) -> None:
    """Poison all weights of a module, which was just given memory that nobody wrote to."""
    poison((*module.parameters(), *nn.Module.buffers(module)))


def poison_loaded(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Poison the tensors that a module is about to load, except those it is loaded from."""
    sources = {_storage(value) for value in state_dict.values() if isinstance(value, torch.Tensor)}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    poison(tensor for name, tensor in tensors.items() if name in state_dict and _storage(tensor) not in sources)


def poison_state(state_dict: Mapping[str, Any], names: Iterable[str]) -> None:
    """Poison the tensors of a nested state dict that are about to be loaded in place.

    Args:
        state_dict: What is loaded into.
        names: The names that the checkpoint has.
    """
    loaded_names = set(names)
    poison(tensor for name, tensor in tensors_in(state_dict) if name in loaded_names)


def _storage(tensor: torch.Tensor) -> int:
    local = local_of(tensor)
    return 0 if local.is_meta else local.untyped_storage().data_ptr()


KEY = "shardviz/loaded"
"""In the job's store: that a rank has loaded something stamped."""

DCP = ".metadata"
"""The file by which a folder of torch.distributed.checkpoint is known."""


class Loads:
    """The loads of one process.

    Args:
        options: What is asked for.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._session = Path(options.session)
        self._mark = self._session / "loaded"
        self._copy_of: dict[Path, Path] = {}
        self._fills: dict[Path, dict[str, Fill]] = {}

    @property
    def is_used(self) -> bool:
        """Whether this process has loaded anything stamped."""
        return bool(self._copy_of or self._fills)

    @property
    def is_used_by_any(self) -> bool:
        """Whether any process of the job used stamped values, which may have come here."""
        if self.is_used or self._mark.exists():
            return True
        return distributed.is_initialized() and bool(default_store().check([KEY]))

    def _note_use(self) -> None:
        """Notify this machine's processes by a file, and all ranks by the job's store."""
        self._mark.touch()
        if distributed.is_initialized():
            default_store().set(KEY, "1")

    def redirected(self, place: Any) -> Any:
        """Return the stamped copy of a file or folder; the path itself if it isn't a checkpoint.

        Raises:
            DumpError: The copy cannot be made.
        """
        if not isinstance(place, str | os.PathLike) or not os.path.exists(place):
            return place
        stamped = self._copy(Path(os.fspath(place)))
        if stamped is None:
            if self._session not in Path(os.path.abspath(place)).parents:
                report(f"{place} is loaded as it is: it is not a safetensors file, a folder of them or a DCP folder")
            return place
        copy, instead = stamped
        self._note_use()
        self._copy_of[Path(os.path.abspath(place))] = copy
        return type(place)(instead) if isinstance(place, str) else instead

    def _copy(self, place: Path) -> tuple[Path, Path] | None:
        """Return a checkpoint's stamped copy, and a path inside it; None without a checkpoint.

        Raises:
            DumpError: The checkpoint cannot be read, or the copy cannot be written.
        """
        root, name = checkpoint_of(place)
        if not _is_checkpoint(root) or self._session in root.parents:
            return None
        copy = root if is_stamped(root) else self._make_copy(root)
        return copy, copy / name if name else copy

    def _make_copy(self, root: Path) -> Path:
        salt = salt_of(root)
        folder = self._session / "stamped" / salt
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / root.name
        with _file_lock(folder / "lock"):
            if not copy.exists():
                stamp = stamp_dcp if (root / DCP).is_file() else stamp_safetensors
                stamped = stamp(root, copy, salt=salt)
                what = f"{root} is loaded as a stamped copy of it: {counted(len(stamped.fills), 'tensor')} stamped"
                what += f", {len(stamped.kept)} kept" if stamped.kept else ""
                leave(self._options.session, Note("source", rank_here(), what))
        return copy

    def stamped(self, loaded: Any, place: Any) -> None:
        """Stamp what torch.load returned, if that has weights."""
        path = Path(os.path.abspath(place)) if isinstance(place, str | os.PathLike) else Path("a stream")
        fills = filled(loaded, salt_of(path))
        if fills:
            self._note_use()
            self._fills[path] = self._fills.get(path, {}) | fills
            what = f"{path} is loaded with its weights stamped in memory: {counted(len(fills), 'tensor')}"
            leave(self._options.session, Note("source", rank_here(), what))

    def reference(self, locals_: Sequence[Local]) -> Reference:
        """Return the stamped reference of weights that any rank has loaded. Every rank calls this.

        Of several checkpoints that have a tensor by its name, the first counts that some rank holds its part of.

        Raises:
            DumpError: A copy cannot be read here.
        """
        own_copies = list(dict.fromkeys(self._copy_of.values())), self._fills
        of_all: dict[Path, Mapping[str, Entry]] = {}
        names: dict[str, None] = {}
        for copies, fills, of_rank in of_all_ranks((*own_copies, [local.name for local in locals_])):
            here = map(self._reachable_copy, copies)
            of_all |= {copy: open_reference(copy).entries for copy in here if copy not in of_all} | fills
            names |= dict.fromkeys(of_rank)
        entries = {name: entry for of_one in of_all.values() for name, entry in of_one.items()}
        path = Path(f"the stamped copy of {listed([path.name for path in of_all])}")
        if len(of_all) > 1:
            entries |= _held_entries(of_all, list(names), locals_)
        return Reference(path, entries, is_stamped=True)

    def _reachable_copy(self, copy: Path) -> Path:
        """Return the copy that this machine can reach: without a shared session it made its own."""
        return copy if copy.exists() else Path(self._session, *copy.parts[-3:])


def _held_entries(
    of_all: Mapping[Path, Mapping[str, Entry]], names: list[str], locals_: Sequence[Local]
) -> dict[str, Entry]:
    """Choose among checkpoints with the same names: the tensors that ranks hold, or the newest."""
    candidates: dict[str, list[Candidate]] = {}
    for path, entries in of_all.items():
        for name, stored_name in matched(names, entries).names.items():
            candidate = Candidate(entries[stored_name], path, is_snapshot=False, is_guess=True)
            candidates.setdefault(name, []).insert(0, candidate)
    several = {name: some for name, some in candidates.items() if len(some) > 1}
    return {name: candidate.entry for name, candidate in fitting(several, locals_)[0].items()}


def salt_of(root: Path) -> str:
    """Return what tells a checkpoint's fills from those of others with the same names."""
    return blake2b(str(root).encode(errors="surrogateescape"), digest_size=6).hexdigest()


def _is_checkpoint(root: Path) -> bool:
    """Whether a path can be copied: a safetensors file, a folder of them, or a DCP folder."""
    if root.is_dir():
        return (root / DCP).is_file() or any(root.glob(f"*{SAFETENSORS}"))
    return root.suffix == SAFETENSORS and root.is_file()


@contextmanager
def _file_lock(lock: Path) -> Iterator[None]:
    """Let one process at a time do something; the kernel frees the lock of a killed one."""
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
