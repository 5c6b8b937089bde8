from dataclasses import dataclass

import msgspec

from shardviz.check.run import check_model
from shardviz.dump.dump import model_of
from shardviz.dump.read import read_dump
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
    dump = read_dump(make_dump(path / "dump", MESH, {"w": "float32[4/tp]"}))
    for rank, reason in reasons.items():
        write_rank(dump.path, msgspec.structs.replace(dump.ranks[rank], not_applied=(("w", reason),)))
    findings = check_model(model_of(read_dump(dump.path))).findings
    return Told([finding.kind for finding in findings], [finding.ranks for finding in findings])


def test_a_fill_that_did_not_take_is_one_finding_for_all_ranks_that_say_so(tmp_path):
    lost = "2 of 4 elements did not read back as written"
    assert told(tmp_path, {0: lost, 1: lost}) == Told(["write-not-applied"], [(0, 1)])


def test_fills_that_took_are_not_mentioned(tmp_path):
    assert told(tmp_path, {}) == Told([], [])
