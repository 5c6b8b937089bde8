"""A step's modules are followed forward and backward on real ranks."""

from dataclasses import replace

from shardviz import probe_files
from shardviz.check.step.trace.step_judge import judge
from shardviz.check.step.trace.traces import read_trace
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.write import TRACE_FOLDER, prepare_folder
from shardviz.layout.mesh import parse_mesh
from shardviz.live.job import ProbeJob
from tests.bugs.case import HEAD
from tests.bugs.models import TENSOR_PARALLEL
from tests.bugs.running import report_of
from tests.live import standing
from tests.live.probing import run_probe

TWICE = TENSOR_PARALLEL.replace(
    "return Sum.apply(x, self.group) + self.down.bias", "return all_reduce(x, group=self.group) + self.down.bias"
)
RECOMPUTED = (
    TENSOR_PARALLEL.replace("class MLP(", "class Inner(").replace("return MLP()", "return MLP()")
    + """
from torch.utils.checkpoint import checkpoint


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.inner.norm.weight.requires_grad_()

    def forward(self, x):
        x = x * 1
        once = checkpoint(self.inner, x, use_reentrant=False)
        return checkpoint(self.inner, once, use_reentrant=False)


_parallelize = parallelize


def parallelize(model, mesh):
    _parallelize(model.inner, mesh)

"""
)

HALTED = """
class Halt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.group is None else None, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.side, self.last, self.group = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), None

    def forward(self, x):
        x = self.first(x)
        return self.last(x.relu() + Halt.apply(self.side(x), self.group))


def build():
    return Model()


def batch():
    return torch.randn(8, 8)


def parallelize(model, mesh):
    model.group = mesh.get_group("tp")

"""


def test_a_sum_that_is_taken_again_in_backward_is_found_where_it_is(tmp_path):
    report = report_of(HEAD + TWICE, "tp=2", tmp_path)
    assert {finding.kind for finding in report.findings} == {"wrong-scale"}
    assert "2 times" in report.findings[0].summary


def test_a_module_that_is_called_twice_and_recomputed_has_two_calls_with_all_their_gradients(tmp_path):
    probe = tmp_path / "case.py"
    probe.write_text(HEAD + RECOMPUTED)
    dump = run_probe(str(probe), "tp=2", tmp_path / "dump")
    points = [point for point in dump.files.ranks[1].trace if point.module == "inner.down" or point.module == "inner"]
    of_inner = [point for point in points if point.module == "inner"]
    assert {point.call for point in of_inner} == {0, 1}
    assert {point.state for point in of_inner} == {"right"}
    assert {point.what for point in of_inner} >= {"input", "output", "gradient of output"}


def test_kept_values_are_judged_again_as_the_ranks_were_told_and_others_are_removed(tmp_path):
    probe, folder = tmp_path / "case.py", prepare_folder(tmp_path / "dump")
    probe.write_text(HEAD + TWICE)
    mesh = parse_mesh("tp=2", None)
    job = ProbeJob(probe_files.find(str(probe)), mesh, folder)
    standing.run(replace(job, keeps_evidence=True))
    dump, counts = dump_of(read_files(folder)), read_trace(folder / "unsharded" / TRACE_FOLDER).ranks[0].counts
    options = {"counts": counts, "dim": 0, "is_pipeline": False, "is_forward": False}
    again = judge(folder, folder / "unsharded", mesh, **options).answer()
    assert again.points == {rank: record.trace for rank, record in dump.files.ranks.items()}
    assert "odd" in {point.state for point in again.points[0]}
    standing.run(replace(job, folder=prepare_folder(folder, force=True)))
    assert {file.suffix for file in folder.iterdir()} == {".json", ".safetensors"}


def test_a_function_that_sends_nothing_back_is_followed_and_named(tmp_path):
    (finding,) = report_of(HEAD + HALTED, "tp=2", tmp_path).findings
    assert finding.cause == "The code between the output of side and what reads it cuts the graph"
    in_both = HALTED.replace("gradient if ctx.group is None else None", "None")
    assert not report_of(HEAD + in_both, "tp=2").findings
