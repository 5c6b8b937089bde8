"""Plain tensors with annotations of `spmd_types` claim what they say."""

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn

import shardviz
from shardviz.check.run import check_dump
from shardviz.testing import spmd
from tests.lanes import nightly
from tests.live.claims.test_megatron import layouts_in

pytestmark = nightly
MESH = {"dp": 2, "tp": 2}


@pytest.fixture(autouse=True)
def _needs_spmd_types():
    pytest.importorskip("spmd_types", reason="needs spmd_types: pip install -e '.[frameworks]'")


def annotated(mesh, folder, shift=0, spec=None):
    """Return a model whose weights were cut by hand and annotated, and the checkpoint that they are from."""
    import spmd_types

    torch.manual_seed(0)
    model, path = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), folder.with_name("checkpoint.safetensors")
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
    distributed.barrier()
    mine = (mesh.get_local_rank("tp") + shift) % 2
    for layer, name, dim in ((0, "weight", 0), (0, "bias", 0), (1, "weight", 1), (1, "bias", None)):
        value = getattr(model[layer], name).detach()
        cut = value if dim is None else value.chunk(2, dim)[mine].contiguous()
        setattr(model[layer], name, nn.Parameter(cut))
        along_tp = spmd_types.R if dim is None else spmd_types.S(dim)
        with spmd_types.set_current_mesh(mesh):
            spmd_types.assert_type(getattr(model[layer], name), {"dp": spmd_types.R, "tp": along_tp})
    return model, path


@pytest.mark.parametrize("given", [True, False])
@spmd(mesh=MESH)
def test_annotated_weights_are_in_order_with_the_mesh_given_and_found(mesh, shard_dump, given):
    model, path = annotated(mesh, shard_dump)
    shardviz.capture(model, shard_dump, mesh=mesh if given else None, reference=path)
    report = check_dump(shard_dump)
    assert (report.findings, report.not_checked) == ((), ())
    layouts = layouts_in(shard_dump)
    assert layouts["0.weight"].startswith("[32/tp, 16]")
    assert layouts["1.weight"].startswith("[16, 32/tp]")


@spmd(mesh=MESH)
def test_weights_that_are_not_what_their_annotation_says_are_named(mesh, shard_dump):
    model, path = annotated(mesh, shard_dump, shift=1)
    shardviz.capture(model, shard_dump, mesh=mesh, reference=path)
    found = check_dump(shard_dump).findings
    assert {name for one in found for name in one.tensors} == {"0.weight", "0.bias", "1.weight"}
    assert {one.kind for one in found} == {"misordered"}


@spmd(mesh=MESH)
def test_a_weight_that_varies_without_a_dim_is_not_understood(mesh, shard_dump):
    import spmd_types

    model, path = annotated(mesh, shard_dump)
    model[1].bias = nn.Parameter(torch.randn(16))
    with spmd_types.set_current_mesh(mesh):
        spmd_types.assert_type(model[1].bias, {"dp": spmd_types.R, "tp": spmd_types.V})
    shardviz.capture(model, shard_dump, mesh=mesh, reference=path)
    report = check_dump(shard_dump)
    assert report.findings == ()
    assert [(one.tensor, "spmd_types" in one.why) for one in report.not_checked] == [("1.bias", True)]
