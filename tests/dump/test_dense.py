"""Values that lie beside the JSON: files that change while they are read, numbers that are not ids, other types."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.check.run import check_dump
from shardviz.dump import arrays as dense
from shardviz.dump.arrays import ID_NONE, read_array, whole_ids
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, Stamp, TensorRecord
from shardviz.dump.write import write_rank, write_run
from shardviz.errors import DumpError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = "stamped/param/w"


def files(folder: Path, values: Any, *, dtype: str = "float32", stage: Any = "stamped") -> Path:
    """Write a plain tensor of four numbers, all of them dense."""
    folder.mkdir()
    write_run(folder, RunRecord(1, "test", "none", 1, stamps=(Stamp("w", 1, (4,)),)))
    body = Body("param", stage, (4,), (4,), dtype, dense=True)
    write_rank(
        folder, RankRecord(1, 0, 1, "h", bodies=(body,), tensors=(TensorRecord("w", 0),)), {f"{stage}/param/w": values}
    )
    return folder


def spoil_header(path: Path) -> None:
    path.write_bytes(b"\x08" + b"\0" * 7 + b"{'no': 1")


def swap_header(path: Path) -> None:
    save_file({"other": np.ones(4, np.float32)}, path)


def swap_shape(path: Path) -> None:
    save_file({KEY: np.ones(5, np.float32)}, path)


def cut_values(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def cut_all(path: Path) -> None:
    os.truncate(path, 0)


def remove(path: Path) -> None:
    path.unlink()


def make_header_long(path: Path) -> None:
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


@pytest.mark.parametrize(
    "change", [spoil_header, swap_header, swap_shape, cut_values, cut_all, remove, make_header_long]
)
def test_a_file_that_changes_after_it_was_opened_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    path = files(tmp_path / "d", np.arange(1, 5, dtype=np.float32)) / "rank_00000.safetensors"
    mapped = dense._map

    def changed(file: Path, *args: Any) -> Any:
        change(file)
        return mapped(file, *args)

    monkeypatch.setattr(dense, "_map", changed)
    with pytest.raises(DumpError) as caught:
        read_array(path, KEY, (4,))
    assert str(path) in caught.value.message
    assert caught.value.message.isprintable()


def test_a_file_that_is_replaced_or_removed_after_it_was_mapped_stays_readable(tmp_path: Path) -> None:
    path = files(tmp_path / "d", np.arange(1, 5, dtype=np.float32)) / "rank_00000.safetensors"
    values = read_array(path, KEY, (4,))
    save_file({KEY: np.zeros(4, np.float32)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    path.unlink()
    assert values.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_values_that_are_not_ids_are_reported_and_nothing_is_written_to_stderr(
    tmp_path: Path, dtype: type[np.generic]
) -> None:
    wrong = [
        [1, 2, np.nan, np.nan],
        [1, np.inf, np.inf, 4],
        [np.inf, np.inf, -np.inf, 1],
        [1, 1e30, 1e30, 4],
        [1, 2.5, -3, 4],
        [5, 6, 7, 8],
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, values in enumerate(wrong):
            with np.errstate(over="ignore"):
                array = np.array(values, dtype)
            path = files(tmp_path / str(number), array, dtype=np.dtype(dtype).name)
            (finding,) = check_dump(path).findings
            assert finding.kind == "foreign"
            assert ("none of the elements held is an id" if number == 5 else "not ids") in finding.sentence
            assert "922337" not in finding.sentence


def test_numbers_become_ids_up_to_the_last_there_is() -> None:
    assert whole_ids(np.array([0, 1, 8, 9, -1, -7]), 8).tolist() == [0, 1, 8, ID_NONE, ID_NONE, ID_NONE]
    assert whole_ids(np.array([0, 8, 65504, np.nan], np.float16), 1 << 40).tolist() == [0, 8, 65504, ID_NONE]
    assert whole_ids(np.array([2**64 - 1, 3], np.uint64), 1 << 62).tolist() == [ID_NONE, 3]
    assert whole_ids(np.array([True, False]), 8).tolist() == [ID_NONE, ID_NONE]


FITTING = [
    ("stamped", "float32", np.int64),  # as shardviz writes ids
    ("stamped", "bfloat16", np.int64),
    ("stamped", "float32", np.float32),
    ("stamped", "float8_e4m3fn", np.float32),  # a type that is not in any list
    ("initial", "bfloat16", np.float32),  # as shardviz writes bfloat16
    ("initial", "float64", np.float64),
    ("step", "bool", np.bool_),
]
WRONG = [
    ("stamped", "float32", np.float64, "is F64, expected F32 or I64"),
    ("stamped", "float32", np.bool_, "is BOOL, expected F32 or I64"),
    ("initial", "float32", np.int64, "is I64, expected F32"),
    ("initial", "bfloat16", np.float16, "is F16, expected BF16 or F32"),
]


@pytest.mark.parametrize(("stage", "dtype", "written"), FITTING)
def test_values_in_the_type_that_is_written_are_read(tmp_path: Path, stage: str, dtype: str, written: Any) -> None:
    path = files(tmp_path / "d", np.array([1, 2, 3, 4]).astype(written), dtype=dtype, stage=stage)
    assert list(read_files(path).ranks) == [0]


@pytest.mark.parametrize(("stage", "dtype", "written", "message"), WRONG)
def test_values_of_another_type_than_the_tensor_are_reported(
    tmp_path: Path, stage: str, dtype: str, written: Any, message: str
) -> None:
    path = files(tmp_path / "d", np.array([1, 2, 3, 4]).astype(written), dtype=dtype, stage=stage)
    with pytest.raises(DumpError) as caught:
        read_files(path)
    assert caught.value.message == f"{path}/rank_00000.safetensors is damaged: {stage}/param/w {message}"


AS_NOBODY = """
import os
import safetensors.numpy
from pathlib import Path
from shardviz.dump.arrays import read_array
if os.getuid() == 0:
    os.setuid(65534)
try:
    read_array(Path("d/rank_00000.safetensors"), "stamped/param/w", (4,))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_file_that_may_not_be_read_is_not_called_missing(tmp_path: Path) -> None:
    path = files(tmp_path / "d", np.arange(1, 5)) / "rank_00000.safetensors"
    path.chmod(0)
    for folder in (tmp_path, path.parent):
        folder.chmod(0o755)
    command = [sys.executable, "-c", AS_NOBODY]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = "RefusedError cannot read d/rank_00000.safetensors: Permission denied\nHint: change its permissions\n"
    assert done.stdout == said, done.stderr
