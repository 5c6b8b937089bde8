"""After one step, offline: what is off is named by the rule that explains it, and rounding is not called wrong."""

import numpy as np
import pytest

from shardviz.check.report import NotChecked
from shardviz.check.step.run import check_step
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, LayoutRecord, MeshRecord, TensorRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.layout.mesh import Mesh

MESH = Mesh(("dp", "tp"), (2, 2))
WANTED = np.array([1.5, -2.0, 0.25, 3.0])


def step_dump(
    path,
    values,
    role="grad",
    placements=("Replicate()", "Replicate()"),
    dtype="float64",
    extra=(),
    narrowed=(),
    shape=None,
):
    """Write a dump whose rank r holds `values[r]` after a step, beside `WANTED` unsharded."""
    record = MeshRecord(MESH.axes, MESH.shape, MESH.ranks)
    folder = prepare_folder(path / "dump")
    write_run(folder, RunRecord(1, "test", "none", MESH.size, mesh=record))
    for rank, held in values.items():
        array = np.asarray(held, np.float64)
        bodies = [
            Body(
                role,
                "step",
                shape or WANTED.shape,
                array.shape,
                dtype,
                layout=0,
                values=[v if v == v else "nan" for v in array.tolist()],
            )
        ]
        tensors = [TensorRecord("w", 0)]
        if rank == 0:
            bodies.append(Body(role, "reference", WANTED.shape, WANTED.shape, "float64", values=WANTED.tolist()))
            tensors.append(TensorRecord("w", 1))
            for name, body in extra:
                tensors.append(TensorRecord(name, len(bodies)))
                bodies.append(body)
        layout = LayoutRecord(0, placements, shape or WANTED.shape)
        write_rank(
            folder,
            RankRecord(
                schema=1,
                rank=rank,
                num_ranks=MESH.size,
                hostname="testhost",
                meshes=(record,),
                layouts=(layout,),
                bodies=tuple(bodies),
                tensors=tuple(tensors),
                narrowed_to=narrowed,
            ),
        )
    return dump_of(read_files(folder))


def on_all(values):
    return dict.fromkeys(range(MESH.size), values)


def test_gradients_that_are_the_unsharded_models_give_no_finding(tmp_path):
    assert list(check_step(step_dump(tmp_path, on_all(WANTED)), [])) == []


def test_rounding_in_another_order_of_sums_is_not_called_wrong(tmp_path):
    rounded = WANTED * (1 + 4 * np.finfo(np.float64).eps)
    assert list(check_step(step_dump(tmp_path, on_all(rounded)), [])) == []


def test_low_precision_is_given_its_own_rounding_and_no_more(tmp_path):
    near = step_dump(tmp_path / "near", on_all(WANTED * (1 + 2.0**-8)), dtype="bfloat16")
    far = step_dump(tmp_path / "far", on_all(WANTED * 2), dtype="bfloat16")
    assert list(check_step(near, [])) == []
    assert [finding.kind for finding in check_step(far, [])] == ["wrong-scale"]


def test_a_step_that_rounds_to_a_narrower_dtype_within_is_given_that_rounding_and_no_more(tmp_path):
    off = WANTED * (1 + 2.0**-22)
    inside = step_dump(tmp_path / "inside", on_all(off), narrowed=("float32",))
    nowhere = step_dump(tmp_path / "nowhere", on_all(off))
    far = step_dump(tmp_path / "far", on_all(WANTED * 1.001), narrowed=("float32",))
    assert list(check_step(inside, [])) == []
    assert [found.kind for found in check_step(nowhere, [])] == ["wrong-value"]
    assert [found.kind for found in check_step(far, [])] == ["wrong-value"]


def test_a_bfloat16_step_of_large_tensors_still_shows_a_factor_of_two(tmp_path):
    large = Body("param", "reference", (1000, 1000), (1000, 1000), "float64", values=None)
    near = step_dump(tmp_path / "near", on_all(WANTED * (1 + 2.0**-5)), narrowed=("bfloat16",), extra=[("w0", large)])
    far = step_dump(tmp_path / "far", on_all(WANTED * 2), narrowed=("bfloat16",), extra=[("w0", large)])
    assert list(check_step(near, [])) == []
    assert [found.kind for found in check_step(far, [])] == ["wrong-scale"]


def test_gradients_that_drown_in_a_narrow_dtypes_rounding_are_reported_as_unchecked(tmp_path):
    other = Body("grad", "reference", (1,), (1,), "float64", values=[1000.0])
    said = check_step(step_dump(tmp_path, on_all(WANTED), narrowed=("bfloat16",), extra=[("w0", other)]), [])
    assert NotChecked("", "1 of 1 gradients: rounding to bfloat16 allows 125, and they are no larger", "step") in said


def test_an_output_of_another_shape_than_the_unsharded_models_is_a_wrong_shape(tmp_path):
    half = step_dump(tmp_path, on_all(WANTED[:2]), role="output", shape=(2,))
    (finding,) = check_step(half, [])
    assert (finding.kind, finding.tensor) == ("wrong-shape", "w")
    assert finding.summary == "the output is [2] over all ranks, the unsharded model's is [4]"


def test_copies_that_differ_along_an_axis_are_unreduced_and_their_mean_is_recognized(tmp_path):
    apart = np.array([0.5, -0.5, 0.25, 0.0])
    values = {0: WANTED + apart, 1: WANTED + apart, 2: WANTED - apart, 3: WANTED - apart}
    (finding,) = check_step(step_dump(tmp_path, values), [])
    assert finding.kind == "unreduced-gradient"
    apart, whole = finding.summary.split("; ")
    assert apart == "the gradient differs along dp: rank 0 and rank 2 are up to 1 apart"
    assert whole == "their mean over dp is the unsharded model's"
    assert finding.held == "each rank's own part (+dp:avg)"
    assert "ReduceOp.AVG" in finding.fix


def test_a_pending_sum_that_is_labeled_partial_is_no_finding(tmp_path):
    part = np.array([1.0, 1.0, 1.0, 1.0])
    values = {0: part, 1: WANTED - part, 2: part, 3: WANTED - part}
    assert list(check_step(step_dump(tmp_path, values, placements=("Replicate()", "Partial()")), [])) == []


def test_shards_of_a_gradient_are_compared_with_their_own_part(tmp_path):
    right = {0: WANTED[:2], 1: WANTED[2:], 2: WANTED[:2], 3: WANTED[2:]}
    swapped = {0: WANTED[2:], 1: WANTED[:2], 2: WANTED[2:], 3: WANTED[:2]}
    placements = ("Replicate()", "Shard(0)")
    assert list(check_step(step_dump(tmp_path / "a", right, placements=placements), [])) == []
    (finding,) = check_step(step_dump(tmp_path / "b", swapped, placements=placements), [])
    assert (finding.kind, finding.cause_id) == ("misordered", "part-of-another-rank")


@pytest.mark.parametrize(
    ("ratio", "says"),
    [
        (2.0, "the gradient is 2 times the unsharded model's, the size of dp or tp"),
        (4.0, "the gradient is 4 times the unsharded model's, the size of dp * tp"),
        (0.5, "the gradient is 1/2 of the unsharded model's, 1 over the size of dp or tp"),
        (0.25, "the gradient is 1/4 of the unsharded model's, 1 over the size of dp * tp"),
    ],
)
def test_a_ratio_is_named_with_the_axes_whose_size_it_is(tmp_path, ratio, says):
    (finding,) = check_step(step_dump(tmp_path, on_all(WANTED * ratio)), [])
    assert (finding.kind, finding.summary) == ("wrong-scale", says)


def test_a_value_that_no_ratio_explains_is_wrong_and_says_how_far(tmp_path):
    (finding,) = check_step(step_dump(tmp_path, on_all(WANTED + np.array([0, 0, 0, 1.0]))), [])
    assert finding.kind == "wrong-value"
    assert finding.summary.startswith("the gradient is off by up to 1 on rank 0 (largest value 3, rounding allows")
    assert finding.summary.endswith(": 1 of 4 elements, the first at [3]")


def test_nan_is_never_near_to_what_is_wanted(tmp_path):
    (finding,) = check_step(step_dump(tmp_path, on_all([np.nan, 1.0, 1.0, 1.0])), [])
    assert finding.kind == "wrong-value"
    assert "NaN or infinite in 1 of 4 elements" in finding.summary


def test_logged_values_that_are_each_ranks_own_are_unreduced_scalars(tmp_path):
    part = np.array([1.0, 1.0, 1.0, 1.0])
    values = {0: part, 1: WANTED - part, 2: part, 3: WANTED - part}
    (finding,) = check_step(step_dump(tmp_path, values, role="scalar"), [])
    assert finding.kind == "unreduced-scalar"
    assert finding.summary.endswith("their sum over tp is the unsharded model's value")


def test_a_bias_that_every_rank_adds_is_named_with_how_often(tmp_path):
    bias = np.array([0.5, 1.0, -1.0, 2.0])
    body = Body("param", "reference", bias.shape, bias.shape, "float64", values=bias.tolist())
    dump = step_dump(tmp_path, on_all(WANTED + 3 * bias), role="output", extra=[("out.bias", body)])
    (finding,) = check_step(dump, [])
    assert (finding.kind, finding.tensor) == ("wrong-scale", "out.bias")
    assert finding.summary == ("the output has out.bias added 4 times, once on every rank of dp * tp")


def test_a_model_with_a_vector_that_is_not_finite_is_judged(tmp_path):
    body = Body("param", "reference", (4,), (4,), "float64", values=[0.5, "nan", -1.0, "inf"])
    dump = step_dump(tmp_path, on_all(WANTED + 3), role="output", extra=[("out.bias", body)])
    assert [one.kind for one in check_step(dump, [])] == ["wrong-value"]


def test_a_mean_over_a_group_with_a_rank_missing_is_not_judged(tmp_path):
    values = {0: WANTED + 1, 1: WANTED - 1, 3: WANTED - 1}
    dump = step_dump(tmp_path, values, placements=("Replicate()", "Partial('avg')"))
    assert list(check_step(dump, [])) == []


def test_without_rank_0_there_is_no_reference_and_that_is_reported(tmp_path):
    values = {1: WANTED, 2: WANTED, 3: WANTED}
    (said,) = check_step(step_dump(tmp_path, values), [])
    assert said.why == "the step: rank 0, which has the unsharded model's, is missing"


def test_a_pending_reduction_that_cannot_be_made_up_for_is_reported(tmp_path):
    (said,) = check_step(step_dump(tmp_path, on_all(WANTED), placements=("Replicate()", "Partial('band')")), [])
    assert said.why == "its grad: shardviz cannot make up for a pending band"


def test_a_gradient_that_no_rank_has_is_reported_as_unchecked(tmp_path):
    other = Body("grad", "reference", (2,), (2,), "float64", values=[1.0, 2.0])
    (said,) = check_step(step_dump(tmp_path, on_all(WANTED), extra=[("gone", other)]), [])
    assert (said.tensor, said.about) == ("gone", "step")
    assert said.why == "its gradient: .grad is None on every rank after the step"


def test_unreduced_over_two_axes_the_fix_names_a_call_for_each(tmp_path):
    apart = [np.array([0.5, 0, 0, 0]), np.array([0, 0.5, 0, 0]), np.array([0, 0, 0.5, 0])]
    values = {0: WANTED + sum(apart), 1: WANTED - apart[0], 2: WANTED - apart[1], 3: WANTED - apart[2]}
    (finding,) = check_step(step_dump(tmp_path, values), [])
    assert finding.kind == "unreduced-gradient"
    assert "group=mesh.get_group('dp')" in finding.fix
    assert "group=mesh.get_group('tp')" in finding.fix
