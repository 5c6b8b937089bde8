import job
import pytest

from shardviz.testing import assert_checkpoint_roundtrip, spmd

MESHES = ["fsdp=4", "fsdp=2", "fsdp=1", "fsdp=4"]
WAYS = {"by dcp": (job.save, job.load), "by number": (job.save_by_number, job.load_by_number)}


@spmd(mesh={"fsdp": 4})
@pytest.mark.parametrize("way", WAYS)
def test_training_resumes_on_any_mesh(mesh, way):
    assert_checkpoint_roundtrip(*WAYS[way], job.build, job.adamw, meshes=MESHES)
