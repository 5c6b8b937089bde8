"""Stages of a pipeline that number their layers for themselves."""

from tests.lanes import nightly
from tests.live.run.jobs import run

STAGES = """
from safetensors.torch import load_file, save_file
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
first = rank * 2
if rank == 0:
    save_file({f"layers.{i}.weight": torch.randn(16, 16) for i in range(4)}, "model.safetensors")
dist.barrier()
whole = load_file("model.safetensors")

class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(NUMBER + i): nn.Linear(16, 16, bias=False) for i in range(2)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x

with torch.device("meta"):
    module = Stage()
weights = {f"layers.{NUMBER + i}.weight": whole[f"layers.{LOADED + i}.weight"] for i in range(2)}
module.load_state_dict(weights, assign=True)
stage = PipelineStage(module, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: out.pow(2).mean())
x = torch.randn(4, 16)
schedule.step(x) if rank == 0 else schedule.step(target=x)
"""


def ran(folder, number, loaded):
    return run(folder, STAGES.replace("NUMBER", number).replace("LOADED", loaded))


@nightly
def test_layers_that_each_stage_counts_from_0_are_told_apart_and_compared_with_nothing(tmp_path):
    job = ran(tmp_path, "0", "first")
    assert job.code == 2, job.err + job.out
    report = job.report()
    assert not report.findings
    names = {f"pp={stage}.layers.{layer}.weight" for stage in range(2) for layer in range(2)}
    assert set(report.why_not_checked) == names
    assert all("stages number their layers for themselves" in why for (why,) in report.why_not_checked.values())


@nightly
def test_a_layer_of_two_stages_is_not_said_to_be_counted_from_0(tmp_path):
    job = run(tmp_path, STAGES.replace("NUMBER + i", "i + rank").replace("LOADED + i", "i + rank"))
    assert job.code == 0, job.err + job.out
    assert not job.report().why_not_checked


@nightly
def test_layers_numbered_as_in_the_whole_model_are_compared(tmp_path):
    job = ran(tmp_path, "first", "first")
    assert job.code == 0, job.err + job.out
    assert not job.report().why_not_checked


@nightly
def test_a_stage_that_loaded_the_first_stages_layers_is_named(tmp_path):
    job = ran(tmp_path, "first", "0")
    assert job.code == 1, job.err + job.out
    found = {one.tensor: one.held for finding in job.report().findings for one in finding.each}
    assert found["layers.2.weight"] == "the elements of layers.0.weight"
