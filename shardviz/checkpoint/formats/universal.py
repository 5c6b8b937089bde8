"""DeepSpeed's universal checkpoints: `zero/PARAMETER/KIND.pt`, as `ds_to_universal` writes them from ranks' buffers.

Each is a file of `torch.save` with one tensor: by itself, or as `param` beside how parts were joined. From stage 3 they
are flat. Tried on DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.formats.archive import open_archive
from shardviz.checkpoint.formats.zero_buffers import MASTER, chunks_of
from shardviz.checkpoint.records import Place, Problem, Saved
from shardviz.errors import DumpError
from shardviz.explain.files import UnfinishedUniversalCheckpoint
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

FOLDER = "zero"
ENDING = ".pt"
MAX_PARAMETERS = 1 << 18
MAX_KINDS = 64
"""Files of one parameter."""

Shapes = dict[str, tuple[int, ...]]


def has_universal(folder: Path) -> bool:
    """Whether a step has such files; a link is not followed, which may lead out of the checkpoint."""
    return (folder / FOLDER).is_dir() and not (folder / FOLDER).is_symlink()


def read_universal(folder: Path, shapes: Shapes, *, weights: bool) -> tuple[dict[str, Saved], list[Problem]]:
    """Return the masters and moments of a universal checkpoint, and what is wrong.

    Args:
        folder: The folder of the step.
        shapes: The shape of each parameter, as the model's file has it.
        weights: Whether the masters are the weights, as from stage 3, whose module is empty.

    Raises:
        DumpError: A file is damaged, or has what cannot be read safely.
    """
    found: dict[str, Saved] = {}
    known: dict[str, Saved] = {}
    for name, kind, path in _files(folder / FOLDER):
        called = name if weights and kind == MASTER else f"optimizer.state.{name}.{kind}"
        found[called] = _saved(called, path, folder, shapes.get(name) if kind != "step" else None)
        known.setdefault(name, found[called])
    return found, list(_missing(shapes, known))


def _files(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield each file with its parameter and what it is of it; links are not followed."""
    folders = sorted(one for one in root.iterdir() if one.is_dir() and not one.is_symlink())
    if len(folders) > MAX_PARAMETERS:
        raise DumpError(f"{root} has more than {MAX_PARAMETERS:,} parameters", "give the folder of one step")
    for folder in folders:
        files = sorted(folder.iterdir())
        if len(files) > MAX_KINDS:
            raise DumpError(
                f"{folder} has {len(files):,} files of one parameter", "give a folder as DeepSpeed wrote it"
            )
        for path in files:
            if path.suffix == ENDING and path.is_file() and not path.is_symlink():
                yield printable(folder.name), printable(path.stem), path


def _saved(name: str, path: Path, folder: Path, shape: tuple[int, ...] | None) -> Saved:
    """Return where a file's tensor is; a flat one in the shape of its parameter, without the padding at its end.

    Raises:
        DumpError: It has no tensor, or one that is not stored row by row.
    """
    archive = open_archive(path)
    made: Any = archive.found.get("param") if type(archive.found) is dict else archive.found
    stored = archive.tensor(made, "param")
    if stored is None or stored.strides != _rows(stored.shape):
        raise DumpError(f"{path} has no tensor, or one that is not stored row by row", "convert the checkpoint again")
    is_flat = shape is not None and len(stored.shape) == 1 and stored.shape[0] >= math.prod(shape)
    own = shape if is_flat and shape is not None else stored.shape
    place = Place(str(path.relative_to(folder)), stored.start, 0)
    return Saved(name, own, stored.dtype, tuple(chunks_of(own, 0, math.prod(own), place, stored.dtype)), folder)


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _missing(shapes: Shapes, known: Mapping[str, Saved]) -> Iterator[Problem]:
    lost = [name for name in shapes if printable(name) not in known]
    if lost:
        text = f"{counted(len(lost), 'parameter')} of {len(shapes):,} have no folder in {FOLDER}/: "
        yield Problem("", text + listed(map(printable, lost), 3), UnfinishedUniversalCheckpoint())
