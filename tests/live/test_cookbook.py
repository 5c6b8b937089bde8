"""Every healthy probe on real gloo ranks, at its own mesh and at others: nothing found, everything looked at.

By day most are tried, each on its own mesh, or on the first of the others if that takes more ranks than
`FEW` or the probe is one of `ON_TWO_RANKS`.
"""

import math
from functools import cache

import pytest
import torch

from shardviz import probe_files
from shardviz.check.run import report_on
from shardviz.check.step.comparison import agreement
from shardviz.cli import main
from shardviz.errors import EXIT_USAGE, ProbeError
from shardviz.layout.notation import write
from shardviz.picture.text.report import listed_rows
from tests.lanes import at_night, recorded
from tests.live.probing import run_probe

OTHERS = {
    "checkpoint_dcp": ("1,2", "2,2"),
    "checkpoint_hf": ("1,2", "2,2"),
    "checkpoint_optimizer": ("1,2", "2,2"),
    "collectives": ("1,3", "3,2"),
    "cp": ("2", "3"),
    "ddp": ("2", "3"),
    "ddp_by_hand": ("2", "3"),
    "ep": ("2", "3"),
    "ep_fsdp": ("3,2", "1,3"),
    "fsdp": ("2", "7"),
    "fsdp1_cpu_offload": ("2", "3"),
    "fsdp1_full_shard": ("2", "5"),
    "fsdp1_no_shard": ("2", "3"),
    "fsdp1_shard_grad_op": ("2", "5"),
    "fsdp1_tp": ("3,2", "2,3"),
    "fsdp1_wrap_by_size": ("2", "5"),
    "fsdp1_wrap_transformer": ("2", "5"),
    "fsdp_lora": ("2", "5"),
    "fsdp_meta": ("2", "5"),
    "fsdp_mixed_precision": ("2", "5"),
    "fsdp_nested": ("2", "5"),
    "fsdp_no_reshard": ("2", "5"),
    "fsdp_other_dim": ("2", "3"),
    "hsdp": ("2,2", "2,3", "1,2"),
    "hsdp_fsdp1": ("2,3", "3,2"),
    "hsdp_tp": ("1,3,2", "1,2,3"),
    "mesh": ("3", "pp=2,dp=1,tp=3"),
    "pp_1f1b": ("2", "3"),
    "pp_fsdp_tp": ("2,2,1", "2,1,2", "1,2,2"),
    "pp_gpipe": ("2", "3"),
    "pp_interleaved": ("2", "3"),
    "pp_naive": ("2", "3"),
    "tp": ("2", "5"),
    "tp_embedding": ("2", "5"),
    "tp_fsdp": ("2,2", "3,2", "2,3"),
    "tp_loss": ("2", "5"),
    "tp_product": ("1", "3"),
    "tp_sequence": ("2", "5"),
    "weight_sync": ("1,2", "1,3"),
    "zero1": ("2", "3"),
}
NO_STEP = ("mesh", "checkpoint_dcp", "checkpoint_hf", "checkpoint_optimizer", "weight_sync")
"""Probes of where tensors go, which run no step."""
ON_TWO_RANKS = {
    "ddp",
    "ddp_by_hand",
    "ep",
    "fsdp",
    "fsdp1_cpu_offload",
    "fsdp1_full_shard",
    "fsdp1_no_shard",
    "fsdp1_shard_grad_op",
    "fsdp1_wrap_by_size",
    "fsdp1_wrap_transformer",
    "fsdp_lora",
    "fsdp_meta",
    "fsdp_mixed_precision",
    "fsdp_nested",
    "fsdp_no_reshard",
    "fsdp_other_dim",
    "pp_gpipe",
    "pp_naive",
    "tp",
    "tp_loss",
    "tp_sequence",
}
"""Probes of one axis that two ranks split as four do; the nightly lane tries their own mesh."""
RECORDED = {
    "checkpoint_hf",
    "checkpoint_optimizer",
    "ep_fsdp",
    "fsdp1_cpu_offload",
    "fsdp1_shard_grad_op",
    "fsdp_meta",
    "fsdp_mixed_precision",
    "fsdp_no_reshard",
    "hsdp_fsdp1",
    "mesh",
    "tp_loss",
}
"""Probes of which the contract has the dump; by day it is judged again."""
LIKE_ANOTHER = {
    "fsdp1_no_shard",
    "fsdp1_wrap_by_size",
    "fsdp1_wrap_transformer",
    "fsdp_nested",
    "fsdp_other_dim",
    "hsdp_tp",
    "pp_1f1b",
    "pp_fsdp_tp",
    "pp_naive",
    "tp",
}
"""Probes that differ from one that is tried by day in one argument, or join two such; the nightly lane tries them."""
FEW = 4
NEEDS_GPUS = ("dataparallel",)

REFUSED = {
    ("cp", "5"): "24 pairs of tokens do not divide over cp(5): 24 % 5 = 4",
    ("fsdp_other_dim", "5"): "12 columns do not divide over fsdp(5): 12 % 5 = 2",
    ("pp_gpipe", "9"): "pp(9) * 1 = 9 stages for 8 layers",
    ("tp_embedding", "7"): "30 words over tp(7) make chunks of 5, which leaves 1 of 7 ranks with none",
}


def _healthy():
    own = [probe for probe in probe_files.shipped() if "/" not in probe.name]  # bugs/ and quiet/ have their own tests
    return [probe for probe in own if probe.name not in NEEDS_GPUS]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return what gives the dump of a probe on a mesh, made once for all that only look at it."""
    return cache(lambda probe, mesh: run_probe(probe, mesh, tmp_path_factory.mktemp("cookbook") / "dump"))


def _meshes(probe):
    """Return a probe's own mesh and the others, that of the daily lane first."""
    own, others = [",".join(map(str, probe.mesh))], OTHERS[probe.name]
    is_small = math.prod(probe.mesh) <= FEW and probe.name not in ON_TWO_RANKS
    return [*own, *others] if is_small else [*others, *own]


def _lanes():
    """Return each probe with its mesh of the daily lane or of the contract, then with those of the nightly lane."""
    meshes = [(probe, _meshes(probe)) for probe in _healthy()]
    first = [(probe, each[:1]) for probe, each in meshes]
    return [
        *(case for case in first if case[0].name not in RECORDED | LIKE_ANOTHER),
        *at_night((case for case in first if case[0].name in RECORDED), recorded),
        *at_night(case for case in first if case[0].name in LIKE_ANOTHER),
        *at_night((probe, each[1:]) for probe, each in meshes),
    ]


def _holds_what_it_claims(model):
    for tensor in model.at("stamped"):
        for claimed in filter(None, tensor.claims):  # a plain tensor claims nothing
            assert {rank: shard.held for rank, shard in tensor.shards.items()} == dict(claimed.regions())
    for gathered in (gathered for rank in model.files.ranks.values() for gathered in rank.gathered):
        whole = next(stamp.shape for stamp in model.files.run.stamps if stamp.name == gathered.name)
        assert gathered.held == tuple(((0, size),) for size in whole)
    assert not any(rank.not_checked for rank in model.files.ranks.values())


def test_every_healthy_probe_has_two_meshes_or_more_to_be_tried_on_beside_its_own():
    assert {probe.name for probe in _healthy()} == set(OTHERS)
    assert all(len(meshes) >= 2 for meshes in OTHERS.values())


@pytest.mark.parametrize(
    ("probe", "meshes"), _lanes(), ids=lambda one: " ".join(one) if isinstance(one, list) else one.name
)
def test_a_probe_is_clean_at_its_own_mesh_and_at_others(probe, meshes, ran):
    for mesh in meshes:
        model = ran(probe.name, mesh)
        report = report_on(model)
        assert not report.findings, (mesh, report.findings)
        assert not report.not_checked, (mesh, report.not_checked)
        _holds_what_it_claims(model)
        numbers = agreement(model)
        if probe.name not in NO_STEP:
            assert numbers is not None
            assert numbers.num_right
            assert numbers.loss == pytest.approx(numbers.loss_wanted, rel=2e-2 if "mixed" in probe.name else 1e-12)


@pytest.mark.parametrize(("probe", "mesh"), [("cp", "5"), *at_night(case for case in REFUSED if case[0] != "cp")])
def test_a_mesh_that_torch_cannot_take_is_refused_with_the_arithmetic(probe, mesh, tmp_path):
    with pytest.raises(ProbeError) as caught:
        run_probe(probe, mesh, tmp_path / "dump", alone=True)
    assert caught.value.message.startswith(REFUSED[probe, mesh])
    assert caught.value.hint


@pytest.mark.parametrize("backend", ["mpi", "nccl"])
def test_a_backend_that_cannot_be_had_is_one_line_and_a_hint(backend, tmp_path, capsys):
    mesh = str(torch.cuda.device_count() + 1)  # one rank more than nccl could have a GPU for
    assert main(["probe", "tp", "--mesh", mesh, "--backend", backend, "-o", str(tmp_path / "dump")]) == EXIT_USAGE
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("shardviz: error: ")
    assert backend in error
    assert hint.startswith("Hint: ")
    assert not list(tmp_path.iterdir())


def test_data_parallel_without_gpus_says_what_to_run_instead(tmp_path, capsys):
    assert main(["probe", "dataparallel", "-o", str(tmp_path / "dump")]) == EXIT_USAGE
    error, hint = capsys.readouterr().err.splitlines()
    assert error.endswith("spreads a batch over the GPUs of one process, but this machine has 0")
    assert "shardviz probe ddp" in hint


@pytest.mark.parametrize(("probe", "mesh", "ranks"), [("cp", "4", [0, 1, 2, 3]), ("pp_interleaved", "4", [3])])
def test_the_output_is_compared_with_the_unsharded_models_whole(probe, mesh, ranks, ran):
    model = ran(probe, mesh)
    output = model.find("step", "output", "output")
    assert list(output.shards) == ranks
    assert output.first.body.local_shape == model.find("reference", "output", "output").shape


@recorded
def test_output_tokens_in_another_order_are_a_finding(tmp_path):
    broken = _changed("cp", tmp_path, "return parts[order.argsort()]", "return parts")
    report = report_on(run_probe(broken, "cp=2", tmp_path / "dump"))
    assert [(finding.kind, finding.tensor) for finding in report.findings] == [("misordered", "output")]


def test_a_collective_that_gives_something_else_is_a_finding_with_what_it_is_defined_to_give(tmp_path):
    largest = "distributed.all_reduce(row, op=distributed.ReduceOp.MAX, group=group)"
    broken = _changed("collectives", tmp_path, "distributed.all_reduce(row, group=group)", largest)
    report = report_on(run_probe(broken, "outer=2,inner=2", tmp_path / "dump"))
    (found,) = report.findings
    assert (found.kind, found.ranks) == ("collective-mismatch", (0, 1, 2, 3))
    assert found.tensors == ("inner.all_reduce", "world.all_reduce")
    assert found.summary == (
        "2 tensors, such as inner.all_reduce: all_reduce along inner, over ranks 0, 1, gave "
        "rank 0 [10, 11]; the ranks' inputs give [10, 12]"
    )


@recorded
def test_a_collective_that_is_not_called_at_all_is_a_finding_too(tmp_path):
    broken = _changed("collectives", tmp_path, "distributed.broadcast(row, src=first, group=group)", "pass")
    report = report_on(run_probe(broken, "outer=1,inner=3", tmp_path / "dump"))
    assert [(finding.tensors, finding.ranks) for finding in report.findings] == [
        (("inner.broadcast", "world.broadcast"), (1, 2))
    ]


def _changed(probe, folder, before, after):
    """Return a copy of a probe in which one thing is another."""
    text = probe_files.find(probe).path.read_text()
    assert text.count(before) == 1
    copy = folder / f"{probe}.py"
    copy.write_text(text.replace(before, after))
    return str(copy)


def test_the_collectives_of_a_step_come_with_axis_bytes_and_the_module_whose_unit_makes_them(ran):
    rank = ran("tp_fsdp", "2,2").files.ranks[0]
    seen = {(one.op, one.axes, one.module, one.backward): one.bytes for one in rank.collectives}
    numbers = 24 * 12 + 24 + 12 * 24 + 12
    assert seen == {
        ("all_gather", ("fsdp",), "", False): 2 * _padded(numbers),
        ("all_reduce", ("tp",), "down", False): 60 * 12 * 8,
        ("reduce_scatter", ("fsdp",), "", True): 2 * _padded(numbers),
    }


def _padded(numbers: int) -> int:
    """Bytes in float64 of one fsdp rank's part of what one tp rank has: the row-wise bias is whole there."""
    return (numbers - 12 + 2 * 12) // 4 * 8


def test_the_backward_of_a_last_layer_is_its_own_though_the_model_puts_out_the_same_tensor(ran):
    rank = ran("hsdp", "2,2").files.ranks[0]
    reductions = {(one.op, one.module) for one in rank.collectives if one.op in ("all_reduce", "reduce_scatter")}
    assert reductions == {(op, layer) for op in ("all_reduce", "reduce_scatter") for layer in ("0", "2")}


def test_the_optimizer_state_that_zero_deals_out_is_whole_once(ran):
    model = ran("zero1", "4")
    states = [tensor for tensor in model.at("step") if tensor.role == "optim"]
    assert sorted(name for tensor in states for name in tensor.names) == sorted(
        f"{stamp.name}.{kind}" for stamp in model.files.run.stamps for kind in ("exp_avg", "exp_avg_sq")
    )
    assert all(len(tensor.shards) == 1 for tensor in states)


def test_what_an_optimizer_sends_is_seen_and_is_outside_of_modules(ran):
    rank = ran("zero1", "4").files.ranks[0]
    seen = {(one.op, one.when): one.bytes for one in rank.collectives}
    whole = 8 * (24 * 12 + 24 + 24 * 24 + 24 + 10 * 24 + 10)
    assert seen == {("all_reduce", "backward"): whole, ("broadcast", "outside"): whole}


def test_adams_state_of_a_tensor_whose_gradient_is_whole_is_as_large_as_its_shard(ran):
    model = ran("tp_embedding", "4")
    assert model.find("step", "grad", "by_words.weight").first.body.local_shape == (30, 12)
    assert model.find("step", "optim", "by_words.weight.exp_avg").first.body.local_shape == (8, 12)


def test_the_table_of_a_pipeline_says_which_rank_has_which_layers(ran):
    rows = dict(listed_rows(ran("pp_interleaved", "4"), None))
    assert [rows[f"layers.{layer}.up.bias"].local for layer in range(8)] == [
        f"[24]  on rank {rank}" for rank in (0, 1, 2, 3, 0, 1, 2, 3)
    ]


def test_the_worked_product_gives_the_same_numbers_both_ways(ran):
    model = ran("tp_product", "2")
    numbers = [model.find("step", "scalar", f"product[{index}]").first.body.values for index in range(4)]
    assert numbers == [76, 82, 252, 274]
    contributions = [shard.body.values for shard in model.find("step", "activation", "by_rows").shards.values()]
    assert contributions == [[[10, 11], [82, 91]], [[66, 71], [170, 183]]]


def test_a_schedule_is_what_the_stages_ran(ran):
    ranks = ran("pp_1f1b", "2").files.ranks
    last = [("B" if one.backward else "F") + str(one.microbatch) for one in ranks[1].schedule]
    assert last == [f"{way}{number}" for number in range(8) for way in "FB"]
    assert {one.stage for one in ranks[0].schedule} == {0}


def test_plain_activations_are_placed_by_what_is_in_them(ran):
    model = ran("tp_fsdp", "2,2")
    found = {tensor.name: write(tensor.claimed) for tensor in model.at("step") if tensor.role == "activation"}
    assert found == {"up": "[120/fsdp, 24/tp]", "down": "[120/fsdp, 12]"}
