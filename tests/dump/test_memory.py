"""The memory table and the comms table, from dumps made by hand."""

import pytest
from msgspec import structs

from shardviz.dump.costs import (
    counted_tensors,
    elements_text,
    memory_table,
    memory_uses,
    received_bytes,
    schemes,
)
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.step import CallRecord, CollectiveRecord, StageRecord
from shardviz.dump.records.tensors import Body, TensorRecord
from shardviz.dump.records.trace import PointRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.picture.text.costs import comms_lines, memory_lines
from shardviz.text import bytes_text

BODIES = (
    Body("param", "initial", (8, 4), (4, 4), "float32"),
    Body("grad", "step", (8, 4), (4, 4), "float64"),
    Body("optim", "step", (8, 4), (4, 4), "float64"),
    Body("activation", "step", (6, 4), (6, 4), "float64"),
)
NAMES = (("layer.weight", 0), ("layer.weight", 1), ("layer.weight.exp_avg", 2), ("layer", 3), ("block.layer", 3))


def _model(path, **more):
    prepare_folder(path)
    write_run(path, RunRecord(1, "test", "none", 2))
    tensors = tuple(TensorRecord(name, body) for name, body in NAMES)
    for rank in range(2):
        write_rank(path, RankRecord(1, rank, 2, "testhost", bodies=BODIES, tensors=tensors, **more))
    return dump_of(read_files(path))


def test_memory_counts_a_float64_step_in_the_models_own_element_type(tmp_path):
    dump = _model(tmp_path / "dump")
    found = memory_uses(dump)
    assert {(use.name, use.role): (use.bytes[1], use.whole) for use in found} == {
        ("layer.weight", "param"): (64, 128),
        ("layer.weight", "grad"): (64, 128),
        ("layer.weight.exp_avg", "optim"): (64, 128),
        ("layer", "activation"): (96, 96),
        ("block.layer", "activation"): (96, 96),
    }
    table = memory_table(dump)
    assert dict(zip(table.roles, table.by_rank[0], strict=True)) == {
        "param": 64,
        "grad": 64,
        "optim": 64,
        "activation": 192,
    }


def test_a_pipelines_activations_are_counted_once_for_every_micro_batch_that_waits(tmp_path):
    runs = [StageRecord(0, 0), StageRecord(0, 1), StageRecord(0, 0, backward=True), StageRecord(0, 2)]
    found = memory_uses(_model(tmp_path / "dump", schedule=tuple(runs)))
    assert {use.bytes[0] for use in found if use.role == "activation"} == {2 * 96}
    assert any(
        "for 2 micro-batches" in line.plain for line in memory_lines(_model(tmp_path / "b", schedule=tuple(runs)))
    )


def _outputs(path, names, **more):
    """The activations of a model of one layer, which this rank has 2 of 8 rows of, as a DTensor of 2 rows would."""
    prepare_folder(path)
    write_run(path, RunRecord(1, "test", "none", 1))
    body = Body("activation", "step", (2, 4), (2, 4), "float32")
    tensors = tuple(TensorRecord(name, 0) for name in names)
    write_rank(path, RankRecord(1, 0, 1, "testhost", bodies=(body,), tensors=tensors, **more))
    return {use.name: (use.bytes[0], use.whole) for use in memory_uses(dump_of(read_files(path)))}


def test_an_activation_is_as_large_unsharded_as_the_trace_found_it(tmp_path):
    seen = (PointRecord("layer", "output", 0, "right", layout="[8/dp, 16/tp]"), PointRecord("x", "output", 0, "odd"))
    assert _outputs(tmp_path / "a", ["layer"], trace=seen) == {"layer": (32, 8 * 16 * 4)}
    assert _outputs(tmp_path / "b", ["x"], trace=seen) == {"x": (32, 32)}, "where nothing is known, its own shape"


@pytest.mark.parametrize(
    "point",
    [
        PointRecord("layer", "input", 0, "right", layout="[8/dp, 16]"),
        PointRecord("layer", "output", 0, "right", call=1, layout="[8/dp, 16]"),
        PointRecord("layer", "output", 0, "right", layout="</script>"),
    ],
)
def test_other_points_of_a_trace_do_not_size_an_output(tmp_path, point):
    assert _outputs(tmp_path / "a", ["layer"], trace=(point,)) == {"layer": (32, 32)}


def test_what_is_kept_to_explain_a_step_takes_no_memory(tmp_path):
    names = ["layer", "layer: gradient of input", "sum", "sum.before"]
    seen = _outputs(tmp_path / "a", names, calls=(CallRecord("sum", "all_reduce", (0,)),))
    assert seen == {"layer": (32, 32), "sum": (32, 32)}


def test_what_a_rank_has_of_a_tensor_adds_up_to_the_table(tmp_path):
    dump = _model(tmp_path / "dump")
    assert sum(one.on(1) for one in counted_tensors(dump)) == sum(memory_table(dump).by_rank[1]) == 384
    assert [one.on(7) for one in counted_tensors(dump)] == [0] * 5


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (34304, "33.5 KiB"),
        (1023 * 1024, "1023 KiB"),
        (2**20 - 1, "1 MiB"),
        (3 * 2**20, "3 MiB"),
        (5 * 10**12, "4.55 TiB"),
        (2**70, "1048576 PiB"),
    ],
)
def test_bytes_are_written_with_three_digits(count, text):
    assert bytes_text(count) == text


def test_elements_of_a_type_that_is_not_known_are_counted():
    assert (elements_text(1536, "bfloat16"), elements_text(1536, "int4")) == ("3 KiB", "1,536 elements")


def test_tied_parameters_are_counted_once(tmp_path):
    prepare_folder(tmp_path / "dump")
    write_run(tmp_path / "dump", RunRecord(1, "test", "none", 1))
    states = {"": BODIES[0], ".grad": structs.replace(BODIES[0], role="grad", moment="step")}
    states[".exp_avg"] = structs.replace(BODIES[0], role="optim", moment="step")
    tensors = tuple(
        TensorRecord(name + end.removesuffix(".grad"), at)
        for at, end in enumerate(states)
        for name in ("embed.weight", "head.weight")
    )
    tied = (("embed.weight", "head.weight"),)
    write_rank(
        tmp_path / "dump",
        RankRecord(1, 0, 1, "testhost", bodies=tuple(states.values()), tensors=tensors, tied=tied),
    )
    found = memory_uses(dump_of(read_files(tmp_path / "dump")))
    assert [use.name for use in found] == ["embed.weight", "embed.weight", "embed.weight.exp_avg"]


def test_the_formulas_of_zero_deal_out_one_thing_after_the_other():
    assert [scheme.bytes for scheme in schemes(400, 4)] == [1600, 1000, 700, 400]


def test_the_memory_table_has_a_line_per_rank_and_the_formulas(tmp_path):
    lines = [line.plain.rstrip() for line in memory_lines(_model(tmp_path / "dump"))]
    assert lines[:4] == [
        "bytes      param  grad  optim  activation  together",
        "rank 0        64    64     64         192       384",
        "rank 1        64    64     64         192       384",
        "unsharded    128   128    128         192       576",
    ]
    assert lines[-1] == "this run                          the fullest rank                 192"


def test_the_comms_table_goes_by_axis_and_counts_what_a_rank_receives(tmp_path):
    seen = (
        CollectiveRecord("all_gather", ("fsdp",), 2, "layer", False, 2, 256),
        CollectiveRecord("all_reduce", ("tp",), 4, "layer", True, 1, 64),
    )
    lines = [line.plain.rstrip() for line in comms_lines(_model(tmp_path / "dump", collectives=seen))]
    assert lines == [
        "along fsdp: each rank receives up to 128 bytes",
        "  collective  module  pass     count  bytes  received  group  on ranks",
        "  all_gather  layer   forward      2    256       128      2         2",
        "",
        "along tp: each rank receives up to 96 bytes",
        "  collective  module  pass      count  bytes  received  group  on ranks",
        "  all_reduce  layer   backward      1     64        96      4         2",
    ]
    assert received_bytes(CollectiveRecord("send", ("pp",), 2, bytes=100)) == 0
