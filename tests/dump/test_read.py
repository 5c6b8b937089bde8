"""Reading a dump: what was written comes back, and what is missing is no error yet."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.check.ranks import check_completeness
from shardviz.dump.arrays import read_array
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.errors import ChangedError, DumpError
from shardviz.explain.placement.whole_run import DamagedNumbers, RefusedFile
from shardviz.layout.mesh import Mesh, parse_mesh
from tests.dump.samples import RUN, rank_record, spoil, write_sample
from tests.dumps import make_dump

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "a.shardviz")


def test_every_record_comes_back_as_it_was_written(sample: Path):
    files = read_files(sample)
    assert files.run == RUN
    assert files.ranks == {rank: rank_record(rank) for rank in range(2)}
    assert (files.missing_ranks, files.damaged) == ((), {})
    assert files.mesh == parse_mesh("fsdp=1,tp=2")


def test_dense_values_come_back_in_their_shape(sample: Path):
    assert read_files(sample).dense(1, "stamped/param/big", (2, 2)).tolist() == [[42, 43], [44, 45]]


def test_a_folder_may_be_named_by_a_string_and_be_a_link_itself(sample: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(sample)
    assert read_files(str(tmp_path / "link")).run == RUN


def test_missing_rank_files_are_reported_and_the_rest_is_read(sample: Path):
    (sample / "rank_00000.json").unlink()
    files = read_files(sample)
    assert (list(files.ranks), files.missing_ranks) == ([1], (0,))


def test_a_run_without_a_mesh_is_one_axis_of_ranks(sample: Path):
    spoil(sample / "run.json", lambda run: run.pop("mesh"))
    assert read_files(sample).mesh == Mesh(("rank",), (2,))


def test_read_leniently_a_damaged_file_is_noted_and_the_rest_is_read(sample: Path):
    (sample / "rank_00000.json").write_text("{")
    files = read_files(sample, strict=False)
    assert list(files.ranks) == [1]
    assert files.damaged == {
        0: f"{sample}/rank_00000.json is damaged: Input data was truncated",
    }
    with pytest.raises(DumpError):
        read_files(sample)


def test_progress_counts_the_rank_files(sample: Path):
    seen: list[tuple[int, int]] = []
    read_files(sample, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_ranks_are_read_in_order_whatever_the_width_of_their_names(tmp_path: Path):
    files = read_files(make_dump(tmp_path / "a.shardviz", parse_mesh("tp=12"), {"w": "[24/tp]"}))
    assert list(files.ranks) == list(range(12))


def test_files_that_are_no_part_of_a_dump_are_left_alone(sample: Path):
    for name in (".rank_00001.json.tmp", "rank_1.json", "rank_00001.json~", "notes.txt", "rank_٠٠٠٠١.json"):
        (sample / name).write_text("{")
    assert sorted(read_files(sample).ranks) == [0, 1]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (
            "none",
            "{path} does not exist: no dump and no checkpoint is there",
            "shardviz probe tp_fsdp --mesh 2,4 writes one",
        ),
        ("file", "dump {path} is not a folder", "shardviz probe tp_fsdp --mesh 2,4 writes one"),
        (
            "mine.py",
            "{path} is a Python file, not a dump",
            "shardviz probe {path} writes one if it has build(), shardviz run -- python {path} if it is a job",
        ),
        ("empty", "{path} is not a dump: it has no run.json", "shardviz probe tp_fsdp --mesh 2,4 writes one"),
        ("file/run.json", "cannot read dump {path}: Not a directory", ""),
        ("x" * 5000, "cannot read dump {path:.300}...: File name too long", ""),
        (
            "x" * 200,
            "{path} does not exist: no dump and no checkpoint is there",
            "shardviz probe tp_fsdp --mesh 2,4 writes one",
        ),
    ],
)
def test_what_is_no_dump_is_reported(tmp_path: Path, name: str, message: str, hint: str):
    (tmp_path / "file").write_text("x")
    (tmp_path / "mine.py").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError) as caught:
        read_files(tmp_path / name)
    assert caught.value.message == message.format(path=str(tmp_path / name))
    assert caught.value.hint == hint.format(path=tmp_path / name)


def test_a_path_with_a_null_byte_is_reported():
    with pytest.raises(DumpError) as caught:
        read_files("a\0b")
    assert caught.value.message == "cannot read dump a\\u0000b: a path cannot have a null byte"


@pytest.mark.parametrize("name", ["run.json", "rank_00001.json"])
def test_a_link_is_not_followed(sample: Path, tmp_path: Path, name: str):
    (sample / name).rename(tmp_path / "elsewhere.json")
    (sample / name).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(DumpError) as caught:
        read_files(sample)
    assert caught.value.message == f"{sample}/{name} is a link"
    assert caught.value.hint == "a dump's files are plain files; copy the target here"


@pytest.mark.parametrize("name", ["run.json", "rank_00001.json"])
def test_a_pipe_is_not_waited_for(sample: Path, name: str):
    (sample / name).unlink()
    os.mkfifo(sample / name)
    with pytest.raises(DumpError) as caught:
        read_files(sample)
    assert caught.value.message == f"{sample}/{name} is not a plain file"


def test_a_folder_in_the_place_of_a_file_is_reported(sample: Path):
    (sample / "rank_00001.json").unlink()
    (sample / "rank_00001.json").mkdir()
    with pytest.raises(DumpError) as caught:
        read_files(sample)
    assert caught.value.message == f"{sample}/rank_00001.json is not a plain file"


@pytest.mark.parametrize("name", ["run.json", "rank_00001.json"])
@pytest.mark.parametrize(("schema", "found"), [(2, "schema 2"), (0, "schema 0"), (None, "no schema number")])
def test_a_file_of_another_version_is_reported_from_a_damaged_one(
    sample: Path, name: str, schema: int | None, found: str
):
    spoil(sample / name, lambda content: content.update(schema=schema, news=1) if schema is not None else None)
    if schema is None:
        spoil(sample / name, lambda content: content.pop("schema"))
    with pytest.raises(DumpError) as caught:
        read_files(sample)
    assert caught.value.message == f"{sample}/{name}: {found}, expected schema 1"
    assert caught.value.hint == "read it with the shardviz that wrote it"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rank_00001.safetensors", "the numbers of stamped/param/big have a different checksum"),
        ("rank_00001.json", "its checksum differs"),
    ],
)
def test_a_byte_that_changes_after_a_dump_was_written_is_named(sample: Path, name: str, why: str):
    content = bytearray((sample / name).read_bytes())
    content[-30] ^= 1
    (sample / name).write_bytes(content)
    with pytest.raises(ChangedError) as caught:
        read_files(sample)
    assert caught.value.message == f"{sample / name} was damaged after it was written: {why}"
    (found,) = check_completeness(dump_of(read_files(sample, strict=False)))
    assert isinstance(found.explanation, DamagedNumbers), found
    assert found.ranks == (1,)


@pytest.mark.parametrize(
    ("ending", "why"), [("json", "has what rank {} wrote"), ("safetensors", "has what rank {} wrote, not rank {}")]
)
def test_ranks_whose_files_changed_names_are_not_checked(sample: Path, ending: str, why: str):
    """All files are whole and fit each other's records; the model is not to blame for what they show."""
    first, second = (sample / f"rank_0000{rank}.{ending}" for rank in range(2))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    files = read_files(sample, strict=False)
    assert files.damaged == {0: f"{first} {why.format(1, 0)}", 1: f"{second} {why.format(0, 1)}"}
    findings = list(check_completeness(dump_of(files)))
    assert [(found.ranks, type(found.explanation)) for found in findings] == [
        ((0,), DamagedNumbers),
        ((1,), DamagedNumbers),
    ]


def test_files_without_a_checksum_are_read_as_they_are(sample: Path):
    """Another program wrote the JSON anew, and an earlier version the numbers."""
    spoil(sample / "rank_00001.json", lambda rank: rank.update(hostname="elsewhere"))
    save_file({"stamped/param/big": np.zeros((2, 2), np.int64)}, sample / "rank_00001.safetensors")
    files = read_files(sample)
    assert files.ranks[1].hostname == "elsewhere"
    assert not files.dense(1, "stamped/param/big", (2, 2)).any()


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (b"", "header too small"),
        (b"\xff" * 8 + b"{}", "header too large"),
        (b"\x02" + b"\0" * 7 + b"{}", "File does not contain tensor stamped/param/big"),
    ],
)
def test_damaged_dense_values_are_reported(sample: Path, spoilt: bytes, message: str):
    path = sample / "rank_00001.safetensors"
    path.write_bytes(spoilt)
    with pytest.raises(DumpError) as caught:
        read_files(sample)
    assert caught.value.message.startswith(f"{path} is damaged: ")
    assert caught.value.message.endswith(message)


def test_dense_values_of_another_shape_are_reported(sample: Path):
    with pytest.raises(DumpError) as caught:
        read_files(sample).dense(1, "stamped/param/big", (4,))
    path = sample / "rank_00001.safetensors"
    assert caught.value.message == f"{path} is damaged: stamped/param/big is [2, 2], expected [4]"


@pytest.mark.parametrize(("dtype", "width"), [("BF16", 2), ("F8_E4M3", 1)])
def test_dense_values_of_a_type_that_numpy_has_not_are_reported(sample: Path, dtype: str, width: int):
    header = json.dumps({"x": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * width]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(2 * width)
    (sample / "rank_00001.safetensors").write_bytes(content)
    with pytest.raises(DumpError, match=r"rank_00001\.safetensors is damaged: "):
        read_array(sample / "rank_00001.safetensors", "x", (2,))


def test_a_missing_or_linked_file_of_dense_values_is_reported(sample: Path, tmp_path: Path):
    path = sample / "rank_00001.safetensors"
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(DumpError, match=r"rank_00001\.safetensors is missing"):
        read_files(sample)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DumpError) as caught:
        read_files(sample)
    assert caught.value.message == f"{path} is a link"


def test_read_leniently_a_linked_file_is_refused_and_not_called_cut_off(sample: Path, tmp_path: Path):
    path = sample / "rank_00001.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    files = read_files(sample, strict=False)
    assert (files.refused, files.changed) == ({1}, frozenset())
    causes = [type(one.explanation) for one in check_completeness(dump_of(files))]
    assert causes[0] is RefusedFile


def test_read_leniently_a_rank_without_its_dense_values_is_noted_and_the_rest_is_read(sample: Path):
    (sample / "rank_00001.safetensors").unlink()
    files = read_files(sample, strict=False)
    assert (list(files.ranks), files.missing_ranks) == ([0], (1,))
    assert files.damaged == {1: f"{sample}/rank_00001.safetensors is missing"}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_, np.complex64])
def test_dense_values_of_every_numpy_type_and_any_strides_come_back(tmp_path: Path, dtype: type[np.generic]):
    from shardviz.dump.write import write_rank

    sample = write_sample(tmp_path / "a.shardviz")
    square = np.arange(6).reshape(2, 3).astype(dtype)
    arrays = {
        "plain": square,
        "turned": square.T,
        "every other": square[:, ::2],
        "none": square[:0],
        "one": square[0, 0],
    }
    write_rank(sample, rank_record(1), {key: np.asarray(array) for key, array in arrays.items()})
    for key, array in arrays.items():
        found = read_array(sample / "rank_00001.safetensors", key, array.shape)
        assert found.dtype == dtype
        assert np.array_equal(found, array), key
