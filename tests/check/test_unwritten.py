"""Parameters that ranks say nothing has written to, from made dumps."""

from dataclasses import replace

import msgspec

from shardviz.check.run import report_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from tests.dumps import Made, make_dump


def report_with(tmp_path, unwritten):
    """Return the report on two weights on two ranks, some of whose memory was never written: names by rank."""
    made = {name: Made("[8/fsdp, 4]") for name in ("a.weight", "b.weight")}
    files = read_files(make_dump(tmp_path / "made.shardviz", parse_mesh("fsdp=2"), made))
    ranks = {
        rank: msgspec.structs.replace(record, unwritten=unwritten.get(rank, ())) for rank, record in files.ranks.items()
    }
    return report_on(dump_of(replace(files, ranks=ranks)))


def test_what_nothing_was_written_to_is_foreign_on_the_ranks_that_say_so(tmp_path):
    (finding,) = report_with(tmp_path, {1: ("b.weight",)}).findings
    assert (finding.kind, finding.tensor, finding.ranks) == ("foreign", "b.weight", (1,))
    assert finding.claimed == "[8/fsdp, 4]"
    assert "to_empty" in finding.cause


def test_names_that_the_dump_does_not_have_are_passed_over(tmp_path):
    assert not report_with(tmp_path, {0: ("c.weight",)}).findings
