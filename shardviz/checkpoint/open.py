"""Detect a checkpoint's format by its files; formats that are unsafe to read are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.checkpoint.formats.deepspeed import LATEST, is_deepspeed, read_deepspeed
from shardviz.checkpoint.formats.headers import INDEX, is_of_rank, of_ranks, read_safetensors, refusal_of_ranks
from shardviz.checkpoint.formats.torch_file import METADATA, SUFFIXES, read_dcp, read_torch_file
from shardviz.errors import DumpError
from shardviz.text import listed, natural_key, printable

if TYPE_CHECKING:
    from shardviz.checkpoint.records import Checkpoint

RUN = "run.json"
SETTINGS = "config.json"
OF_INDEX = ".safetensors.index.json"
MAX_INNER = 64
"""Folders in a folder that are looked at."""

MOST_NAMED = 4
_EXPECTED = (
    "give a folder with .metadata (torch.distributed.checkpoint), a .safetensors file, a folder of them, or a file of "
    "torch.save"
)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, or meant as one, and not a shardviz dump."""
    if path.is_file():
        return path.suffix in (".safetensors", ".distcp", *SUFFIXES) or _stands_for_its_folder(path)
    try:
        names = [one.name for one in path.iterdir()]
    except OSError:
        return False
    is_of_dump = any(name == RUN or (name.startswith("rank_") and name.endswith(".json")) for name in names)
    files, endings = (METADATA, *LATEST, INDEX, SETTINGS), (".safetensors", ".distcp", *SUFFIXES)
    return not is_of_dump and any(name in files or name.endswith(endings) for name in names)


def _stands_for_its_folder(path: Path) -> bool:
    return path.name == METADATA or path.name.endswith(OF_INDEX)


def hint_at_checkpoints(folder: Path, otherwise: str) -> str:
    """Return a hint for a folder that is not a checkpoint: those that are in it."""
    try:
        inner = sorted((one for one in folder.iterdir() if one.is_dir()), key=lambda one: natural_key(one.name))
    except OSError:
        return otherwise
    checkpoints = [printable(str(one)) for one in inner[:MAX_INNER] if is_checkpoint(one)]
    return f"give one of the checkpoints in it: {listed(checkpoints, MOST_NAMED)}" if checkpoints else otherwise


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint: DCP, safetensors, torch.save or DeepSpeed ZeRO. Reads headers only.

    Nothing in it is run, unpickled or decompressed, and no path in it is followed out of its folder.

    Raises:
        DumpError: It is not a checkpoint, is damaged, or is in a format that cannot be read without running it.

    Example:
        >>> open_checkpoint("step-1000").tensors["model.norm.weight"].shape  # doctest: +SKIP
        (4096,)
    """
    path = Path(path)
    if _stands_for_its_folder(path) or path.suffix == ".distcp":
        path = path.parent
    if path.exists() and not path.is_dir() and not path.is_file():
        raise DumpError(f"{path} is neither a file nor a folder", _EXPECTED)  # a pipe would be waited for
    if not path.is_dir():
        return _with_ranks(read_torch_file(path) if path.suffix in SUFFIXES else read_safetensors(path))
    try:
        names = [one.name for one in path.iterdir()]
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}", _EXPECTED) from error
    if METADATA in names:
        return _with_unread(read_dcp(path), names)
    if any(name.endswith((".safetensors", OF_INDEX)) for name in names):
        return _with_unread(read_safetensors(path), names)
    if is_deepspeed(names):
        return read_deepspeed(path)
    if len(saved := [name for name in names if name.endswith(SUFFIXES)]) == 1:
        return _with_ranks(read_torch_file(path / saved[0]))
    raise DumpError(*_refusal(path, names))


def _with_ranks(checkpoint: Checkpoint) -> Checkpoint:
    """Add the names of all ranks if a file is one rank's part: by its own name, or by its folder's."""
    path = checkpoint.path.absolute()
    for part_path in (path, path.parent):
        try:
            ranks = of_ranks(beside.name for beside in part_path.parent.iterdir()) if is_of_rank(part_path.name) else []
        except OSError:
            continue
        if part_path.name in ranks:
            return replace(checkpoint, ranks=tuple(ranks))
    return checkpoint


def _with_unread(checkpoint: Checkpoint, names: list[str]) -> Checkpoint:
    """Add the files of torch.save next to the weights: optimizer, scheduler and random states."""
    unread = sorted(name for name in names if name.endswith((*SUFFIXES, ".pkl")))
    return replace(checkpoint, unread=tuple(unread)) if unread else checkpoint


def _refusal(path: Path, names: list[str]) -> tuple[str, str]:
    if any(name.endswith(".distcp") for name in names):
        lost = "save it again, or copy the whole folder: FOLDER/* leaves out names that begin with a dot"
        return f"{path} has .distcp files but no {METADATA}: its save or its copy was not finished", lost
    if files := sorted(name for name in names if name.endswith(SUFFIXES)):
        if ranks := of_ranks(files):
            return refusal_of_ranks(path, ranks)
        some = listed(map(printable, files))
        return f"{path} has {some}, each a whole checkpoint or a part of one", "give one of them"
    if SETTINGS in names:
        return f"{path} has {SETTINGS} and no weights: its save was not finished", "save it again, or copy all files"
    return f"{path} has no .safetensors file", hint_at_checkpoints(path, _EXPECTED)
