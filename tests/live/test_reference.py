"""What the unsharded model's step is, where ranks see parts of the batch that the whole is no mean of."""

from tests.lanes import nightly
from tests.live.probing import checked

NORM = """
def build():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), {more}nn.Linear(8, 6))
"""


def test_every_part_starts_from_the_buffers_that_a_rank_starts_from(tmp_path):
    report = checked(NORM.format(more=""), "dp=3", tmp_path / "rows")
    assert (report.findings, report.not_checked) == ((), ())


@nightly
def test_parts_of_a_batch_and_a_second_forward_start_from_them_too(tmp_path):
    report = checked(NORM.format(more="nn.BatchNorm1d(8), "), "dp=3", tmp_path / "parts")
    assert report.findings == ()
    assert len(report.not_checked) == 1
    own = (
        NORM.format(more="")
        + """
def step(model, rows, mesh):
    with torch.no_grad(): model(rows)
    loss = model(rows).square().mean()
    loss.backward()
    return loss
"""
    )
    assert {found.kind for found in checked(own, "dp=3", tmp_path / "twice").findings}


TOKENS = """
import torch.nn.functional as F
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
def parallelize(model, mesh): return DistributedDataParallel(model)
def batch():
    labels = torch.randint(6, (12,))
    labels[:4] = -100
    return torch.randn(12, 6), labels
def loss(model, batch):
    rows, labels = batch
    tokens = (labels != -100).sum().double()
    if ACROSS_RANKS and isinstance(model, DistributedDataParallel):
        distributed.all_reduce(tokens)
        tokens = tokens / distributed.get_world_size()
    return F.cross_entropy(model(rows), labels, ignore_index=-100, reduction="sum") / tokens
"""


WHEREVER = TOKENS.replace("ACROSS_RANKS and isinstance(model, DistributedDataParallel)", "distributed.is_initialized()")


def test_the_unsharded_model_runs_as_in_a_job_of_one_process(tmp_path):
    penalty = WHEREVER.replace(" / tokens\n", " / tokens + 0.01 * model(rows).square().mean()\n")
    report = checked(penalty, "dp=2", tmp_path)
    assert (report.findings, report.not_checked) == ((), ())


def test_a_loss_over_all_ranks_tokens_is_the_whole_batchs_and_right(tmp_path):
    report = checked(TOKENS + "ACROSS_RANKS = True", "dp=2", tmp_path / "right")
    assert (report.findings, report.not_checked) == ((), ())
    twice = """
ACROSS_RANKS = True
def log(model, batch, loss):
    if isinstance(model, DistributedDataParallel): model.module[0].weight.grad.mul_(2)
    return {}
"""
    report = checked(TOKENS + twice, "dp=2", tmp_path / "wrong")
    assert [(finding.kind, finding.tensor) for finding in report.findings] == [("wrong-scale", "0.weight")]
    assert report.not_checked == ()


def test_a_mean_of_the_ranks_own_means_is_a_warning_and_gradients_are_compared_over_the_parts(tmp_path):
    (finding,) = checked(TOKENS + "ACROSS_RANKS = False", "dp=2", tmp_path).findings
    assert (finding.severity, finding.tensor) == ("warning", "loss")
    assert "mean of means" in finding.cause
