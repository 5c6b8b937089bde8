"""Writing a dump: all of a file or none of it, and nobody else's folder is ever replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord
from shardviz.dump.records.tensors import MeshRecord
from shardviz.dump.write import check_folder, prepare_folder, replacing_folder, write_rank, write_run
from shardviz.errors import DumpError
from tests.dump.samples import RUN, rank_record, write_sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ELSEWHERE = "choose another folder with -o"
FORCE = "give --force to replace it, or another folder with -o"


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.rglob("*") if entry.is_file()}


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "a.shardviz")


def test_a_dump_is_one_folder_of_files_by_rank(sample: Path):
    assert sorted(contents(sample)) == [
        "rank_00000.json",
        "rank_00000.safetensors",
        "rank_00001.json",
        "rank_00001.safetensors",
        "run.json",
    ]


def test_a_ranks_file_names_the_ranks_of_a_mesh_only_if_they_do_not_count_up(sample: Path):
    record = read_files(sample).ranks[0]
    (mesh,) = record.meshes
    assert mesh.ranks == (0, 1)
    file = sample / "rank_00000.json"
    assert b'"meshes":[{"axes":["fsdp","tp"],"shape":[1,2]}]' in file.read_bytes()
    turned = MeshRecord(mesh.axes, mesh.shape, (1, 0))
    write_rank(sample, replace(record, meshes=(turned,)))
    assert b'"ranks":[1,0]' in file.read_bytes()


def test_a_folder_is_made_with_its_parents(tmp_path: Path):
    assert prepare_folder(tmp_path / "runs" / "a.shardviz").is_dir()


def test_an_empty_folder_is_taken(tmp_path: Path):
    (tmp_path / "a").mkdir()
    assert prepare_folder(tmp_path / "a") == tmp_path / "a"


def test_a_dump_is_replaced_only_by_force(sample: Path):
    before = contents(sample)
    with pytest.raises(DumpError) as caught:
        prepare_folder(sample)
    written = f"{sample} exists: probe tp wrote it on mesh (fsdp=1, tp=2)"
    assert (caught.value.message, caught.value.hint) == (written, FORCE)
    assert contents(sample) == before
    prepare_folder(sample, force=True)
    assert contents(sample) == {}


def test_what_a_killed_job_left_is_a_dump_that_force_replaces(sample: Path):
    (sample / "run.json").unlink()
    (sample / ".rank_00003.json.tmp").write_text("{")
    (sample / ".rank_00003.safetensors.tmp").write_text("")
    (sample / ".run.json.tmp").write_text("")
    check_folder(sample, force=True)
    with pytest.raises(DumpError, match="exists"):
        check_folder(sample, force=False)


def another_file(path: Path) -> None:
    (path / "thesis.tex").write_text("years of work")


def two_other_files(path: Path) -> None:
    (path / "thesis\x1b[2J.tex").write_text("years of work")
    (path / "rank_notes.json").write_text("{}")


def a_folder_in_it(path: Path) -> None:
    (path / "rank_00007.json").mkdir()


def a_link_in_it(path: Path) -> None:
    (path / "rank_00007.json").symlink_to(path / "run.json")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (another_file, "{path} holds 1 files that are not part of a dump, such as thesis.tex"),
        (two_other_files, "{path} holds 2 files that are not part of a dump, such as rank_notes.json"),
        (a_folder_in_it, "{path} holds 1 files that are not part of a dump, such as rank_00007.json"),
        (a_link_in_it, "{path} holds 1 files that are not part of a dump, such as rank_00007.json"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_dump_with_anything_else_in_it_is_never_replaced(
    sample: Path, spoil: Callable[[Path], None], message: str, force: bool
):
    spoil(sample)
    before = contents(sample)
    with pytest.raises(DumpError) as caught:
        prepare_folder(sample, force=force)
    assert caught.value.message == message.format(path=sample)
    assert caught.value.hint == f"move them away, or {ELSEWHERE}"
    assert contents(sample) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("thesis.tex", "years of work"),
        ("run.json", '{"name": "somebody else\'s"}'),
        ("run.json", "not JSON"),
        ("rank_00000.json", '{"score": 3}'),
        ("rank_0.json", '{"schema": 1, "num_ranks": 2}'),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_dump_is_never_replaced(tmp_path: Path, name: str, content: str, force: bool):
    (tmp_path / name).write_text(content)
    with pytest.raises(DumpError) as caught:
        prepare_folder(tmp_path, force=force)
    assert caught.value.message == f"{tmp_path} exists and is not a dump: it has no run.json of shardviz"
    assert caught.value.hint == ELSEWHERE
    assert contents(tmp_path) == {name: content.encode()}


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: path.symlink_to(path.parent)])
def test_a_file_or_a_link_is_never_replaced(tmp_path: Path, make: Callable[[Path], object]):
    make(tmp_path / "a")
    with pytest.raises(DumpError) as caught:
        prepare_folder(tmp_path / "a", force=True)
    assert caught.value.message == f"{tmp_path}/a exists and is not a folder"
    assert (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("file/a", "cannot make {path}: Not a directory"), ("x" * 300, "cannot write to {path}: File name too long")],
)
def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path, name: str, message: str):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DumpError) as caught:
        prepare_folder(tmp_path / name)
    assert caught.value.message == message.format(path=tmp_path / name)
    assert caught.value.hint == ELSEWHERE


def test_a_new_dump_takes_its_place_once_it_is_whole(tmp_path: Path):
    path = tmp_path / "a.shardviz"
    with replacing_folder(path) as unfinished:
        write_sample(unfinished)
        assert not path.exists()
    assert read_files(path).run == RUN
    assert os.listdir(tmp_path) == ["a.shardviz"]


def test_a_dump_is_replaced_by_a_whole_one(sample: Path):
    (sample / "rank_00001.safetensors").unlink()
    with replacing_folder(sample, force=True) as unfinished:
        write_sample(unfinished)
    assert len(contents(sample)) == 5
    assert os.listdir(sample.parent) == ["a.shardviz"]


class _Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, _Interrupted])
def test_a_job_that_ends_half_way_leaves_the_old_dump_and_nothing_else(sample: Path, error: type[BaseException]):
    before = contents(sample)

    def half_a_job() -> None:
        with replacing_folder(sample, force=True) as unfinished:
            write_run(unfinished, RUN)
            raise error

    with pytest.raises(error):
        half_a_job()
    assert contents(sample) == before
    assert os.listdir(sample.parent) == ["a.shardviz"]


def test_if_the_new_dump_cannot_take_its_place_the_old_one_comes_back(sample: Path):
    before = contents(sample)

    def lost_on_the_way() -> None:
        with replacing_folder(sample, force=True) as unfinished:
            unfinished.rmdir()

    with pytest.raises(DumpError) as caught:
        lost_on_the_way()
    assert caught.value.message == f"cannot replace {sample}: No such file or directory"
    assert contents(sample) == before
    assert os.listdir(sample.parent) == ["a.shardviz"]


@pytest.mark.parametrize("force", [False, True])
def test_a_second_job_into_a_folder_that_is_being_written_is_refused(tmp_path: Path, force: bool):
    path = tmp_path / "a.shardviz"
    with replacing_folder(path, force=force) as unfinished:
        with pytest.raises(DumpError) as caught, replacing_folder(path, force=force):
            pytest.fail("the second job must not start")
        assert caught.value.message == f"another process is writing {path}"
        assert caught.value.hint == f"wait for it, or {ELSEWHERE}"
        write_sample(unfinished)
    assert read_files(path).run == RUN
    assert os.listdir(tmp_path) == ["a.shardviz"]


def test_nothing_is_run_where_the_dump_could_not_be_written(sample: Path):
    with pytest.raises(DumpError, match="exists"), replacing_folder(sample):
        pytest.fail("the job must not start")


@pytest.mark.parametrize("name", [".", "sub/.."])
def test_a_dump_may_be_written_into_the_folder_one_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "sub").rmdir()
    with replacing_folder(type(tmp_path)(name)) as unfinished:
        write_sample(unfinished)
    assert read_files(tmp_path / "here").run == RUN
    assert os.listdir(tmp_path) == ["here"]


def test_a_file_that_cannot_be_written_leaves_the_one_of_before_and_no_other(sample: Path):
    before = contents(sample)
    unwritable = RankRecord(1, 1, 2, "host", not_checked=((object(), ""),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_rank(sample, unwritable)
    assert contents(sample) == before


def test_a_full_disk_leaves_the_files_of_before_and_no_other(sample: Path):
    """Files of this process may grow to 64 bytes only: a disk that is full in the middle of a file."""
    before = contents(sample)
    code = """
import resource, signal, sys
from pathlib import Path
from shardviz.errors import DumpError
from tests.dump.samples import RUN, rank_record, write_rank, write_run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
path = Path(sys.argv[1])
for write in (lambda: write_run(path, RUN), lambda: write_rank(path, rank_record(1))):
    try:
        write()
    except DumpError as error:
        print(error.message)
"""
    ran = subprocess.run([sys.executable, "-c", code, str(sample)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        f"cannot write {sample}/run.json: File too large",
        f"cannot write {sample}/rank_00001.json: File too large",
    ]
    assert contents(sample) == before


def test_dense_values_can_be_read_by_all_who_can_read_the_dump(sample: Path):
    write_rank(sample, rank_record(0), {"initial/param/w": np.zeros(3)})
    assert {path.stat().st_mode for path in sample.glob("rank_00000.*")} == {(sample / "run.json").stat().st_mode}


def test_dense_values_that_cannot_be_written_leave_no_file(tmp_path: Path):
    with pytest.raises(Exception, match=r"references|object array"):
        write_rank(tmp_path, rank_record(0), {"x": np.array([object()])})
    assert contents(tmp_path) == {}


def test_a_folder_that_is_gone_is_reported(tmp_path: Path):
    for write in (
        lambda: write_run(tmp_path / "gone", RUN),
        lambda: write_rank(tmp_path / "gone", rank_record(0)),
        lambda: write_rank(tmp_path / "gone", rank_record(0), {"x": np.zeros(3)}),
    ):
        with pytest.raises(DumpError, match=r"cannot write .*/gone/r.*: .*No such file or directory"):
            write()
