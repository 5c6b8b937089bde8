"""A layer that was read for a second one is one finding."""

from shardviz.check.run import check_dump
from shardviz.layout.mesh import parse_mesh
from tests.check.checking import arange, shards_of
from tests.dumps import Made, make_dump

CLAIMED = "[8/tp, 4]"


def test_a_layer_that_was_read_for_a_second_one_is_one_finding(tmp_path):
    def shards(first):
        return {rank: ids + first for rank, ids in shards_of(arange(8, 4), CLAIMED, "tp=2").items()}

    tensors = {
        "layers.0.wq": Made(CLAIMED, ids=shards(96)),
        "layers.0.wk": Made(CLAIMED, ids=shards(96)),
        "layers.1.wk": Made(CLAIMED, ids=shards(32)),
        "layers.2.wq": CLAIMED,
        "layers.2.wk": CLAIMED,
    }
    report = check_dump(make_dump(tmp_path / "job.shardviz", parse_mesh("tp=2"), tensors))
    found = {finding.tensors: (finding.explanation.owner, finding.explanation.layer) for finding in report.findings}
    assert found == {
        ("layers.0.wq", "layers.0.wk"): ("layers.2", "layers.0"),
        ("layers.1.wk",): ("layers.2.wq", ""),
    }
    assert report.findings[0].cause.startswith("The loader reads from layers.2 for layers.0 too")
