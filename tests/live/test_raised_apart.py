"""A step that ranks leave by different errors, at different places of their collectives, ends, and says both."""

from __future__ import annotations

import time

from shardviz.check.run import report_on
from tests.live.probing import HEAD, run_probe

APART = (
    HEAD
    + """
from torch import distributed
class Routed(nn.Linear):
    is_split = False
    def forward(self, x):
        y = super().forward(x)
        if self.is_split and distributed.get_rank() == 0:
            return y[len(y)]
        if self.is_split:
            self.pending = distributed.all_reduce(y.detach(), async_op=True)
            raise ValueError("no expert has a token")
        return y
def build(): return nn.Sequential(nn.Linear(6, 8), Routed(8, 6))
def parallelize(model, mesh): model[1].is_split = True
"""
)


def test_ranks_that_raise_differently_out_of_step_are_both_named_and_the_probe_ends(tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(APART)
    began = time.monotonic()
    report = report_on(run_probe(str(probe), "dp=2", tmp_path / "dump", alone=True))
    (finding,) = report.findings
    assert finding.kind == "raised"
    assert "rank 0 raised IndexError" in finding.summary
    assert "rank 1 raised ValueError" in finding.summary
    assert "no expert has a token" in finding.summary, finding
    assert time.monotonic() - began < 60, "ranks waited for each other until something gave up"


def test_ranks_that_raise_alike_are_named_by_the_first(tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(APART.replace("distributed.get_rank() == 0", "True"))
    (finding,) = report_on(run_probe(str(probe), "dp=2", tmp_path / "dump", alone=True)).findings
    assert "rank 0 raised IndexError" in finding.summary
    assert "rank 1" not in finding.summary


def test_a_step_that_no_rank_raises_in_is_compared(tmp_path):
    probe = tmp_path / "mine.py"
    probe.write_text(APART.replace("model[1].is_split = True", "fully_shard(model, mesh=mesh['dp'])"))
    assert report_on(run_probe(str(probe), "dp=2", tmp_path / "dump", alone=True)).findings == ()
