"""Jobs whose ranks draw weights from a seed of their own: what can be told of them, and what cannot."""

from tests.lanes import nightly
from tests.live.run.jobs import ON_FOUR, ON_TWO_RANKS, run

OWN_SEED = "torch.manual_seed(rank)\n"

HSDP = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
model = build()
fully_shard(model, mesh=mesh)
train(model)
"""


@nightly
def test_weights_drawn_from_a_seed_per_rank_are_explained_and_no_finding(tmp_path):
    ran = run(tmp_path, OWN_SEED + ON_TWO_RANKS + "train(model)\n")
    assert ran.code == 2, ran.err
    report = ran.report()
    assert report.findings == ()
    drawn = {name for name, (why, *_) in report.why_not_checked.items() if "or with one per rank" in why}
    assert drawn == {"0.weight", "0.bias", "2.weight", "2.bias"}, "those of LayerNorm are ones and zeros"
    assert "seed or load alike on all ranks" in " ".join(ran.out.split())


@nightly
def test_copies_drawn_from_a_seed_per_rank_are_a_finding(tmp_path):
    ran = run(tmp_path, OWN_SEED + HSDP, command=ON_FOUR)
    assert ran.code == 1, ran.err
    assert {(one.kind, one.tensor) for one in ran.report().findings} == {("unreplicated", "0.weight")}
    assert "copies differ along dp from the start" in ran.out
