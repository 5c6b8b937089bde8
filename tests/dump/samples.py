"""One small dump with every kind of field in it, as files whose JSON a test may spoil."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import (
    Body,
    FlatRecord,
    GatherRecord,
    LayoutRecord,
    MeshRecord,
    Position,
    Stamp,
    TensorRecord,
)
from shardviz.dump.validate import digests_of
from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.errors import DumpError
from tests.dumps import replace_file

if TYPE_CHECKING:
    from pathlib import Path

Change = Callable[[Any], object]
"""Something done to the JSON value of a file."""

MESH = MeshRecord(("fsdp", "tp"), (1, 2), (0, 1))
DIGEST = "0123456789abcdef"
OUTPUT = Body("output", "step", (2,), (2,), "complex64", values=[[0.5, 1], [2, 3]], constant=False)
OUTPUT_DIGEST = digests_of(OUTPUT)[0]

RUN = RunRecord(
    schema=1,
    shardviz="0.1",
    torch="2.13",
    num_ranks=2,
    command=("shardviz", "probe"),
    probe="tp",
    mesh=MESH,
    stamps=(
        Stamp("embed", 1, (4, 2)),
        Stamp("layers.0.w", 9, (4, 3)),
        Stamp("layers.1.w", 21, (4, 3)),
        Stamp("rope", 33, (2, 2), "buffer"),
        Stamp("flat", 37, (5,)),
        Stamp("big", 42, (2, 2)),
        Stamp("head", 1, (4, 2), tied_to="embed"),
    ),
    intended={"layers.*.w": "[*/tp, *]"},
)


def rank_record(rank: int) -> RankRecord:
    rows = ((2 * rank, 2 * rank + 2),)
    flat = (((0, 3),), ((3, 5),))[rank]
    return RankRecord(
        schema=1,
        rank=rank,
        num_ranks=2,
        hostname="host",
        meshes=(MESH,),
        positions=(Position(0, (0, rank), (0, rank)),),
        layouts=(
            LayoutRecord(0, ("Replicate()", "Shard(0)"), (4, 3)),
            LayoutRecord(0, ("Replicate()", "Shard(0)"), (6,), FlatRecord((5,), 0)),
            LayoutRecord(0, ("Replicate()", "_StridedShard(0, split_factor=2)"), (4, 2)),
        ),
        bodies=(
            Body("param", "stamped", (4, 3), (2, 3), "float32", layout=0, held=(rows, ((0, 3),)), grad="none"),
            Body("param", "stamped", (5,), (len(range(*flat[0])),), "float32", layout=1, held=(flat,)),
            Body("param", "stamped", (4, 2), (2, 2), "float32", layout=2, runs=((1 + 2 * rank, 1, 2), (5, 1, 2))),
            Body("buffer", "stamped", (2, 2), (2, 2), "float32", runs=((33, 1, 3), (-1, 0, 1))),
            Body("param", "initial", (4, 3), (2, 3), "float32", layout=0, values=[[1, 2.5, "nan"], [0, -1, "-inf"]]),
            Body("param", "stamped", (2, 2), (2, 2), "float32", dense=True),
            OUTPUT,
        ),
        tensors=(
            TensorRecord("layers.", 0, ((0, 2),), ".w"),
            TensorRecord("flat", 1),
            TensorRecord("embed", 2),
            TensorRecord("head", 2),
            TensorRecord("rope", 3),
            TensorRecord("layers.", 4, ((0, 2),), ".w", DIGEST * 2),
            TensorRecord("big", 5),
            TensorRecord("output", 6, digests=OUTPUT_DIGEST),
        ),
        tied=(("embed", "head"),),
        gathered=(
            GatherRecord("layers.0.w", "full_tensor", held=(((0, 4),), ((0, 3),))),
            GatherRecord("embed", "full_tensor", runs=((1, 1, 8),)),
            GatherRecord("rope", "full_tensor", error="RuntimeError: no"),
        ),
        not_checked=(("head", "it is tied"),),
    )


def write_sample(path: Path) -> Path:
    prepare_folder(path, force=True)
    write_run(path, RUN)
    for rank in range(2):
        dense = {"stamped/param/big": np.arange(42, 46, dtype=np.int64).reshape(2, 2)}
        write_rank(path, rank_record(rank), dense)
    return path


def spoil(path: Path, change: Change) -> None:
    """Change a file's JSON in place."""
    content = json.loads(path.read_bytes())
    change(content)
    replace_file(path, json.dumps(content).encode())


def put(value: Any, *keys: str | int) -> Change:
    """Return a change that puts a value at a place."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def both(*changes: Change) -> Change:
    return lambda content: [change(content) for change in changes]


def refusal(path: Path) -> DumpError:
    with pytest.raises(DumpError) as caught:
        read_files(path)
    return caught.value
