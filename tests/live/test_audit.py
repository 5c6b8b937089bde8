"""The audit of the installed torch: what it reports is really so, and what is right is not reported.

By day demos/live_bug/README.md runs a whole one, and one of its repros as a command.
"""

import pytest

from shardviz.layout.layout import Layout
from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Partial, Replicate, Shard
from shardviz.live.audit.cases import Case, all_cases, cases_of_functions, is_permuted, repro
from shardviz.live.audit.sweep import audit
from shardviz.live.world import RankFailedError
from tests.lanes import nightly, since_torch
from tests.live.worlds import run

MESH = Mesh(("fsdp", "tp"), (2, 2))


NESTED = Case("redistribute", MESH, (2,), (Shard(0), Shard(0)), (Replicate(), Replicate()), flattened=True)
"""Live in torch 2.13: collectives over both axes are merged into one, as if the shards were one even split."""


@pytest.fixture(scope="module")
def swept():
    return audit(MESH, 2)


@nightly
def test_every_case_is_tried_and_smaller_ones_come_first(swept):
    cases = all_cases(MESH, 2)
    assert (swept.num_cases, swept.not_tried) == (len(cases), 0)
    for operation in {case.operation for case in cases}:
        weights = [case.weight for case in cases if case.operation == operation]
        assert weights == sorted(weights)


@nightly
def test_torch_gathers_uneven_nested_shards_wrongly_over_a_flattened_mesh(swept):
    (one,) = [one for one in swept.disagreements if one.case == NESTED]
    assert one.got == {rank: [1, 0] for rank in range(4)}


@nightly
def test_a_mesh_in_its_usual_order_gives_no_disagreement_without_flattening(swept):
    usual = (one.case for one in swept.disagreements if not is_permuted(one.case.mesh) and not one.case.flattened)
    assert not [case for case in usual if not case.function]


@since_torch(2, 13)
def test_a_repro_runs_by_itself_and_shows_what_the_audit_saw(tmp_path):
    printed = {}
    with pytest.raises(RankFailedError, match="AssertionError: 4 of 4 ranks"):
        run_repro(NESTED, tmp_path, on_output=printed.__setitem__)
    for rank in range(4):
        assert f"rank {rank}: wanted [1, 2], got [1, 0]\n" in printed[rank]


def function_case(function, dim):
    return next(case for case in cases_of_functions(MESH) if (case.function, case.source) == (function, (Shard(dim),)))


@since_torch(2, 13)
def test_a_function_of_dtensors_with_a_wrong_backward_is_found(tmp_path):
    case = function_case("F.mse_loss(x, 0.3 * torch.ones_like(x))", 0)
    printed = {}
    with pytest.raises(RankFailedError, match="a function of a DTensor is not that of the whole tensor"):
        run_repro(case, tmp_path, on_output=printed.__setitem__)
    assert "result is right: True, gradient is right: False\n" in printed[0]
    run_repro(function_case("F.l1_loss(x, 0.3 * torch.ones_like(x))", 0), tmp_path)


@since_torch(2, 13)
@nightly
def test_the_sweep_finds_functions_whose_result_or_gradient_is_wrong(swept):
    got = {one.case.function: set(one.got.values()) for one in swept.disagreements if one.case.function}
    assert got["F.mse_loss(x, 0.3 * torch.ones_like(x))"] == {"its gradient is 4 times that of the whole tensor"}
    assert got["x.cumsum(-1)"] == {"its result is not that of the whole tensor"}
    assert not got.keys() & {"x.softmax(-1)", "x.mean()", "F.l1_loss(x, 0.3 * torch.ones_like(x))", "x.cumsum(0)"}


@nightly
def test_a_repro_of_a_case_that_is_right_passes(tmp_path):
    case = Case("checkpoint", MESH, (3,), (Shard(0), Shard(0)), (Replicate(), Shard(0)))
    run_repro(case, tmp_path)


JOINING = (
    '    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=4)\n',
    "    distributed.destroy_process_group()\n",
)


def run_repro(case, folder, **options):
    """Run a repro's `main` on forked ranks, which have joined a job. demos/live_bug/README.md runs one as a command."""
    script = folder / "repro.py"
    text = repro(case, script.name)
    for line in JOINING:
        assert text.count(line) == 1
        text = text.replace(line, "")
    script.write_text(text)
    run("run_main", str(script), **options)


@pytest.mark.parametrize("case", all_cases(MESH, 3)[::17], ids=str)
def test_every_repro_is_python_that_says_what_is_wanted(case):
    text = repro(case, "repro.py")
    compile(text, "repro.py", "exec")
    if case.function:
        assert case.function in text
        return
    wanted = {rank: case.wanted_ids(rank) for rank in sorted(MESH.ranks)}
    assert f"WANTED = {wanted}" in text
    assert "MASTER_PORT" not in text, "two repros that run at the same time must not share a port"


def test_gathering_wants_the_whole_tensor_everywhere():
    case = Case("gather", MESH, (5,), (Shard(0), Shard(0)), (Shard(0), Shard(0)))
    assert case.wanted_layout == Layout.replicated(MESH, (5,))


PENDING = Case("redistribute", MESH, (5,), (Partial(), Shard(0)), (Shard(0), Replicate()))
"""A reduce-scatter over one axis beside a gather over the other."""


def test_what_ranks_begin_with_under_a_pending_sum_sums_to_the_ids():
    for tp in range(2):
        parts = [PENDING.start(rank) for rank in MESH.ranks if MESH.coord_of(rank)[1] == tp]
        assert parts[0] != parts[1], "a rank that is left out or counted twice shows"
        ids = PENDING.layout(PENDING.source).region((0, tp))
        assert [sum(pair) for pair in zip(*parts, strict=True)] == PENDING.ids(ids)


def test_partial_sources_reduce_scatters_and_flattened_meshes_are_among_the_cases():
    cases = all_cases(MESH, 3)
    assert {(case.operation, case.flattened) for case in cases if Partial() in case.source} == {
        ("gather", False),
        ("gather", True),
        ("redistribute", False),
        ("redistribute", True),
    }
    assert any(case.source == PENDING.source and case.target == PENDING.target for case in cases)
    assert not [case for case in cases if Partial() in case.source and case.operation == "checkpoint"]


def test_a_repro_of_a_pending_sum_gives_every_rank_its_share(tmp_path):
    run_repro(PENDING, tmp_path)
