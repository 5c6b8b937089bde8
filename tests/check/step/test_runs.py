"""Two runs' steps side by side: where their unsharded models part, and what is said of it."""

import dataclasses

import numpy as np

from shardviz.check.diff import compare
from shardviz.check.step.runs.compare import Pair
from shardviz.dump.arrays.sketch import sketch
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import MeshRecord
from shardviz.dump.records.trace import SketchRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run

MODULES = ("layers.0", "layers.1.attn", "layers.1", "head")
IN, OUT, BACK_IN, BACK_OUT = "input", "output", "gradient of input", "gradient of output"
SIDES = (IN, OUT, BACK_IN, BACK_OUT)


def values_of(name, side):
    return np.random.default_rng(len(name) * 10 + SIDES.index(side)).normal(size=(4, 6))


@dataclasses.dataclass
class Made:
    """A dump of a run in the making: its tensors by name and side."""

    values: dict
    dtype: str = "float64"
    noise: float = 0.0
    drawn: tuple = ()

    @classmethod
    def right(cls, **options):
        values = {(name, side): values_of(name, side) for name in MODULES for side in SIDES}
        values |= {(f"{name}.weight", "weight"): values_of(name, OUT) for name in MODULES}
        return cls(values, **options)

    def changed(self, *places, by=lambda values: values * 1.5 + 1):
        for place in places:
            self.values[place] = by(self.values[place])
        return self

    def dump(self, folder, num_ranks=1):
        orders = {name: number for number, name in enumerate(MODULES)}
        made = tuple(
            SketchRecord(
                name,
                side,
                self.dtype,
                values.shape,
                sketch(values),
                orders.get(name, 0),
                noise=self.noise if side != "weight" else 0.0,
                is_drawn=name in self.drawn,
            )
            for (name, side), values in self.values.items()
        )
        folder = prepare_folder(folder)
        mesh = MeshRecord(("tp",), (num_ranks,), tuple(range(num_ranks)))
        write_run(folder, RunRecord(1, "test", "none", num_ranks, mesh=mesh, probe="test"))
        for rank in range(num_ranks):
            sketches = made if rank == 0 else ()
            write_rank(folder, RankRecord(1, rank, num_ranks, "host", meshes=(mesh,), sketches=sketches))
        return dump_of(read_files(folder))


def step_of(tmp_path, one, other):
    return compare(one.dump(tmp_path / "one"), other.dump(tmp_path / "other")).step


def test_runs_that_are_equal_agree_everywhere(tmp_path):
    step = step_of(tmp_path, Made.right(), Made.right())
    assert not step
    assert (step.num_compared, step.farthest) == (20, 0.0)


def test_float32_beside_bfloat16_agrees_within_what_rounding_is_seen_to_do(tmp_path):
    random = np.random.default_rng(5)
    other = Made.right(dtype="bfloat16", noise=0.01)
    places = [place for place in other.values if place[1] != "weight"]
    other.changed(*places, by=lambda values: values * (1 + 0.01 * random.normal(size=values.shape)))
    step = step_of(tmp_path, Made.right(dtype="float32"), other)
    assert not step
    assert 0 < step.farthest < step.allowed
    assert step.precision == ("float32", "bfloat16")


def test_weights_drawn_after_sharding_are_no_fault_of_a_step(tmp_path):
    other = Made.right(drawn=("head.weight",)).changed(("head.weight", "weight"), ("head", OUT))
    step = step_of(tmp_path, Made.right(), other)
    assert not step
    (one,) = step.departures
    assert (one.kind, one.module) == ("drawn", "head.weight")
    assert "depend on the mesh" in one.why
    assert [one["cause_id"] for one in step.to_json()["departures"]] == ["weights-drawn-after-sharding"]
    assert any("start from different weights" in unchecked.why for unchecked in step.not_compared)


def test_shapes_and_numbers_that_are_not_finite_are_reported(tmp_path):
    other = Made.right().changed(("head", OUT), by=lambda values: values * np.nan)
    assert "NaN" in step_of(tmp_path, Made.right(), other).departures[0].sentence
    other = Made.right().changed(("head", OUT), by=lambda values: values[:2])
    assert "[4, 6] in the first run, [2, 6]" in step_of(tmp_path / "shape", Made.right(), other).departures[0].sentence


def test_a_tensor_times_a_number_is_told_from_another_one():
    values, other = np.random.default_rng(0).normal(size=(2, 500))
    first, twice, second = (
        SketchRecord("x", OUT, "float64", (500,), sketch(each)) for each in (values, 2 * values, other)
    )
    assert abs(Pair(first, twice).factor - 2) < 1e-9
    assert Pair(first, second).factor is None
