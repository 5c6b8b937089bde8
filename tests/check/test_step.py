"""After one step, offline: what is off is named by the rule that explains it, and rounding is not called wrong."""

import numpy as np

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


def test_a_model_with_a_vector_that_is_not_finite_is_judged(tmp_path):
    body = Body("param", "reference", (4,), (4,), "float64", values=[0.5, "nan", -1.0, "inf"])
    dump = step_dump(tmp_path, on_all(WANTED + 3), role="output", extra=[("out.bias", body)])
    assert [one.kind for one in check_step(dump, [], {})] == ["wrong-value"]
