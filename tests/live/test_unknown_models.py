"""Correct models of kinds that no shipped probe has: nothing is found, and what is compared in another way is said."""

import re

import pytest

from shardviz.check.run import report_on
from shardviz.cli import main
from shardviz.picture.text.report import listed_rows
from tests.lanes import recorded
from tests.live.probing import HEAD, checked, run_probe


@recorded
def test_a_divide_factor_over_a_group_of_one_counts_once_as_in_the_models_own_float32(tmp_path):
    expert = """
BATCH_AXES = ()
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"])
    model.set_gradient_divide_factor(2.0)
def step(model, rows, mesh):
    loss = model(rows).square().mean()
    (loss * {scale}).backward()
    return loss
"""
    assert checked(expert.format(scale=2), "dp=1,ep=2", tmp_path / "right").findings == ()
    wrong = checked(expert.format(scale=4), "dp=1,ep=2", tmp_path / "wrong")
    assert {finding.kind for finding in wrong.findings} == {"wrong-scale"}


def test_an_optimizer_that_raises_takes_nothing_from_what_is_known_of_the_step(tmp_path):
    failing = """
class Failing(torch.optim.SGD):
    def step(self): raise RuntimeError("no such state")
def optimizer(model, mesh): return Failing(model.parameters(), lr=0.1)
def step(model, rows, mesh):
    loss = model(rows).square().mean()
    (2 * loss).backward()
    return loss
"""
    report = checked(failing, "dp=2", tmp_path)
    assert {finding.kind for finding in report.findings} == {"wrong-scale"}
    (entry,) = report.not_checked
    assert re.fullmatch(r"the optimizer: rank 0 raised RuntimeError in step \(\w+\.py:\d+\): no such state", entry.why)


@recorded
def test_outputs_of_models_that_ran_more_often_unsharded_are_not_laid_side_by_side(tmp_path):
    twice = """
def loss(model, rows):
    views = [rows, rows] if len(rows) == 12 else [rows]
    return torch.stack([model(view).square().mean() for view in views]).mean()
"""
    report = checked(twice, "dp=2", tmp_path)
    assert report.findings == ()
    assert [entry.why for entry in report.not_checked] == [
        "the output: the model ran 1 times per step, but the unsharded model ran 2 times"
    ]


def test_outputs_of_a_model_that_ran_on_halves_unsharded_are_joined_and_compared(tmp_path):
    halves = """
class Flipping(nn.Linear):
    is_split = False
    def forward(self, rows):
        output = super().forward(rows)
        return output.flip(0) if self.is_split and {flips} else output
def build(): return Flipping(6, 6)
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)
    model.is_split = mesh.get_rank() == 1
def loss(model, rows):
    parts = rows.chunk(2, dim=0) if len(rows) == 12 else [rows]
    return torch.stack([model(part).square().mean() for part in parts]).mean()
"""
    report = checked(halves.format(flips=False), "dp=2", tmp_path / "right")
    assert (report.findings, report.not_checked) == ((), ())
    report = checked(halves.format(flips=True), "dp=2", tmp_path / "wrong")
    assert [(one.kind, one.tensor, one.ranks) for one in report.findings] == [("misordered", "output", (1,))]


def test_a_batch_may_be_a_dict_and_an_output_too(tmp_path):
    keywords = """
class Model(nn.Linear):
    def forward(self, x, y): return {"loss": (super().forward(x) - y).square().mean()}
def build(): return Model(6, 6)
def batch(): return {"x": torch.randn(12, 6), "y": torch.randn(12, 6)}
def loss(model, batch): return model(**batch)["loss"]
"""
    report = checked(keywords, "dp=2", tmp_path)
    assert (report.findings, report.not_checked) == ((), ())


@recorded
def test_a_model_with_dropout_is_compared_in_eval_and_that_is_reported(tmp_path):
    dropout = "def build(): return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6))"
    report = checked(dropout, "dp=2", tmp_path)
    assert report.findings == ()
    assert [entry.why for entry in report.not_checked] == [
        "the step in training: it draws random numbers, as dropout does, and a sharded model draws different ones; "
        "compared in eval()"
    ]


@recorded
def test_batch_norm_is_compared_over_the_parts_that_ranks_see_and_that_is_reported(tmp_path):
    norm = "def build(): return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))"
    report = checked(norm, "dp=3", tmp_path)
    assert report.findings == ()
    (entry,) = report.not_checked
    assert entry.why.startswith("the step on the whole batch: its loss is ")
    assert entry.why.endswith(
        "(BatchNorm in training); compared over the parts, without the buffers "
        "after the step: each rank's are of its own part"
    )


@recorded
def test_fsdp1_over_tensor_parallel_with_a_shared_weight_is_checked_to_its_gradients(tmp_path):
    two_d = """
from torch.distributed.fsdp import FullyShardedDataParallel
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, tokens): return self.head(self.down(self.up(self.embed(tokens)).relu()))
def build(): return Model()
def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=cpu)
def batch(): return torch.randint(0, 8, (12, 4))
"""
    report = checked(two_d, "dp=2,tp=2", tmp_path / "right")
    assert (report.findings, report.not_checked) == ((), ())
    twice = (
        two_d
        + """
def step(model, tokens, mesh):
    loss = model(tokens).square().mean()
    loss.backward()
    model.module.up.weight.grad.mul_(2)
    return loss
"""
    )
    report = checked(twice, "dp=2,tp=2", tmp_path / "twice")
    assert [(finding.kind, finding.tensor) for finding in report.findings] == [("wrong-scale", "up.weight")]


@pytest.mark.parametrize(
    "text",
    [
        "def build(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6))",
        """
from torch.nn.parallel import DistributedDataParallel
def parallelize(model, mesh): return DistributedDataParallel(model)
def loss(model, rows):
    rows = rows.clone().requires_grad_()
    output = model(rows)
    (slope,) = torch.autograd.grad(output.sum(), rows, create_graph=True)
    return output.square().mean() + slope.square().mean()
""",
    ],
    ids=["an operation in place", "a gradient within the loss"],
)
def test_a_step_runs_under_observation_as_without(text, tmp_path):
    report = checked(text, "dp=2", tmp_path)
    assert (report.findings, report.not_checked) == ((), ())


PIPELINE = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
AXES = STAGE_AXES = ("pp",)
TORCH = (2, 7)  # the schedules of 2.6 do not divide gradients by the number of micro-batches
BATCH_AXES = ()
def build(): return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
def parallelize(model, mesh): model[1 - mesh.get_rank()] = nn.Identity()
def stages(model, mesh): return {mesh.get_rank(): model}
def step(model, rows, mesh):
    stage = PipelineStage(model, mesh.get_rank(), 2, rows.device)
    schedule = ScheduleGPipe(stage, 3, loss_fn=lambda output, _: output.square().mean())
    losses = []
    schedule.step(*([] if mesh.get_rank() else [rows]), target=rows, losses=losses)
    loss = torch.stack(losses).mean().detach() if losses else rows.new_zeros(())
    torch.distributed.broadcast(loss, src=1)
    return loss
"""


def test_a_stage_that_torch_runs_to_learn_its_shapes_is_not_taken_for_a_micro_batch(tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(HEAD + PIPELINE)
    model = run_probe(str(probe), "pp=2", tmp_path / "dump")
    report = report_on(model)
    assert (report.findings, report.not_checked) == ((), ())
    for record in model.files.ranks.values():
        assert [(one.microbatch, one.backward) for one in record.schedule] == [
            *((number, False) for number in range(3)),
            *((number, True) for number in range(3)),
        ]


MASKED = """
class Model(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("freqs", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("mask", torch.arange(9) % 2 == 0)
def build(): return Model()
"""


def test_a_buffer_that_no_id_fits_in_and_that_is_cut_is_reported_as_unchecked(tmp_path):
    cut = MASKED + "def parallelize(model, mesh): model.mask = model.mask.chunk(2)[mesh.get_rank()]"
    report = checked(cut, "dp=2", tmp_path)
    assert ("mask", "torch.bool cannot hold ids") in [(entry.tensor, entry.why) for entry in report.not_checked]


def test_a_model_stamped_in_a_wider_dtype_is_listed_in_its_own_with_what_was_not_stamped(tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(HEAD + MASKED.replace("Model()", "Model().bfloat16()"))
    rows = dict(listed_rows(run_probe(str(probe), "dp=2", tmp_path / "dump"), None))
    assert {name: row.layout for name, row in rows.items()} == {
        "weight": "bfloat16[6/dp, 6]",
        "bias": "bfloat16[6/dp]",
        "freqs": "complex64[3] plain buffer",
        "mask": "bool[9] plain buffer",
    }


@pytest.mark.usefixtures("late_failures")
def test_an_error_in_the_users_own_code_is_reported_with_its_line(tmp_path, capsys):
    probe = tmp_path / "mine.py"
    probe.write_text(HEAD + "def parallelize(model, mesh): raise RuntimeError('my own bug')")
    assert main(["probe", str(probe), "--mesh", "dp=2", "-o", str(tmp_path / "dump")]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shardviz: error: rank 0 (dp=0) raised RuntimeError: my own bug, and 1 other rank the same\n")
    assert f'File "{probe}", line 10, in parallelize' in err
