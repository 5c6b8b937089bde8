"""Stamped copies of the checkpoints that a job loads, in its session's folder: the first rank that asks makes one."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.live.run.known.files import checkpoint_of
from shardviz.live.run.notes import Note, leave
from shardviz.stamping.dcp_copy import stamp_dcp
from shardviz.stamping.safetensors_copy import stamp_safetensors
from shardviz.stamping.target import SAFETENSORS, is_stamped
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.stamping.plan import Plan

DCP = ".metadata"
"""The file by which a folder of torch.distributed.checkpoint is known."""


class Copies:
    """The copies of a job.

    Args:
        session: The job's folder, which its ranks reach.
        rank: This process's rank, for notes.
    """

    def __init__(self, session: str, rank: int) -> None:
        self._session = Path(session)
        self._rank = rank

    def of(self, place: str | Path) -> tuple[Path, Path] | None:
        """Return the copy of a checkpoint, and what in it stands for a place; None where no checkpoint is there.

        Args:
            place: A file or folder that the job is about to open.

        Raises:
            DumpError: The checkpoint cannot be read, or the copy cannot be written.
        """
        root, name = checkpoint_of(place)
        if not _is_checkpoint(root) or self._session in root.parents:
            return None
        copy = root if is_stamped(root) else self._made(root)
        return copy, copy / name if name else copy

    def _made(self, root: Path) -> Path:
        salt = salt_of(root)
        folder = self._session / "stamped" / salt
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / root.name
        with _alone(folder / "lock"):
            if not copy.exists():
                stamp = stamp_dcp if (root / DCP).is_file() else stamp_safetensors
                self._say(root, stamp(root, copy, salt=salt))
        return copy

    def _say(self, root: Path, made: Plan) -> None:
        what = f"{root} is loaded as a stamped copy of it: {counted(len(made.fills), 'tensor')} stamped"
        leave(self._session, Note("source", self._rank, what + (f", {len(made.kept)} kept" if made.kept else "")))


def salt_of(root: Path) -> str:
    """Return what tells a checkpoint's fills from those of others with the same names."""
    return blake2b(str(root).encode(errors="surrogateescape"), digest_size=6).hexdigest()


def _is_checkpoint(root: Path) -> bool:
    """Whether a place is what can be copied: a safetensors file, a folder of them, or a DCP folder."""
    if root.is_dir():
        return (root / DCP).is_file() or any(root.glob(f"*{SAFETENSORS}"))
    return root.suffix == SAFETENSORS and root.is_file()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let one process at a time do something; the kernel lets the next one do it where one was killed."""
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
