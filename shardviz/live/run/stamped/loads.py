"""What this process loads in place of what its script names, and what its weights are compared with after that.

Copies of checkpoints lie in the session's folder: the first rank that asks makes one.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed

from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.compat import default_store
from shardviz.live.run.hooks.observing import report
from shardviz.live.run.known.choosing import Candidate, fitting
from shardviz.live.run.known.sources import checkpoint_of
from shardviz.live.run.known.writing import rank_here
from shardviz.live.run.options import Note, leave
from shardviz.live.run.stamped.memory import filled
from shardviz.reference.files import Reference, open_reference
from shardviz.reference.names import matched
from shardviz.stamping.copies import stamp_dcp, stamp_safetensors
from shardviz.stamping.target import SAFETENSORS, is_stamped
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.live.capture.locals import Local
    from shardviz.live.run.options import Options
    from shardviz.reference.files import Entry
    from shardviz.stamping.fill import Fill

MAX_LISTED = 3

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
        """Whether any process of the job has, whose values may have come here: what was saved before is untouched."""
        if self.is_used or self._mark.exists():
            return True
        return distributed.is_initialized() and bool(default_store().check([KEY]))

    def _note_use(self) -> None:
        """Let the other processes know, those of this machine by a file and all ranks by the job's store."""
        self._mark.touch()
        if distributed.is_initialized():
            default_store().set(KEY, "1")

    def redirected(self, place: Any) -> Any:
        """Return what is opened in place of a file or folder: its stamped copy, or itself if it is not a checkpoint.

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
        """Return the stamped copy of a checkpoint, and what in it stands for a place; None if no checkpoint is there.

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
                made = stamp(root, copy, salt=salt)
                what = f"{root} is loaded as a stamped copy of it: {counted(len(made.fills), 'tensor')} stamped"
                what += f", {len(made.kept)} kept" if made.kept else ""
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
        """Return what the weights must have, as far as any rank has loaded it. Every rank calls this.

        Of several checkpoints that have a tensor by its name, the first counts that some rank holds its part of.

        Raises:
            DumpError: A copy cannot be read here.
        """
        mine = list(dict.fromkeys(self._copy_of.values())), self._fills
        of_all: dict[Path, Mapping[str, Entry]] = {}
        names: dict[str, None] = {}
        for copies, fills, of_rank in of_all_ranks((*mine, [local.name for local in locals_])):
            here = map(self._here, copies)
            of_all |= {copy: open_reference(copy).entries for copy in here if copy not in of_all} | fills
            names |= dict.fromkeys(of_rank)
        entries = {name: entry for of_one in of_all.values() for name, entry in of_one.items()}
        path = Path(f"the stamped copy of {listed([path.name for path in of_all], MAX_LISTED)}")
        if len(of_all) > 1:
            entries |= _held(of_all, list(names), locals_)
        return Reference(path, entries, is_stamped=True)

    def _here(self, copy: Path) -> Path:
        """Return the copy that is in reach: a machine that does not reach another's session has made its own."""
        return copy if copy.exists() else Path(self._session, *copy.parts[-3:])


def _held(of_all: Mapping[Path, Mapping[str, Entry]], names: list[str], locals_: Sequence[Local]) -> dict[str, Entry]:
    """Return of the tensors that several checkpoints have by name those that ranks hold; of the others the newest."""
    candidates: dict[str, list[Candidate]] = {}
    for path, entries in of_all.items():
        for name, other in matched(names, entries).names.items():
            candidate = Candidate(entries[other], path, is_snapshot=False, is_guess=True)
            candidates.setdefault(name, []).insert(0, candidate)
    several = {name: some for name, some in candidates.items() if len(some) > 1}
    return {name: one.entry for name, one in fitting(several, locals_)[0].items()}


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
