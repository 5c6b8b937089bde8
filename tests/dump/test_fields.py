"""Every reference, shape and name in a dump's files is checked: what does not fit is told by file and field."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shardviz.dump.read import CHECKSUM_BYTES, read_files
from shardviz.layout.mesh import parse_mesh
from tests.dump.samples import OUTPUT_DIGEST, Change, both, put, refusal, spoil, write_sample
from tests.dumps import make_dump

if TYPE_CHECKING:
    from pathlib import Path


def without_indices(message: str) -> str:
    """Leave out the indices of msgspec's paths, which only some of its versions tell."""
    text, at, path = message.partition("`$")
    return text + at + re.sub("[0-9]+", "...", path)


SKETCH = {"name": "w", "what": "weight", "dtype": "float32", "shape": [4, 3]}

WRONG_RUN: list[tuple[Change, str]] = [
    (put(0, "num_ranks"), "Expected `int` >= 1 - at `$.num_ranks`"),
    (put(10**12, "num_ranks"), "Expected `int` <= 1048576 - at `$.num_ranks`"),
    (put([2, 2], "mesh", "shape"), "mesh: mesh has 2 * 2 = 4 places but 2 ranks"),
    (put([0, 2], "mesh", "shape"), "mesh: mesh axis fsdp has size 0"),
    (put([2**32, 2**32], "mesh", "shape"), "mesh: mesh (fsdp=4294967296, tp=4294967296) has more than 1,048,576 ranks"),
    (both(put([0, 0], "mesh", "shape"), put([], "mesh", "ranks")), "mesh: a mesh names its ranks"),
    (both(put([4, 4], "mesh", "shape"), put([], "mesh", "ranks")), "mesh: ranks name rank 15, expected ranks below 2"),
    (put([1, 1], "mesh", "ranks"), "mesh: mesh names rank 1 more than once"),
    (put([1, 2], "mesh", "ranks"), "mesh: ranks name rank 2, expected ranks below 2"),
    (put(["tp", "tp"], "mesh", "axes"), "mesh: mesh axis tp is named 2 times"),
    (put(["tp", "\n"], "mesh", "axes"), "mesh: mesh axis '\\n' is not a name"),
    (put(["tp"], "mesh", "axes"), "mesh: mesh has 2 sizes but 1 axis names"),
    (put(["a"] * 33, "mesh", "axes"), "Expected `array` of length <= 32 - at `$.mesh.axes`"),
    (put(0, "stamps", 1, "first"), "Expected `int` >= 1 - at `$.stamps[...].first`"),
    (put([-1], "stamps", 1, "shape"), "Expected `int` >= 0 - at `$.stamps[...].shape[...]`"),
    (put([1] * 33, "stamps", 1, "shape"), "Expected `array` of length <= 32 - at `$.stamps[...].shape`"),
    (
        put([2**40, 2**40], "stamps", 1, "shape"),
        "stamps[1]: shape is [1099511627776, 1099511627776], expected at most 4,611,686,018,427,387,904 elements",
    ),
    (put(8, "stamps", 1, "first"), "stamps[1]: ids count from 8, expected none of the 1 to 8 of stamps[0]"),
    (put([4, 4], "stamps", 1, "shape"), "stamps[2]: ids count from 21, expected none of the 9 to 24 of stamps[1]"),
    (put("embed", "stamps", 1, "name"), "stamps[0]: name 'embed' is repeated, expected each name once"),
    (put("nobody", "stamps", 6, "tied_to"), "stamps[6]: tied_to is 'nobody', expected a stamp whose ids start at 1"),
    (put(2, "stamps", 6, "first"), "stamps[6]: tied_to is 'embed', expected a stamp whose ids start at 2"),
    (put("", "stamps", 6, "tied_to"), "stamps[6]: ids count from 1, expected none of the 1 to 8 of stamps[0]"),
    (
        put("[12/", "intended", "layers.*.w"),
        "intended['layers.*.w']: layout '[12/': expected an axis or a number at column 5, found the end",
    ),
    (put(1, "news"), "Object contains unknown field `news`"),
    (put(1, "n\x1b\n"), "Object contains unknown field `n\\u001b\\u000a`"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_RUN, ids=[message for _, message in WRONG_RUN])
def test_what_does_not_fit_in_run_json_is_reported(restored: Path, change: Change, message: str):
    spoil(restored / "run.json", change)
    error = refusal(restored)
    assert without_indices(error.message) == f"{restored}/run.json is damaged: {message}"
    assert error.hint == "write the dump again"


SPLIT_FACTOR = "_StridedShard(0, split_factor={})".format
DIGITS = "0123456789abcdef"

WRONG_RANK: list[tuple[Change, str]] = [
    (put(3, "num_ranks"), "num_ranks is 3, expected the 2 of run.json"),
    (put(10**12, "num_ranks"), "Expected `int` <= 1048576 - at `$.num_ranks`"),
    (put([0, 9], "meshes", 0, "ranks"), "meshes[0]: ranks name rank 9, expected ranks below 2"),
    (put([9, 9], "meshes", 0, "shape"), "meshes[0]: ranks name rank 80, expected ranks below 2"),
    (put(1, "positions", 0, "mesh"), "positions[0]: mesh is 1, expected an index below 1"),
    (put([0], "positions", 0, "coord"), "positions[0]: coord is [0], expected a place on a mesh of [1, 2]"),
    (put([0, 2], "positions", 0, "coord"), "positions[0]: coord is [0, 2], expected a place on a mesh of [1, 2]"),
    (
        put([0, 0], "positions", 0, "coord"),
        "positions[0]: coord is [0, 0], expected [0, 1], the place of rank 1 on the mesh",
    ),
    (
        both(
            put([1, 1], "meshes", 0, "shape"),
            put([0], "meshes", 0, "ranks"),
            put([0, 0], "positions", 0, "coord"),
            put([0, 0], "positions", 0, "group_ranks"),
        ),
        "positions[0]: mesh is 0, expected a mesh that rank 1 is on",
    ),
    (put([[9, 1, 6]], "bodies", 0, "runs"), "bodies[0]: held and runs are both there, expected one form of the ids"),
    (put(True, "bodies", 2, "dense"), "bodies[2]: runs and dense are both there, expected one form of the ids"),
    (
        put([[9, 1, 12]], "gathered", 0, "runs"),
        "gathered[0]: held and runs are both there, expected one form of the ids",
    ),
    *(
        (
            put([{"module": "m", "op": "all_reduce", "ranks": ranks}], "calls"),
            f"calls[0]: ranks is {ranks}, expected ranks below 2, each once",
        )
        for ranks in ([], [0, 0], [1, 2])
    ),
    (
        put([0, 2], "positions", 0, "group_ranks"),
        "positions[0]: group_ranks is [0, 2], expected a place on a mesh of [1, 2]",
    ),
    (put(-1, "layouts", 0, "mesh"), "Expected `int` >= 0 - at `$.layouts[...].mesh`"),
    (put(1, "layouts", 0, "mesh"), "layouts[0]: mesh is 1, expected an index below 1"),
    (
        put(["Shard(0)"], "layouts", 0, "placements"),
        "layouts[0]: placements: 1 placement for a mesh of 2 axes (fsdp=1, tp=2)",
    ),
    (put(["Shard(0)", "x"], "layouts", 0, "placements"), "layouts[0]: placements: 'x' is not a placement"),
    (
        put(["Shard(0)", "Shard(2)"], "layouts", 0, "placements"),
        "layouts[0]: placements: Shard(2) on a tensor of 2 dims",
    ),
    (
        put(["Shard(0)", SPLIT_FACTOR(10**9)], "layouts", 0, "placements"),
        f"layouts[0]: placements: '{SPLIT_FACTOR(10**9)}' is not a placement",
    ),
    (
        put(["Shard(0)", SPLIT_FACTOR(10**8)], "layouts", 0, "placements"),
        f"layouts[0]: placements: {SPLIT_FACTOR(10**8)}: a split factor is 1 to 65,536",
    ),
    (
        put(["Shard(0)", SPLIT_FACTOR(0)], "layouts", 0, "placements"),
        f"layouts[0]: placements: {SPLIT_FACTOR(0)}: a split factor is 1 to 65,536",
    ),
    (put(2, "layouts", 1, "flat", "offset"), "layouts[1]: flat is 5 elements from 2, expected a part of shape [6]"),
    (put([3, 3], "layouts", 1, "flat", "shape"), "layouts[1]: flat is 9 elements from 0, expected a part of shape [6]"),
    (put([2, 3], "layouts", 1, "shape"), "layouts[1]: flat is 5 elements from 0, expected a part of shape [2, 3]"),
    (put(3, "bodies", 0, "layout"), "bodies[0]: layout is 3, expected an index below 3"),
    (put([4, 4], "bodies", 0, "shape"), "bodies[0]: shape is [4, 4], expected the [4, 3] of layouts[0]"),
    (put([3, 3], "bodies", 0, "local_shape"), "bodies[0]: held covers [2, 3], expected the local_shape [3, 3]"),
    (
        put([[[0, 10**12]], [[0, 3]]], "bodies", 0, "held"),
        "bodies[0]: held covers [1000000000000, 3], expected the local_shape [2, 3]",
    ),
    (put([[[0, 2]]], "bodies", 0, "held"), "bodies[0]: held has 1 dims, expected those of shape [4, 3]"),
    (
        put([[[3, 5]], [[0, 3]]], "bodies", 0, "held"),
        "tensors[0]: held ends at [5, 3], expected indices of the stamped shape [4, 3]",
    ),
    (put([[[3, 6]]], "bodies", 1, "held"), "bodies[1]: held covers [3], expected the local_shape [2]"),
    (put([[[4, 6]]], "bodies", 1, "held"), "tensors[1]: held ends at [6], expected indices of the stamped shape [5]"),
    (
        put([[[1, 0], [1, 4]], [[0, 3]]], "bodies", 0, "held"),
        "tensors[0]: held has a range that does not rise, expected [start, stop] with start below stop",
    ),
    (put("flaot32", "bodies", 0, "dtype"), "bodies[0]: dtype is 'flaot32', expected a dtype such as float32"),
    (
        put("x" * 5000, "bodies", 0, "dtype"),
        f"bodies[0]: dtype is '{'x' * 20}', expected a dtype such as float32",
    ),
    (put([[1, 1, 3]], "bodies", 2, "runs"), "bodies[2]: runs count 3 ids, expected those of [2, 2]"),
    (
        put([[1, 1, 10**18]], "bodies", 2, "runs"),
        "bodies[2]: runs count 1000000000000000000 ids, expected those of [2, 2]",
    ),
    (put([[1, 1, 0]], "bodies", 2, "runs"), "Expected `int` >= 1 - at `$.bodies[...].runs[...][...]`"),
    (put([[-2, 1, 4]], "bodies", 2, "runs"), "Expected `int` >= -1 - at `$.bodies[...].runs[...][...]`"),
    (
        put([[1, 2**61, 4]], "bodies", 2, "runs"),
        f"bodies[2]: runs has [1, {2**61}, 4], expected ids from -1 to 4,611,686,018,427,387,904",
    ),
    (
        put([[1, -1, 4]], "bodies", 2, "runs"),
        "bodies[2]: runs has [1, -1, 4], expected ids from -1 to 4,611,686,018,427,387,904",
    ),
    (put([[1, 2, 3]], "bodies", 4, "values"), "bodies[4]: values are not nested lists of shape [2, 3]"),
    (put("nan", "bodies", 4, "values"), "bodies[4]: values are not nested lists of shape [2, 3]"),
    (
        put("oops", "bodies", 4, "values", 0, 1),
        "bodies[4]: values hold 'oops', expected numbers or one of nan, inf, -inf",
    ),
    (
        put(10**30, "bodies", 4, "values", 0, 1),
        "bodies[4]: values hold '10000000000000000000', expected numbers or one of nan, inf, -inf",
    ),
    (put([1], "bodies", 4, "values", 0, 1), "bodies[4]: values hold '[1]', expected numbers or one of nan, inf, -inf"),
    (put([1, 2], "bodies", 6, "values"), "bodies[6]: values are not nested lists of shape [2, 2]"),
    (put(7, "tensors", 0, "body"), "tensors[0]: body is 7, expected an index below 7"),
    (
        put([[0, 10**18]], "tensors", 0, "numbers"),
        "tensors[0]: numbers bring the names to 1,000,000,000,000,000,000, expected at most 1,048,576",
    ),
    (
        put([[2, 1]], "tensors", 0, "numbers"),
        "tensors[0]: numbers has a range that does not rise, expected [start, stop] with start below stop",
    ),
    (
        put([[0, 2], [1, 3]], "tensors", 0, "numbers"),
        "tensors: param 'layers.*.w' stamped appears twice, expected each name once",
    ),
    (
        put("embed", "tensors", 3, "name"),
        "tensors: param 'embed' stamped appears twice, expected each name once",
    ),
    (
        both(put("layers.0.w", "tensors", 1, "name"), put(0, "tensors", 1, "body")),
        "tensors: param 'layers.*.w' stamped appears twice, expected each name once",
    ),
    (put(".w", "tensors", 1, "suffix"), "tensors[1]: suffix is '.w', expected none without numbers"),
    (
        put("layers.1", "tensors", 0, "name"),
        "tensors[0]: name is 'layers.1', expected the part before the first number of the full name",
    ),
    (
        put("layers.0.x.", "tensors", 0, "name"),
        "tensors[0]: name is 'layers.0.x.', expected the part before the first number of the full name",
    ),
    (put(DIGITS, "tensors", 5, "digests"), "tensors[5]: digests has 16 digits, expected 2 * 16"),
    (
        put(DIGITS, "tensors", 7, "digests"),
        f"tensors[7]: digests are not the {OUTPUT_DIGEST} of the values in bodies[6]",
    ),
    (
        put([[0.5, 1], [2, 4]], "bodies", 6, "values"),
        "tensors[7]: digests are not the ea199253ef489ba4 of the values in bodies[6]",
    ),
    (
        put("x" * 32, "tensors", 5, "digests"),
        "Expected `str` matching regex '^[0-9a-f]*$' - at `$.tensors[...].digests`",
    ),
    (put(["embed"], "tied", 0), "Expected `array` of length >= 2 - at `$.tied[...]`"),
    (
        put([[[0, 5]], [[0, 3]]], "gathered", 0, "held"),
        "gathered[0]: held ends at [5, 3], expected indices of the stamped shape [4, 3]",
    ),
    (
        put([[[0, 4]]], "gathered", 0, "held"),
        "gathered[0]: held ends at [4], expected indices of the stamped shape [4, 3]",
    ),
    (
        put([[1, 2**62, 2]], "gathered", 1, "runs"),
        f"gathered[1]: runs has [1, {2**62}, 2], expected ids from -1 to 4,611,686,018,427,387,904",
    ),
    (put([SKETCH | {"numbers": [0.5] * 15}], "sketches"), "sketches[0]: numbers are 15, expected none or 16"),
    (put("guess", "bodies", 0, "role"), "Invalid enum value 'guess' - at `$.bodies[...].role`"),
    (put("now", "bodies", 0, "phase"), "Invalid enum value 'now' - at `$.bodies[...].phase`"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_RANK, ids=[message for _, message in WRONG_RANK])
def test_what_does_not_fit_in_a_rank_file_is_reported(restored: Path, change: Change, message: str):
    spoil(restored / "rank_00001.json", change)
    error = refusal(restored)
    assert without_indices(error.message) == f"{restored}/rank_00001.json is damaged: {message}"
    assert error.hint == "write the dump again, or remove the file to check the other ranks"


@pytest.mark.parametrize("number", [0, 1, 7])
def test_what_is_held_of_a_numbered_tensor_is_within_the_stamped_one(tmp_path: Path, number: int):
    name = f"layers.{number}.w"
    folder = make_dump(tmp_path / "d", parse_mesh("tp=2"), {name: "[4/tp, 4]"})
    assert sorted(read_files(folder).ranks) == [0, 1]
    spoil(folder / "run.json", put([4], "stamps", 0, "shape"))
    message = "is damaged: tensors[0]: held ends at [2, 4], expected indices of the stamped shape [4]"
    assert refusal(folder).message == f"{folder}/rank_00000.json {message}"


def test_two_files_of_one_rank_are_reported(restored: Path):
    twin = restored / "rank_000001.json"
    twin.write_bytes((restored / "rank_00001.json").read_bytes())
    try:
        message = refusal(restored).message
    finally:
        twin.unlink()
    assert message == f"{twin} has what rank 1 wrote"


def test_a_file_of_more_ranks_than_the_run_has_is_reported(restored: Path):
    extra = restored / "rank_00002.json"
    extra.write_bytes((restored / "rank_00001.json").read_bytes())
    spoil(extra, put(2, "rank"))
    try:
        message = refusal(restored).message
    finally:
        extra.unlink()
    assert message == f"{extra} is damaged: rank is 2, expected less than the 2 ranks of run.json"


RIGHT: list[Change] = [
    put([SKETCH, SKETCH | {"numbers": [0.5] * 16}], "sketches"),
    put([0, 0], "positions", 0, "group_ranks"),  # what `rank-order` is about
    put([], "positions"),
    put([{"module": "m", "op": "all_reduce", "ranks": [1, 0]}], "calls"),
    put(False, "bodies", 0, "dense"),
]


@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_what_looks_like_a_contradiction_and_is_none_is_read(restored: Path, number: int):
    spoil(restored / "rank_00001.json", RIGHT[number])
    assert list(read_files(restored).ranks) == [1]


def test_a_folder_that_may_not_be_entered_is_reported(tmp_path: Path):
    tmp_path.chmod(0o755)
    write_sample(tmp_path / "d").chmod(0)
    command = [sys.executable, "-c", AS_NOBODY]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (tmp_path / "d").chmod(0o755)
    assert done.stdout == "RefusedError cannot read d/run.json: Permission denied\n", done.stderr


AS_NOBODY = """
import os
from shardviz.dump.read import read_files
if os.getuid() == 0:
    os.setuid(65534)
try:
    read_files("d")
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0])
"""


def test_a_dump_that_calls_a_phase_a_stage_is_still_read(restored: Path):
    new = read_files(restored)
    for path in restored.glob("rank_*.json"):
        text = path.read_bytes()[:-CHECKSUM_BYTES] + b"}"
        old = text.replace(b'"phase":', b'"stage":')
        assert old != text
        path.write_bytes(old)
    assert read_files(restored) == new
