"""Tensors written to safetensors in the session's folder, for later comparison."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from shardviz.checkpoint.formats.headers import DTYPES
from shardviz.live.capture.stamp import dtype_name
from shardviz.live.compat.worlds import default_store, have_come
from shardviz.live.run.hooks.observing import rank_of_environment, report
from shardviz.reference.files import Entry, open_reference

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        session: The folder.
        size: The bytes of the values.
        what: What they are, for a report that there is no room.
    """
    is_of_all = size <= SMALL or "torch.distributed.pipelining" in sys.modules
    return (is_of_all or is_first_here(session)) and _has_room(session, size, what)


def is_first_here(folder: Path | str, what: str = "session") -> bool:
    """Whether this is rank 0, or the first rank of a machine without rank 0's folder.

    Args:
        folder: This rank's, which is there.
        what: What it is for.
    """
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
