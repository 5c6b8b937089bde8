"""Buffers of several gradients: ranks have their parts of split weights and of copies, one after the other."""

from types import SimpleNamespace

import numpy as np
import pytest

from shardviz.check.step.lines.calls import Lines
from shardviz.check.step.lines.flat import state_of_joined
from shardviz.check.step.lines.state import UNKNOWN, State
from shardviz.dump.records.trace import FrameRecord, LineRecord, LinesRecord, ValueRecord
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.placements import Replicate, Shard

MESH = parse_mesh("dp=2,tp=2")
RNG = np.random.default_rng(0)
WEIGHT, BIAS = RNG.standard_normal((4, 6)), RNG.standard_normal(3)
WHOLE = np.concatenate([WEIGHT.ravel(), BIAS])
LAYOUTS = (
    Layout.from_placements(MESH, (4, 6), (Replicate(), Shard(1))),
    Layout.from_placements(MESH, (3,), (Replicate(), Replicate())),
)
OF_WEIGHT, OF_BIAS, FLAT, JOINED, REDUCED = range(5)
SHAPES = ((4, 3), (3,), (12,), (15,), (15,))


def parts(weight=WEIGHT, bias=BIAS):
    """Return what ranks have in the buffer."""
    columns = {rank: weight[:, 3 * (rank % 2) :][:, :3] for rank in MESH.ranks}
    return {rank: np.concatenate([own.ravel(), bias]) for rank, own in columns.items()}


def state_of(held, *, number=REDUCED, source="terms", cuts="flatten"):
    made = ((cuts, (OF_WEIGHT,), FLAT), ("cat", (FLAT, OF_BIAS), JOINED), ("all_reduce", (JOINED,), REDUCED))
    frames = (FrameRecord("step.py", 1, "step", ""),)
    calls = tuple(LineRecord(0, function, frames, 0, inputs, (output,)) for function, inputs, output in made)
    values = tuple(ValueRecord(at, shape) for at, shape in enumerate(SHAPES))
    records = {rank: LinesRecord("step", calls, values) for rank in MESH.ranks}
    lines = Lines("step", records, LinesRecord("step", is_unsharded=True), "step")
    is_mean = source == "terms"
    known = [State(source, layout, ("dp",) if is_mean else (), op="avg" if is_mean else "") for layout in LAYOUTS]
    references = {OF_WEIGHT: WEIGHT, OF_BIAS: BIAS}
    states = SimpleNamespace(
        lines=lines,
        mesh=MESH,
        placed=lambda value: known[value[0][1]] if value[0][1] in references else UNKNOWN,
        reference_of=lambda value: references.get(value[0][1], WHOLE),
        held=lambda value: held,
        held_dtype=lambda value: "float64",
    )
    return state_of_joined(states, tuple((rank, number) for rank in MESH.ranks))


def test_a_buffer_of_right_parts_is_right_though_no_layout_describes_it():
    assert state_of(parts()) == State("right")
    assert state_of(parts()).text == "its parts of several tensors"


def test_terms_of_a_mean_stay_terms_in_a_buffer():
    terms = {rank: held + (1 if rank < 2 else -1) for rank, held in parts().items()}
    assert state_of(terms, number=JOINED) == State("terms", None, ("dp",), op="avg")


def test_the_sum_of_a_means_terms_may_be_divided_later():
    assert state_of({rank: 2 * held for rank, held in parts().items()}) == UNKNOWN


def test_a_buffer_whose_segments_are_mixed_over_tp_is_wrong():
    mean = sum(parts().values()) / 4
    assert state_of(dict.fromkeys(MESH.ranks, mean)) is None


def test_a_buffer_in_another_order_is_wrong():
    assert state_of({rank: np.roll(held, 3) for rank, held in parts().items()}) is None


@pytest.mark.parametrize("changes", [{"source": "none"}, {"cuts": "flip"}, {"number": OF_WEIGHT}])
def test_only_a_buffer_of_known_tensors_is_looked_at(changes):
    assert state_of(parts(), **changes) is None
