"""A dump from anybody: whatever its files say, one line tells what is wrong, at once and in little memory."""

from __future__ import annotations

import json
import math
import re
import time
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardviz.dump.read import read_dump
from shardviz.dump.tensors import model_of
from shardviz.errors import DumpError
from tests.dump.samples import spoil, write_sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILES = ["run.json", "rank_00001.json"]
WRONG: list[Any] = [None, True, 2.5, -1, 0, 7, 10**18, 10**4000, "", "\x1b[31m\n", "é" * 400]
WRONG += [[], [1], [[0, 1]], [[1, 0]], [[0, 10**18]], ["Shard(0)"], {}, {"x": 1}]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_sample(tmp_path_factory.mktemp("hostile") / "a.shardviz")
    (path / "rank_00000.json").unlink()  # a missing rank is no error, and there is less to read
    return path


@pytest.fixture
def restored(sample: Path) -> Iterator[Path]:
    """The sample, for a test that spoils its files."""
    contents = {name: (sample / name).read_bytes() for name in FILES}
    yield sample
    for name, content in contents.items():
        (sample / name).write_bytes(content)


def refusal(path: Path) -> DumpError:
    with pytest.raises(DumpError) as caught:
        read_dump(path)
    return caught.value


def use_all(path: Path) -> None:
    """Do with a dump all that the checks and pictures do first: nothing but a `DumpError` may come of it."""
    try:
        model = model_of(read_dump(path))
        uses = [
            partial(content, tensor, shard, name)
            for tensor in model.tensors
            for shard in tensor.shards.values()
            for name in tensor.names[:3]
            for content in (model.local_ids, model.values)
            if math.prod(shard.body.local_shape) < 1 << 16
        ]
    except DumpError as error:
        assert_one_line(error)
        return
    for use in uses:
        try:
            use()
        except DumpError as error:
            assert_one_line(error)


def assert_one_line(error: DumpError) -> None:
    assert error.message.isprintable()
    assert len(error.message) < 1000


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_off_anywhere_is_told_by_its_name(restored: Path, name: str):
    content = (restored / name).read_bytes().rstrip()
    for length in range(len(content)):
        (restored / name).write_bytes(content[:length])
        message = refusal(restored).message
        assert message.startswith(f"{restored}/{name} is damaged: "), content[:length]
        assert "truncated" in message or "malformed" in message, content[:length]


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys or indices; of nested values only the outermost."""
    if isinstance(content, dict | list):
        for key in list(content) if isinstance(content, dict) else range(len(content)):
            yield content, key
            if key != "values":
                yield from places(content[key])


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_value_anywhere_is_an_error_of_shardviz_or_a_dump_that_can_be_used(restored: Path, name: str):
    content = json.loads((restored / name).read_bytes())
    spots = list(places(content))
    assert len(spots) > 60
    for container, key in spots:
        right = container[key]
        for wrong in WRONG:
            container[key] = wrong
            (restored / name).write_text(json.dumps(content))
            use_all(restored)
        container[key] = right


@pytest.mark.parametrize("name", FILES)
def test_a_field_of_another_type_is_told_with_the_type_that_was_expected(restored: Path, name: str):
    content = json.loads((restored / name).read_bytes())
    for container, key in places(content):
        right = container[key]
        if isinstance(right, dict) or key == "values":
            continue
        container[key] = {"x": 1}
        (restored / name).write_text(json.dumps(content))
        message = refusal(restored).message
        assert message.startswith(f"{restored}/{name} is damaged: Expected `"), message
        assert "got `object` - at `$." in message, message
        container[key] = right


def test_no_field_may_be_left_out_that_has_no_default(restored: Path):
    needed = {
        "run.json": ["num_ranks", "shardviz", "torch"],
        "rank_00001.json": ["rank", "num_ranks", "hostname"],
    }
    for name, fields in needed.items():
        content = (restored / name).read_bytes()
        for field in fields:
            spoil(restored / name, lambda found, field=field: found.pop(field))
            assert f"missing required field `{field}`" in refusal(restored).message
            (restored / name).write_bytes(content)


@settings(max_examples=300)
@given(st.data())
def test_any_damage_to_the_bytes_is_an_error_of_shardviz_or_a_dump_that_can_be_used(sample: Path, data: st.DataObject):
    path = sample / data.draw(st.sampled_from(FILES))
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    length = data.draw(st.integers(0, 8))
    try:
        path.write_bytes(content[:start] + data.draw(st.binary(max_size=8)) + content[start + length :])
        use_all(sample)
    finally:
        path.write_bytes(content)


@settings(max_examples=200)
@given(st.binary(max_size=64))
def test_any_bytes_are_an_error_of_shardviz(sample: Path, content: bytes):
    path = sample / "rank_00001.json"
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        assert refusal(sample).message.startswith(f"{path}")
    finally:
        path.write_bytes(before)


Change = Any


def put(value: Any, *keys: str | int) -> Change:
    """Return a change that puts a value at a place."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def both(*changes: Change) -> Change:
    return lambda content: [change(content) for change in changes]


def without_indices(message: str) -> str:
    """Leave out the indices of msgspec's paths, which only some of its versions tell."""
    text, at, path = message.partition("`$")
    return text + at + re.sub("[0-9]+", "...", path)


WRONG_RUN: list[tuple[Change, str]] = [
    (put(0, "num_ranks"), "Expected `int` >= 1 - at `$.num_ranks`"),
    (put(10**12, "num_ranks"), "Expected `int` <= 1048576 - at `$.num_ranks`"),
    (put([2, 2], "mesh", "shape"), "mesh: mesh has 2 * 2 = 4 places but 2 ranks"),
    (put([0, 2], "mesh", "shape"), "mesh: mesh axis fsdp has size 0"),
    (put([2**32, 2**32], "mesh", "shape"), "mesh: mesh (fsdp=4294967296, tp=4294967296) has more than 1,048,576 ranks"),
    (put([], "mesh", "ranks"), "mesh: a mesh names its ranks"),
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
    (put("embed", "stamps", 1, "name"), "stamps[0]: name 'embed' stands twice, expected each name once"),
    (put("nobody", "stamps", 6, "tied_to"), "stamps[6]: tied_to is 'nobody', expected a stamp whose ids start at 1"),
    (put(2, "stamps", 6, "first"), "stamps[6]: tied_to is 'embed', expected a stamp whose ids start at 2"),
    (put("", "stamps", 6, "tied_to"), "stamps[6]: ids count from 1, expected none of the 1 to 8 of stamps[0]"),
    (
        put("[12/", "intended", "layers.*.w"),
        "intended['layers.*.w']: layout '[12/': expected an axis at column 5, found the end",
    ),
    (put(1, "news"), "Object contains unknown field `news`"),
    (put(1, "n\x1b\n"), "Object contains unknown field `n\\u001b\\u000a`"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_RUN, ids=[message for _, message in WRONG_RUN])
def test_what_does_not_fit_in_run_json_is_told(restored: Path, change: Change, message: str):
    spoil(restored / "run.json", change)
    error = refusal(restored)
    assert without_indices(error.message) == f"{restored}/run.json is damaged: {message}"
    assert error.hint == "write the dump again"


SPLIT_FACTOR = "_StridedShard(0, split_factor={})".format
DIGITS = "0123456789abcdef"

WRONG_RANK: list[tuple[Change, str]] = [
    (put(0, "rank"), "rank is 0, expected the rank in the file's name"),
    (put(3, "num_ranks"), "num_ranks is 3, expected the 2 of run.json"),
    (put(10**12, "num_ranks"), "Expected `int` <= 1048576 - at `$.num_ranks`"),
    (put([0, 9], "meshes", 0, "ranks"), "meshes[0]: ranks name rank 9, expected ranks below 2"),
    (put([9, 9], "meshes", 0, "shape"), "meshes[0]: mesh has 9 * 9 = 81 places but 2 ranks"),
    (put(1, "positions", 0, "mesh"), "positions[0]: mesh is 1, expected an index below 1"),
    (put([0], "positions", 0, "coord"), "positions[0]: coord is [0], expected a place on a mesh of [1, 2]"),
    (put([0, 2], "positions", 0, "coord"), "positions[0]: coord is [0, 2], expected a place on a mesh of [1, 2]"),
    (
        put([0, 2], "positions", 0, "group_ranks"),
        "positions[0]: group_ranks is [0, 2], expected a place on a mesh of [1, 2]",
    ),
    (put(-1, "layouts", 0, "mesh"), "Expected `int` >= 0 - at `$.layouts[...].mesh`"),
    (put(1, "layouts", 0, "mesh"), "layouts[0]: mesh is 1, expected an index below 1"),
    (
        put(["Shard(0)"], "layouts", 0, "placements"),
        "layouts[0]: placements: 1 placements for a mesh of 2 axes (fsdp=1, tp=2)",
    ),
    (put(["Shard(0)", "x"], "layouts", 0, "placements"), "layouts[0]: placements: 'x' is no placement"),
    (
        put(["Shard(0)", "Shard(2)"], "layouts", 0, "placements"),
        "layouts[0]: placements: Shard(2) on a tensor of 2 dims",
    ),
    (
        put(["Shard(0)", SPLIT_FACTOR(10**9)], "layouts", 0, "placements"),
        f"layouts[0]: placements: '{SPLIT_FACTOR(10**9)}' is no placement",
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
    (put([[1, 2, 3]], "bodies", 4, "values"), "bodies[4]: values are no nested lists of shape [2, 3]"),
    (put("nan", "bodies", 4, "values"), "bodies[4]: values are no nested lists of shape [2, 3]"),
    (
        put("oops", "bodies", 4, "values", 0, 1),
        "bodies[4]: values hold 'oops', expected numbers or one of nan, inf, -inf",
    ),
    (
        put(10**30, "bodies", 4, "values", 0, 1),
        "bodies[4]: values hold '10000000000000000000', expected numbers or one of nan, inf, -inf",
    ),
    (put([1], "bodies", 4, "values", 0, 1), "bodies[4]: values hold '[1]', expected numbers or one of nan, inf, -inf"),
    (put([1, 2], "bodies", 6, "values"), "bodies[6]: values are no nested lists of shape [2, 2]"),
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
        "tensors: param 'layers.*.w' of stage stamped stands twice, expected each name once",
    ),
    (
        put("embed", "tensors", 3, "name"),
        "tensors: param 'embed' of stage stamped stands twice, expected each name once",
    ),
    (
        both(put("layers.0.w", "tensors", 1, "name"), put(0, "tensors", 1, "body")),
        "tensors: param 'layers.*.w' of stage stamped stands twice, expected each name once",
    ),
    (put(".w", "tensors", 1, "suffix"), "tensors[1]: suffix is '.w', expected none without numbers"),
    (
        put("layers.1", "tensors", 0, "name"),
        "tensors[0]: name is 'layers.1', expected what stands before the first number of the full name",
    ),
    (
        put("layers.0.x.", "tensors", 0, "name"),
        "tensors[0]: name is 'layers.0.x.', expected what stands before the first number of the full name",
    ),
    (put(DIGITS, "tensors", 5, "digests"), "tensors[5]: digests has 16 digits, expected 2 * 16"),
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
    (put("guess", "bodies", 0, "role"), "Invalid enum value 'guess' - at `$.bodies[...].role`"),
    (put("now", "bodies", 0, "stage"), "Invalid enum value 'now' - at `$.bodies[...].stage`"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_RANK, ids=[message for _, message in WRONG_RANK])
def test_what_does_not_fit_in_a_rank_file_is_told(restored: Path, change: Change, message: str):
    spoil(restored / "rank_00001.json", change)
    error = refusal(restored)
    assert without_indices(error.message) == f"{restored}/rank_00001.json is damaged: {message}"
    assert error.hint == "write the dump again, or remove the file to check the other ranks"


def test_two_files_of_one_rank_are_told(restored: Path):
    twin = restored / "rank_000001.json"
    twin.write_bytes((restored / "rank_00001.json").read_bytes())
    try:
        message = refusal(restored).message
    finally:
        twin.unlink()
    assert message == f"{twin} is damaged: rank is 1, expected the rank in the file's name"


def test_a_file_of_more_ranks_than_the_run_has_is_told(restored: Path):
    extra = restored / "rank_00002.json"
    extra.write_bytes((restored / "rank_00001.json").read_bytes())
    spoil(extra, put(2, "rank"))
    try:
        message = refusal(restored).message
    finally:
        extra.unlink()
    assert message == f"{extra} is damaged: rank is 2, expected less than the 2 ranks of run.json"


def nested(depth: int, opened: str, closed: str) -> bytes:
    return ('{"schema": 1, "probe": ' + opened * depth + closed * depth + "}").encode()


BOMBS = {
    "lists": nested(100_000, "[", "]"),
    "objects": nested(100_000, '{"a":', "}").replace(b":}", b":1}"),
    "open lists": b"[" * 1_000_000,
    "open objects": b'{"schema":' * 100_000,
    "a name of a megabyte": b'{"schema": 1, "' + b"x" * 1_000_000 + b'": 1}',
    "a number of a megabyte": b'{"schema": 1, "num_ranks": 1' + b"0" * 1_000_000 + b"}",
    "a long schema": b'{"schema": 1' + b"0" * 4000 + b"}",
    "not UTF-8": b'{"schema": 1, "probe": "\xff"}',
    "half a surrogate": b'{"schema": 1, "probe": "\\ud800"}',
    "UTF-16": '{"schema": 1}'.encode("utf-16"),
    "not a number": b'{"schema": 1, "num_ranks": NaN}',
    "too large a number": b'{"schema": 1, "num_ranks": 1e999}',
    "a list": b"[1]",
    "a pickle": b"\x80\x04\x95\x0b",
    "twice": b'{"schema": 1}{"schema": 1}',
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_made_to_break_the_reader_is_told_at_once_in_one_line(restored: Path, name: str, bomb: bytes):
    (restored / name).write_bytes(bomb)
    started = time.process_time()
    error = refusal(restored)
    assert time.process_time() - started < 0.3
    assert error.message.startswith(f"{restored}/{name}")
    assert error.message.isprintable()
    assert len(error.message) < 500 + len(str(restored))


def many(count: int) -> list[tuple[str, Change]]:
    """Files of which every part is large, or stands for something much larger."""
    shape = [1] * 32
    axes = [f"a{axis}" for axis in range(20)]
    wide = {"axes": axes, "shape": [2] * 20, "ranks": [0, 1]}
    return [
        ("run.json", both(put(2**20, "num_ranks"), put([2**10, 2**10], "mesh", "shape"))),
        ("run.json", both(put(2**20, "num_ranks"), put([2**20, 2**20], "mesh", "shape"))),
        ("run.json", put(wide, "mesh")),
        ("run.json", put([2**30] * 2, "stamps", 1, "shape")),
        ("run.json", put({f"{i}": "[" + "(" * 4000 for i in range(count // 100)}, "intended")),
        ("run.json", put([{"name": f"{i}", "first": 1, "shape": shape} for i in range(count)], "stamps")),
        ("rank_00001.json", put([[0, 2**19], [2**20, 2**62]], "tensors", 0, "numbers")),
        ("rank_00001.json", put([[[0, 2**62]], [[0, 2**62]]], "bodies", 0, "held")),
        ("rank_00001.json", put([[i, i + 1] for i in range(count)], "bodies", 0, "held", 0)),
        ("rank_00001.json", put([[1, 1, 2**62]] * count, "bodies", 2, "runs")),
        ("rank_00001.json", put([2**62] * 32, "bodies", 3, "local_shape")),
        ("rank_00001.json", put(["Shard(0)", SPLIT_FACTOR(65_537)], "layouts", 0, "placements")),
        ("rank_00001.json", put([wide] * 1000, "meshes")),
    ]


@pytest.mark.parametrize("number", range(len(many(0))))
def test_great_numbers_cost_no_more_than_the_file_that_holds_them(restored: Path, number: int):
    name, change = many(10_000)[number]
    spoil(restored / name, change)
    size = (restored / name).stat().st_size
    refusal(restored)  # what is imported or compiled at the first error is not counted
    tracemalloc.start()
    started = time.process_time()
    refusal(restored)
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.5
    assert peak < 12 * size + 200_000


def test_a_label_that_takes_long_to_follow_costs_nothing_to_read(restored: Path):
    """A valid file: the most segments that are allowed, on a dim that nothing divides."""
    change = both(
        put([2**60 + 1, 2], "layouts", 2, "shape"),
        put([2**60 + 1, 2], "bodies", 2, "shape"),
        put(
            ["_StridedShard(0, split_factor=65536)", "_StridedShard(0, split_factor=65536)"], "layouts", 2, "placements"
        ),
    )
    spoil(restored / "rank_00001.json", change)
    started = time.process_time()
    model = model_of(read_dump(restored))
    assert time.process_time() - started < 0.2
    (layout,) = [tensor.shards[1].layout for tensor in model.tensors if tensor.name == "embed"]
    assert layout is not None
    assert layout.region((0, 1)).size > 1 << 59
