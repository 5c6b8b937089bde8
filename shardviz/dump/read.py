"""Read a dump that may come from another machine: every number is checked before anything is built from it.

Nothing is unpickled, no path out of the folder is followed, and no size in a file makes the reader allocate more than
the file itself is long.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shardviz.dump.records import SCHEMA, Body, LayoutRecord, MeshRecord, RankRecord, Record, RunRecord
from shardviz.dump.write import RUN_FILE, dense_file, rank_file
from shardviz.errors import DumpError, ShardvizError
from shardviz.layout import FlatView, Layout
from shardviz.mesh import Mesh
from shardviz.placements import StridedShard, parse_placement
from shardviz.region import length

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

MAX_RANKS = 1 << 20
MAX_NAMES = 1 << 20
MAX_NUMBER = 1 << 62
MAX_SEGMENTS = 1 << 16
DIGEST_LENGTH = 16

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Dump:
    """A dump in memory.

    Attributes:
        path: Its folder.
        run: What is true of the whole run.
        ranks: What each rank says, by rank.
        damaged: Files that could not be read, with the line that says why; empty when read strictly.
    """

    path: Path
    run: RunRecord
    ranks: dict[int, RankRecord]
    damaged: dict[str, str] = field(default_factory=dict)

    @cached_property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the run without a readable file."""
        return tuple(rank for rank in range(self.run.num_ranks) if rank not in self.ranks)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh that the run was asked for; one axis `rank` where it was not told."""
        if self.run.mesh is None:
            return Mesh(("rank",), (self.run.num_ranks,))
        return mesh_of(self.run.mesh)

    def dense(self, rank: int, key: str) -> NDArray[np.generic]:
        """Load one array from a rank's safetensors file.

        Raises:
            DumpError: The file is not there, is no safetensors file, or has no such array.
        """
        from safetensors import SafetensorError, safe_open

        path = _inside(self.path, dense_file(rank))
        try:
            with safe_open(path, framework="numpy") as file:
                array: NDArray[np.generic] = file.get_tensor(key)
                return array
        except (OSError, SafetensorError) as error:
            raise DumpError(f"{path}: cannot read {key!r}: {error}", "write the dump again") from error


def read_dump(path: Path | str, *, strict: bool = True, on_progress: Callable[[int, int], None] | None = None) -> Dump:
    """Read a dump.

    Args:
        path: The dump's folder.
        strict: Raise on the first damaged rank file; otherwise note it and read the rest.
        on_progress: Called with the number of ranks read and the number of rank files.

    Raises:
        DumpError: The folder is no dump, or a file in it is damaged. The message names the file, the field and what
            was expected.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise DumpError(f"dump {folder} {what}", "shardviz probe tp_fsdp --mesh 2,4 writes one")
    run = _read(folder, RUN_FILE, RunRecord)
    _check_run(folder / RUN_FILE, run)
    ranks: dict[int, RankRecord] = {}
    damaged: dict[str, str] = {}
    files = sorted(entry.name for entry in folder.iterdir() if re.fullmatch(r"rank_\d{5,7}\.json", entry.name))
    for count, name in enumerate(files):
        try:
            record = _read(folder, name, RankRecord)
            _check_rank(folder / name, record, run)
            ranks[record.rank] = record
        except DumpError as error:
            if strict:
                raise
            damaged[name] = error.message
        if on_progress:
            on_progress(count + 1, len(files))
    return Dump(folder, run, ranks, damaged)


def mesh_of(record: MeshRecord) -> Mesh:
    """Build the mesh that a record describes."""
    return Mesh(record.axes, record.shape, record.ranks)


def layout_of(record: LayoutRecord, mesh: Mesh) -> Layout:
    """Build the layout that a record's placements claim."""
    placements = [parse_placement(text) for text in record.placements]
    if any(isinstance(p, StridedShard) and not 1 <= p.split_factor <= MAX_SEGMENTS for p in placements):
        raise DumpError(f"split_factor out of 1 to {MAX_SEGMENTS:,}")
    flat = FlatView(record.flat.shape, record.flat.offset) if record.flat else None
    return Layout.from_placements(mesh, record.shape, placements, flat)


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if path.is_symlink():
        raise DumpError(f"{path} is a link", "a dump's files are plain files; copy the target here")
    return path


def _read(folder: Path, name: str, kind: type[AnyRecord]) -> AnyRecord:
    path = _inside(folder, name)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DumpError(f"{folder} is not a dump: it has no {name}", "shardviz probe writes one") from None
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from error
    _check_schema(path, content)
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


class _Schema(msgspec.Struct):
    schema: int = -1


def _check_schema(path: Path, content: bytes) -> None:
    """Tell a file of another version from a damaged one before its fields are looked at."""
    try:
        schema = msgspec.json.decode(content, type=_Schema).schema
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(path, f"{error} (file of {len(content):,} bytes)") from error
    if schema != SCHEMA:
        found = "no schema number" if schema == -1 else f"schema {schema}"
        raise DumpError(f"{path}: {found}, expected schema {SCHEMA}", "read it with the shardviz that wrote it")


def _damaged(path: Path, what: str) -> DumpError:
    return DumpError(f"{path} is damaged: {what}", "write the dump again, or remove the file to check the other ranks")


def _check_run(path: Path, run: RunRecord) -> None:
    if not 1 <= run.num_ranks <= MAX_RANKS:
        raise _damaged(path, f"num_ranks is {run.num_ranks}, expected 1 to {MAX_RANKS:,}")
    _checked(path, "mesh", lambda: run.mesh and mesh_of(run.mesh))
    for index, stamp in enumerate(run.stamps):
        if min(stamp.shape, default=0) < 0 or stamp.first < 1 or stamp.first + math.prod(stamp.shape) > MAX_NUMBER:
            raise _damaged(path, f"stamps[{index}] counts from {stamp.first} over shape {list(stamp.shape)}")


def _check_rank(path: Path, record: RankRecord, run: RunRecord) -> None:
    if rank_file(record.rank) != path.name:
        raise _damaged(path, f"rank is {record.rank}, expected the {int(path.stem[5:])} of the file's name")
    if record.num_ranks != run.num_ranks or record.rank >= run.num_ranks:
        raise _damaged(
            path,
            f"rank {record.rank} of {record.num_ranks} ranks, expected a rank of the {run.num_ranks} in {RUN_FILE}",
        )
    meshes = [_checked(path, f"meshes[{index}]", partial(mesh_of, mesh)) for index, mesh in enumerate(record.meshes)]
    for index, position in enumerate(record.positions):
        _check_index(path, f"positions[{index}].mesh", position.mesh, meshes)
    for index, layout in enumerate(record.layouts):
        _check_index(path, f"layouts[{index}].mesh", layout.mesh, meshes)
        _check_sizes(path, f"layouts[{index}].shape", layout.shape)
        _checked(path, f"layouts[{index}]", partial(layout_of, layout, meshes[layout.mesh]))
    for index, body in enumerate(record.bodies):
        _check_body(path, f"bodies[{index}]", body, record)
    _check_tensors(path, record)


def _check_body(path: Path, at: str, body: Body, record: RankRecord) -> None:
    _check_sizes(path, f"{at}.shape", body.shape)
    _check_sizes(path, f"{at}.local_shape", body.local_shape)
    if body.layout is not None:
        _check_index(path, f"{at}.layout", body.layout, record.layouts)
    if body.held is not None:
        flat = body.layout is not None and record.layouts[body.layout].flat is not None
        bounds = (math.prod(body.shape),) if flat else body.shape
        held_shape = tuple(length(ranges) for ranges in body.held)
        inside = len(bounds) == len(body.held) and all(
            0 <= start <= stop <= size for size, ranges in zip(bounds, body.held, strict=True) for start, stop in ranges
        )
        if not inside or held_shape != body.local_shape:
            raise _damaged(path, f"{at}.held covers {list(held_shape)}, expected local_shape {list(body.local_shape)}")
    if body.runs is not None:
        count = sum(run[2] for run in body.runs)
        if count != math.prod(body.local_shape) or any(run[2] < 1 or abs(run[0]) > MAX_NUMBER for run in body.runs):
            raise _damaged(path, f"{at}.runs count {count} ids, expected those of {list(body.local_shape)}")


def _check_tensors(path: Path, record: RankRecord) -> None:
    total = 0
    for index, tensor in enumerate(record.tensors):
        at = f"tensors[{index}]"
        _check_index(path, f"{at}.body", tensor.body, record.bodies)
        if any(not 0 <= start < stop for start, stop in tensor.numbers):
            raise _damaged(path, f"{at}.numbers must be ranges that rise")
        count = sum(stop - start for start, stop in tensor.numbers) or 1
        total += count
        if total > MAX_NAMES:
            raise _damaged(path, f"{at}.numbers bring the names to {total:,}, expected at most {MAX_NAMES:,}")
        if tensor.digests and len(tensor.digests) != count * DIGEST_LENGTH:
            raise _damaged(path, f"{at}.digests has {len(tensor.digests)} digits, expected {count} * {DIGEST_LENGTH}")


def _check_sizes(path: Path, at: str, shape: Sequence[int]) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_NUMBER:
        raise _damaged(path, f"{at} is {list(shape)}, expected sizes of at least 0")


def _check_index(path: Path, at: str, index: int, of: Sequence[object]) -> None:
    if not 0 <= index < len(of):
        raise _damaged(path, f"{at} is {index}, expected an index below {len(of)}")


Built = TypeVar("Built")


def _checked(path: Path, at: str, build: Callable[[], Built]) -> Built:
    """Build something from a record; what is wrong with the record is a damaged file."""
    try:
        return build()
    except ShardvizError as error:
        raise _damaged(path, f"{at}: {error.message}") from error
