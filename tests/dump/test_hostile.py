"""A dump from anybody: whatever its files say, one line tells what is wrong, at once and in little memory."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.errors import DumpError
from tests.dump.samples import Change, both, put, refusal, spoil
from tests.dumps import replace_file
from tests.lanes import at_night, cases

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILES = ["run.json", "rank_00001.json"]
WRONG: list[Any] = [None, True, 2.5, -1, 0, 7, 10**18, 10**4000, "", "\x1b[31m\n", "é" * 400]
WRONG += [[], [1], [[0, 1]], [[1, 0]], [[0, 10**18]], ["Shard(0)"], {}, {"x": 1}]
PARTS = 4
"""By day each place gets one in so many of these values, others than its neighbor."""


def use_all(path: Path) -> None:
    """Do with a dump all that the checks and pictures do first: nothing but a `DumpError` may come of it."""
    try:
        dump = dump_of(read_files(path))
        uses = [
            partial(content, shard, name)
            for tensor in dump.tensors
            for shard in tensor.shards.values()
            for name in tensor.names[:3]
            for content in (dump.local_ids, dump.values)
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
def test_a_file_cut_off_anywhere_is_reported_by_its_name(restored: Path, name: str):
    content = (restored / name).read_bytes().rstrip()
    for length in range(len(content)):
        replace_file(restored / name, content[:length])
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


@pytest.mark.parametrize("part", [0, *at_night(range(1, PARTS))])
@pytest.mark.parametrize("name", FILES)
def test_a_wrong_value_anywhere_is_an_error_of_shardviz_or_a_dump_that_can_be_used(
    restored: Path, name: str, part: int
):
    content = json.loads((restored / name).read_bytes())
    spots = list(places(content))
    assert len(spots) > 60
    for number, (container, key) in enumerate(spots):
        right = container[key]
        for wrong in WRONG[(number + part) % PARTS :: PARTS]:
            container[key] = wrong
            replace_file(restored / name, json.dumps(content).encode())
            use_all(restored)
        container[key] = right


@pytest.mark.parametrize("name", FILES)
def test_a_field_of_another_type_is_reported_with_the_type_that_was_expected(restored: Path, name: str):
    content = json.loads((restored / name).read_bytes())
    for container, key in places(content):
        right = container[key]
        if isinstance(right, dict) or key == "values":
            continue
        container[key] = {"x": 1}
        replace_file(restored / name, json.dumps(content).encode())
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
            replace_file(restored / name, content)


@cases(300)
@given(st.data())
def test_any_damage_to_the_bytes_is_an_error_of_shardviz_or_a_dump_that_can_be_used(
    one_rank: Path, data: st.DataObject
):
    path = one_rank / data.draw(st.sampled_from(FILES))
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    length = data.draw(st.integers(0, 8))
    try:
        replace_file(path, content[:start] + data.draw(st.binary(max_size=8)) + content[start + length :])
        use_all(one_rank)
    finally:
        replace_file(path, content)


@cases(200)
@given(st.binary(max_size=64))
def test_any_bytes_are_an_error_of_shardviz(one_rank: Path, content: bytes):
    path = one_rank / "rank_00001.json"
    before = path.read_bytes()
    try:
        replace_file(path, content)
        assert refusal(one_rank).message.startswith(f"{path}")
    finally:
        replace_file(path, before)


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
def test_a_file_made_to_break_the_reader_is_reported_at_once_in_one_line(restored: Path, name: str, bomb: bytes):
    replace_file(restored / name, bomb)
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
        ("rank_00001.json", put(["Shard(0)", "_StridedShard(0, split_factor=65537)"], "layouts", 0, "placements")),
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
    dump = dump_of(read_files(restored))
    assert time.process_time() - started < 0.2
    (layout,) = [tensor.shards[1].layout for tensor in dump.tensors if tensor.name == "embed"]
    assert layout is not None
    assert layout.region((0, 1)).size > 1 << 59
