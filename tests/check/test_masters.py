"""Master copies beside their weights: fragments of flat buffers that hold what they say, and those that do not."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shardviz.check.run import report_on
from shardviz.check.verdicts import nothing_checked
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.tensors import FragmentRecord
from shardviz.layout.mesh import parse_mesh
from tests.dumps import Made, make_dump

LAYOUTS = {"a.fp32": "[flat(5, 7) at 0 of 60/dp]", "b.fp32": "[flat(20) at 35 of 60/dp]"}
"""Two parameters in buffers of 30 elements on two ranks: rank 0 has 30 of `a`, rank 1 the other 5, and `b`."""


def dump_with(tmp_path, ids, said=None):
    """Make a dump of the two master copies.

    Args:
        tmp_path: Where to.
        ids: What ranks hold, by name and rank, where that is not what they claim.
        said: What they say that they have, by rank, of `a`: start and size.
    """
    made = {name: Made(layout, ids=ids.get(name, {})) for name, layout in LAYOUTS.items()}
    files = read_files(make_dump(tmp_path / "made.shardviz", parse_mesh("dp=2"), made))
    run = msgspec.structs.replace(
        files.run, stamps=tuple(msgspec.structs.replace(one, role="optim") for one in files.run.stamps)
    )
    ranks = {
        rank: msgspec.structs.replace(
            record,
            bodies=tuple(msgspec.structs.replace(body, role="optim") for body in record.bodies),
            fragments=(FragmentRecord("a.fp32", (0, 1), *said[rank]),) if said else (),
        )
        for rank, record in files.ranks.items()
    }
    return dump_of(replace(files, run=run, ranks=ranks))


def only(dump):
    (finding,) = report_on(dump).findings
    return finding


def test_masters_that_are_their_weights_are_in_order_and_counted(tmp_path):
    dump = dump_with(tmp_path, {})
    report = report_on(dump)
    assert (report.findings, report.not_checked, report.num_tensors) == ((), (), 2)
    assert nothing_checked(dump, report) == ""


def test_a_fragment_that_begins_late_is_placed(tmp_path):
    finding = only(dump_with(tmp_path, {"a.fp32": {1: np.array([32, 33, 34, 35, -1])}}))
    assert (finding.kind, finding.ranks) == ("misordered", (1,))
    assert "rank 1 has element 31 of it where it says that it has element 30" in finding.sentence


def test_a_fragment_of_another_weight_is_named(tmp_path):
    finding = only(dump_with(tmp_path, {"a.fp32": {1: np.arange(36, 41)}}))
    assert "rank 1 has element 0 of b.fp32 where it says that it has element 30 of this one" in finding.sentence
    assert "zero_pp_rank_" in finding.fix


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_values_that_are_nobodys_are_stale_and_not_rewritten(tmp_path, ranks, value):
    sizes = {0: 30, 1: 5}
    finding = only(dump_with(tmp_path, {"a.fp32": {rank: np.full(sizes[rank], value) for rank in ranks}}))
    assert (finding.kind, finding.ranks) == ("foreign", ranks)
    assert f"{sum(sizes[rank] for rank in ranks)} of 35 elements differ from it" in finding.sentence
    assert "refresh_fp32_params" in finding.fix


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({0: (0, 30), 1: (31, 5)}, "element 30 on none, element 35 not in it"),
        ({0: (0, 31), 1: (30, 5)}, "element 30 on several"),
        ({0: (0, 30), 1: (30, 0)}, "elements 30 to 34 on none"),
    ],
)
def test_ranks_that_do_not_divide_a_weight_are_named(tmp_path, said, words):
    finding = only(dump_with(tmp_path, {}, said))
    assert finding.kind == "wrong-placement"
    assert words in finding.sentence


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_found_beside_what_moved_in_the_same_buffer_moved_too(tmp_path, rank):
    moved = {0: np.arange(2, 32), 1: np.arange(30, 35)}
    dump = dump_with(tmp_path, {"a.fp32": {rank: moved[rank]}, "b.fp32": {1: np.full(20, -1)}})
    causes = {one.tensor: one.cause for one in report_on(dump).findings}
    assert "address" in causes["a.fp32"]
    assert ("address" if rank == 1 else "wrote the weight after") in causes["b.fp32"]
