from dataclasses import dataclass

import msgspec

from shardviz.check.run import report_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.write import write_rank
from shardviz.layout.mesh import Mesh
from tests.dumps import make_dump

MESH = Mesh(("tp",), (2,))


@dataclass
class Told:
    """What a check said of one tensor."""

    kinds: list[str]
    ranks: list[tuple[int, ...]]


def told(path, reasons) -> Told:
    files = read_files(make_dump(path / "dump", MESH, {"w": "float32[4/tp]"}))
    for rank, reason in reasons.items():
        write_rank(files.path, msgspec.structs.replace(files.ranks[rank], not_applied=(("w", reason),)))
    findings = report_on(dump_of(read_files(files.path))).findings
    return Told([finding.kind for finding in findings], [finding.ranks for finding in findings])


def test_a_fill_that_did_not_take_is_one_finding_for_all_ranks_that_say_so(tmp_path):
    lost = "2 of 4 elements did not read back as written"
    assert told(tmp_path, {0: lost, 1: lost}) == Told(["write-not-applied"], [(0, 1)])


def test_fills_that_took_are_not_mentioned(tmp_path):
    assert told(tmp_path, {}) == Told([], [])
