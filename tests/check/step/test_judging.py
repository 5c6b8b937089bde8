"""What the judge of steps says ranks have of a whole tensor: splits, terms, what looks like terms, and noise."""

import numpy as np

from shardviz.check.step.trace.judging import Judging, Noise
from shardviz.check.step.trace.traces import Kept, Point
from shardviz.dump.records.trace import Place
from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Partial, Replicate

MESH = Mesh(("dp", "tp"), (2, 2))
WHOLE = np.sin(np.arange(24.0).reshape(4, 6))
OUT = Place("layer", 0, "output", 0)


def point(values, dtype="float64"):
    kept = None if values is None else Kept.of(values.shape, np.asarray(values, np.float64), dtype)
    return Point(kept, needs_grad=True, tensor=0, order=0, type="Linear")


def judged(parts, whole=WHOLE, noise=None, dtype="float64"):
    ranks = {rank: {OUT: point(values, dtype)} for rank, values in parts.items()}
    return Judging({OUT: point(whole, dtype)}, ranks, MESH, noise).judgments[OUT]


def terms(split):
    first = WHOLE * split
    return {rank: first if rank % 2 == 0 else WHOLE - first for rank in MESH.ranks}


def test_all_of_it_on_one_rank_and_zeros_on_the_other_are_terms():
    assert judged(terms(1.0)).layout == (Replicate(), Partial("sum"))


def test_measured_noise_says_how_far_a_point_may_be_off_at_most_and_on_the_whole():
    one_moved = WHOLE + np.where(np.arange(24).reshape(4, 6) == 0, 1e-3, 1e-5)
    noise = Noise({OUT: point(one_moved)}, 1e-6)
    one_off, all_off = WHOLE.copy(), WHOLE + 1e-3
    one_off[0, 0] += 3e-3
    assert judged(dict.fromkeys(MESH.ranks, one_off), noise=noise).layout is None, (
        "an element within four times the noise, the root of the mean square not within twice"
    )
    one_off[0, 0] -= 2e-3
    assert judged(dict.fromkeys(MESH.ranks, one_off), noise=noise).state[0] == "right"
    assert judged(dict.fromkeys(MESH.ranks, all_off), noise=noise).layout is None
    assert judged(dict.fromkeys(MESH.ranks, one_off)).state[0] == "odd", "without noise, float64 is exact"


def skipped_in(**calls):
    """Judge ranks that lack calls of the whole; return what each place says that no rank calls.

    Args:
        calls: What ranks are given, by module.
    """
    stages = [WHOLE * number for number in (1, 2, 3)]
    places = {Place(name, 0, "input", 0): values for name, values in zip(("a", "b", "c"), stages, strict=True)}
    whole = {place: point(values) for place, values in places.items()}
    ranks = {rank: {Place(name, 0, "input", 0): point(values) for name, values in calls.items()} for rank in MESH.ranks}
    return {record.module: record.skipped for record in Judging(whole, ranks, MESH).records(0) if record.skipped}


def test_a_module_that_no_rank_calls_is_named_where_its_input_goes():
    assert skipped_in(a=WHOLE, c=2 * WHOLE) == {"c": "b"}
    assert not skipped_in(a=WHOLE, c=5 * WHOLE), "that is not its input"
    assert not skipped_in(a=WHOLE, b=3 * WHOLE, c=2 * WHOLE), "ranks call it"
    assert not skipped_in(a=WHOLE, c=3 * WHOLE), "what ranks call in its place is right"


def test_a_module_that_no_rank_calls_is_named_at_the_gradient_of_what_it_alone_reads():
    given, back, read = OUT._replace(module="last", what="input"), OUT._replace(what="gradient of output"), WHOLE * 2
    whole = {OUT: point(WHOLE), given: point(WHOLE), back: point(read)}
    own = {OUT: point(WHOLE), back: point(WHOLE**2)}
    by_fused = own | {given._replace(module="fused"): point(WHOLE)}
    for points, skipped in ((own, "last"), (by_fused, "")):
        records = Judging(whole, dict.fromkeys(MESH.ranks, points), MESH).records(0)
        assert [record.skipped for record in records if record.what == back.what] == [skipped]


def test_one_number_a_row_stands_where_the_rows_did_that_it_is_made_of():
    places = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    result = Place("layer", 0, "output", 1)
    numbers = np.array([[0.5], [0.25], [-1.0], [2.0]])
    whole = {OUT: point(WHOLE), result: point(numbers)}

    def state(**wrong):
        rows = {rank: numbers[wrong.get(f"rank{rank}", at)] for rank, at in places.items()}
        ranks = {rank: {OUT: point(WHOLE[at]), result: point(rows[rank])} for rank, at in places.items()}
        return Judging(whole, ranks, MESH).judgments[result].state[0]

    assert state() == "moved"
    assert state(rank0=[2, 0]) == "odd", "in another order than the rows"
