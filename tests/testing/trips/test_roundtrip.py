"""Round trips of checkpoints on real ranks: quiet where all is right, and what they say where it is not."""

from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from shardviz.errors import MeshError, ShardvizError
from shardviz.testing import ShardAssertionError, assert_checkpoint_roundtrip, spmd
from tests.lanes import nightly, since_torch
from tests.testing.trips import jobs

FROM_TWO_TO_TWO = ["fsdp=2", "fsdp=2"]
DAILY = {
    "by dcp": (jobs.save_dcp, jobs.load_dcp, jobs.fsdp, jobs.adam, ["fsdp=2", "fsdp=1", "fsdp=2"]),
    "by rank": (jobs.save_own, jobs.load_own, jobs.by_hand, jobs.adam, ["tp=2"]),
}
RIGHT = {
    "adam": (jobs.save_dcp, jobs.load_dcp, jobs.fsdp, jobs.adam, ["fsdp=4", "fsdp=3", "fsdp=1"]),
    "fused": (jobs.save_dcp, jobs.load_dcp, jobs.fsdp, jobs.fused, ["fsdp=4", "fsdp=2"]),
    "sgd": (jobs.save_dcp, jobs.load_dcp, jobs.fsdp, jobs.sgd, ["fsdp=4", "fsdp=2"]),
    "momentum": (jobs.save_dcp, jobs.load_dcp, jobs.fsdp, jobs.momentum, ["fsdp=4", "fsdp=2"]),
    "whole": (jobs.save_whole, jobs.load_whole, jobs.fsdp, jobs.adam, ["fsdp=4", "fsdp=2", "fsdp=1"]),
    "by rank": (jobs.save_own, jobs.load_own, jobs.fsdp, jobs.adam, ["fsdp=4"]),
    "safetensors": (jobs.save_weights, jobs.load_weights, jobs.fsdp, None, ["fsdp=4", "fsdp=2"]),
    "sent by rank 0": (jobs.save_weights, jobs.load_sent, jobs.fsdp, None, ["fsdp=4", "fsdp=2"]),
    "hugging face": (jobs.save_hf, jobs.load_hf, jobs.experts, None, ["ep=4", "ep=2"]),
    "hsdp": (jobs.save_dcp, jobs.load_dcp, jobs.fsdp, jobs.adam, ["replicate=2,shard=2", "replicate=1,shard=4"]),
    "tp": (jobs.save_dcp, jobs.load_dcp, jobs.tp, jobs.adam, ["fsdp=2,tp=2", "fsdp=4,tp=1", "fsdp=1,tp=2"]),
    "ep": (jobs.save_dcp, jobs.load_dcp, jobs.experts, jobs.adam, ["ep=4", "ep=2", "ep=1"]),
    "pp": (jobs.save_dcp, jobs.load_dcp, jobs.stages, jobs.adam, ["pp=2,dp=2", "pp=4,dp=1", "pp=1,dp=4"]),
    "offloaded": (jobs.save_dcp, jobs.load_dcp, jobs.offloaded, jobs.adam, ["fsdp=4", "fsdp=2"]),
    "new model": (jobs.save_dcp, jobs.load_into_new, jobs.fsdp, jobs.adam, ["fsdp=4", "fsdp=2"]),
}
BROKEN = {
    jobs.nothing: ("embed.weight", "the load did not write it on 2 of 2 ranks", "wrote into copies"),
    jobs.not_on_one_rank: ("embed.weight", "did not write it on 1 of 2 ranks", "wrong: embed.weight rank 1 rows 8-15"),
    jobs.not_one_tensor: ("mid.weight", "rank 0 rows 0-11, rank 1 rows 12-22", "missing or renamed"),
    jobs.not_some_rows: ("mid.weight", "did not write 92 of 529 elements", "rank 0 rows 2-3, rank 1 rows 14-15"),
    jobs.no_buffers: ("mask", "norm.running_mean", "leaves out the buffers"),
    jobs.neighbors_moment: ("embed.weight exp_avg", "fsdp=i holds the shard of fsdp=1-i", "rank 0 rows 0-7"),
    jobs.moments_exchanged: ("embed.weight exp_avg", "exp_avg_sq", "of one parameter changed places"),
    jobs.state_by_order: ("mid.weight exp_avg", "the values of other.weight exp_avg", "by position"),
    jobs.no_step: ("embed.weight step", "it is 0 after the load, and was saved as 1024", "bias correction"),
    jobs.no_optimizer: ("embed.weight exp_avg", "has no such state after the load", "lr"),
    jobs.no_settings: ("embed.weight lr", "it is 0.001 after the load, and was saved as 0.00096875", "setting"),
    jobs.untied: ("head.weight", "it shared storage with embed.weight before the load", "assign=True"),
    jobs.assigned: ("param_groups[0][0]", "steps 11 tensors that no longer belong to the model", "head.weight"),
    jobs.through_bfloat16: ("embed.weight", "rounded to bfloat16", "in bfloat16, and cast back"),
    jobs.moments_in_bfloat16: (
        "embed.weight exp_avg",
        "its dtype changed to bfloat16 on 2 of 2 ranks in the load",
        "cast",
    ),
    jobs.no_second_moment: ("embed.weight exp_avg_sq", "it has zeros on 2 of 2 ranks", "made or reset"),
    jobs.first_rank_everywhere: ("embed.weight", "every rank along fsdp holds the shard of fsdp=0", "rank 1 rows 8-15"),
    jobs.some_flags: ("mask", "4 of 18 elements are not those of what was saved", "rank 0 rows 3-4, rank 1 rows 3-4"),
    jobs.in_rank_order: ("embed.weight", "fsdp=i holds the shard of fsdp=1-i", "torch.distributed.checkpoint"),
}
BROKEN |= {
    jobs.doubled: ("embed.weight exp_avg", "every value of it is 2 times that of what was sent", "multiply by 0.5"),
    jobs.rows_backwards: ("mid.weight", "within every shard, dim 0 is reversed", "rank 0 rows 0-11"),
    jobs.columns_rolled: ("mid.weight", "dim 1 is rolled by 1", "rank 1 rows 12-22"),
    jobs.names_exchanged: ("mid.weight", "it has the values of other.weight", "never by position"),
    jobs.zeros_on_one_rank: ("mid.bias", "it has zeros on 1 of 2 ranks", "rank 1 rows 12-22"),
    jobs.roots_of_squares: (
        "embed.weight exp_avg_sq",
        "none of the elements held is in what was sent",
        "computed the values on the way",
    ),
    jobs.one_step_less: ("embed.weight step", "it is 1023 after the load, and was saved as 1024", "bias correction"),
    jobs.other_betas: ("embed.weight betas[0]", "it is 0.9 after the load", "leave 'setting' out"),
    jobs.variance_reset: ("norm.running_var", "all of its values are 1 on 2 of 2 ranks", "made or reset"),
    jobs.count_reset: ("norm.num_batches_tracked", "it has zeros on 2 of 2 ranks", "made or reset"),
    jobs.one_nan: ("mid.weight", "of the 529 elements held, 1 is not in what was sent", "rank 0 rows 0, columns 0"),
    jobs.thawed: ("other.bias", "it was frozen before the load, and is not now", "requires_grad"),
    jobs.through_float16: ("embed.weight", "rounded to float16", "in float16, and cast back"),
    jobs.without_a_bias: ("other.bias", "has no such tensor after the load", "with the same modules"),
    jobs.longer_mask: ("mask", "its shape is [18], not [9], on 2 of 2 ranks", "one rank's part for the whole"),
    jobs.state_of_one_lost: ("embed.weight exp_avg", "has no such state after the load", "by parameter"),
}
OFTEN = (jobs.not_some_rows, jobs.moments_exchanged, jobs.no_step)


def text_of(*args, **options):
    with pytest.raises(ShardAssertionError) as caught:
        assert_checkpoint_roundtrip(*args, **options)
    return str(caught.value)


def check_broken(loads):
    for load in loads:
        text = text_of(jobs.save_dcp, load, jobs.fsdp, jobs.adam, meshes=FROM_TWO_TO_TWO)
        first, *others = BROKEN[load]
        assert text.startswith(first), (load.__name__, text)
        assert all(part in text for part in others), (load.__name__, text)
        assert "saved on (fsdp=2), loaded on (fsdp=2)" in text


@spmd(mesh={"fsdp": 2}, timeout=240)
def test_right_round_trips_are_quiet_and_look_at_everything(mesh):
    done = assert_checkpoint_roundtrip(*DAILY["by dcp"][:4], meshes=DAILY["by dcp"][4])
    assert (done.compared, done.on_disk, done.not_checked) == (72, 72, ())
    done = assert_checkpoint_roundtrip(*DAILY["by rank"][:4], meshes=DAILY["by rank"][4])
    assert done.compared == 6
    assert done.not_checked == ("what is on disk: the folder has 0.pt, 1.pt, each a whole checkpoint or a part of one",)


@spmd(mesh={"fsdp": 2}, timeout=240)
def test_a_broken_load_is_named_by_parameter_rank_and_rows(mesh):
    check_broken(OFTEN)


@spmd(mesh={"tp": 2})
def test_a_file_that_another_rank_saved_is_named(mesh):
    text = text_of(jobs.save_own, jobs.load_of_another_rank, jobs.by_hand, jobs.adam, meshes=["tp=2"])
    assert text.startswith("cut: 32 of 32 elements"), text
    assert "these ranks read the file of another rank" in text


@nightly
@spmd(mesh={"fsdp": 2}, timeout=600)
@pytest.mark.parametrize("part", range(3))
def test_every_broken_load_is_named_by_parameter_rank_and_rows(mesh, part):
    check_broken([load for load in BROKEN if load not in OFTEN][part::3])


@nightly
@spmd(mesh={"rank": 4}, timeout=600)
@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_is_quiet(mesh, case):
    *how, meshes = RIGHT[case]
    assert assert_checkpoint_roundtrip(*how, meshes=meshes).compared


@nightly
@spmd(mesh={"rank": 8}, timeout=900)
def test_adams_moments_are_exact_over_six_pairs_of_meshes(mesh):
    meshes = ["fsdp=2,tp=4", "fsdp=4,tp=2", "fsdp=8,tp=1", "fsdp=1,tp=1", "fsdp=1,tp=3", "fsdp=3,tp=2", "fsdp=2,tp=4"]
    done = assert_checkpoint_roundtrip(jobs.save_dcp, jobs.load_dcp, jobs.tp, jobs.adam, meshes=meshes)
    assert (done.compared, done.on_disk, done.not_checked) == (6 * 36, 6 * 36, ())


@spmd(mesh={"fsdp": 2})
def test_an_export_and_an_import_whose_mistakes_cancel_out_are_caught_on_disk(mesh):
    text = text_of(jobs.save_turned, jobs.load_turned, jobs.fsdp, meshes=FROM_TWO_TO_TWO)
    assert text.startswith("embed.weight, head.weight: 2 tensors alike: on disk, dim 1's halves are exchanged; saved")
    assert "A load with the same mistake in reverse would hide it" in text
    done = assert_checkpoint_roundtrip(
        jobs.save_turned, jobs.load_turned, jobs.fsdp, meshes=FROM_TWO_TO_TWO, of=("param", "buffer")
    )
    assert done.on_disk == 0


@spmd(mesh={"fsdp": 2})
def test_a_model_that_is_already_built_comes_back_on_its_own_mesh(mesh):
    model = jobs.fsdp(mesh)
    optimizer = jobs.adam(model)
    assert assert_checkpoint_roundtrip(jobs.save_dcp, jobs.load_dcp, model, optimizer).compared == 36
    assert text_of(jobs.save_dcp, jobs.no_settings, model, optimizer).startswith("embed.weight lr")
    with pytest.raises(ShardvizError, match="already built is on one mesh, and 2 were given"):
        assert_checkpoint_roundtrip(jobs.save_dcp, jobs.load_dcp, model, optimizer, meshes=FROM_TWO_TO_TWO)


@spmd(mesh={"fsdp": 2})
def test_what_cannot_be_done_or_checked_is_one_line_and_a_hint(mesh):
    with pytest.raises(MeshError, match="has 3 ranks, this job has 2"):
        assert_checkpoint_roundtrip(jobs.save_dcp, jobs.load_dcp, jobs.fsdp, meshes=["fsdp=3"])
    with pytest.raises(ShardvizError, match="returned a NoneType"):
        assert_checkpoint_roundtrip(jobs.save_dcp, jobs.load_dcp, lambda mesh: None)
    assert "nothing of the checkpoint could be compared" in text_of(
        jobs.save_weights, jobs.load_weights, lambda mesh: nn.ReLU()
    )
    text = text_of(jobs.save_own, jobs.load_own, jobs.fsdp, jobs.adam, strict=True)
    assert text.startswith("1 thing could not be checked, and strict=True requires all")


@nightly
@spmd(mesh={"rank": 4}, timeout=120)
@pytest.mark.parametrize("meshes", [["rank=2", "rank=4"], ["rank=1", "rank=1"], ["rank=4", "rank=2"]], ids=str)
@pytest.mark.parametrize("at", ["save", "load"])
def test_what_raises_on_one_rank_of_a_mesh_is_raised_on_every_rank_of_the_job(mesh, meshes, at):
    check_raised(meshes, at)


@spmd(mesh={"fsdp": 2}, timeout=120)
def test_no_rank_waits_for_one_whose_save_or_load_raised(mesh):
    check_raised(["fsdp=1", "fsdp=2"], "save")
    check_raised(["fsdp=2", "fsdp=1"], "load")


def check_raised(meshes, at):
    ways = {"save": jobs.save_dcp, "load": jobs.load_dcp, at: jobs.raise_on_one_rank}
    with pytest.raises((OSError, ShardvizError), match="the disk is full"):
        assert_checkpoint_roundtrip(ways["save"], ways["load"], jobs.fsdp, jobs.adam, meshes=meshes)
    distributed.barrier()
    assert assert_checkpoint_roundtrip(jobs.save_dcp, jobs.load_dcp, jobs.fsdp, jobs.adam, meshes=["rank=1"]).compared


@since_torch(2, 9)
@spmd(mesh={"fsdp": 2}, timeout=120)
def test_tied_weights_that_a_writer_refuses_are_an_error_in_words_and_no_wait(mesh):
    """torch 2.13's Hugging Face writer gives tied weights to safetensors, which refuses tensors that share memory."""
    for meshes in (["fsdp=2"], ["fsdp=1", "fsdp=2"]):
        with pytest.raises(
            ShardvizError, match=r"RuntimeError: Some tensors share memory.*\{'(head|embed).weight'"
        ) as caught:
            assert_checkpoint_roundtrip(jobs.save_hf, jobs.load_hf, jobs.fsdp, meshes=meshes)
        assert caught.value.hint.startswith("save only one of the tied weights")


@spmd(mesh={"fsdp": 2})
def test_names_say_what_an_export_calls_tensors_on_disk(mesh):
    how = jobs.save_renamed, jobs.load_renamed, jobs.fsdp
    done = assert_checkpoint_roundtrip(*how, meshes=FROM_TWO_TO_TWO, names={"*": "model.*"}, strict=True)
    assert done.on_disk == done.compared
    astray = assert_checkpoint_roundtrip(*how, meshes=FROM_TWO_TO_TWO, names={"embed.*": "encoder.*"})
    assert astray.on_disk < done.on_disk
    assert any("encoder.weight" in note for note in astray.not_checked)


@spmd(mesh={"fsdp": 2})
def test_a_folder_that_is_given_keeps_what_was_saved(mesh, tmp_path):
    given = [str(tmp_path / "new")]
    distributed.broadcast_object_list(given, src=0)
    done = assert_checkpoint_roundtrip(
        jobs.save_dcp, jobs.load_dcp, jobs.fsdp, jobs.adam, meshes=[*FROM_TWO_TO_TWO, "fsdp=1"], folder=given[0]
    )
    assert done.compared == 72
    assert sorted(one.name for one in Path(given[0]).glob("trip-*")) == ["trip-0", "trip-1"]
    assert (Path(given[0]) / "trip-1" / ".metadata").is_file()


@spmd(mesh={"fsdp": 2})
def test_hyperparameters_may_be_left_out(mesh):
    of = ("param", "buffer", "optim")
    assert_checkpoint_roundtrip(jobs.save_dcp, jobs.no_settings, jobs.fsdp, jobs.adam, of=of)


def test_without_ranks_it_says_how_to_get_them():
    with pytest.raises(ShardvizError, match="no process group") as caught:
        assert_checkpoint_roundtrip(jobs.save_dcp, jobs.load_dcp, torch.nn.Linear(2, 2))
    assert "@spmd" in str(caught.value)
