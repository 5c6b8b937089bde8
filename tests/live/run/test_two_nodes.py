"""A job on two machines without a shared disk: each keeps its ranks' files, and together they say what one says."""

from pathlib import Path

import pytest
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Shard

import shardviz
from shardviz.check.run import check_dump, report_on
from shardviz.cli import main
from shardviz.commands.common.dumps import says_it_is_a_part
from shardviz.dump.dump import dump_of
from shardviz.dump.gather import read_parts
from shardviz.dump.read import read_run
from shardviz.testing import spmd
from tests.lanes import nightly, since_torch
from tests.live.lines.cases import CASES
from tests.live.run.jobs import BEGIN, END, ON_FOUR, ON_TWO_RANKS, RANKS, STEP, TORCHRUN, run
from tests.live.run.nodes import RUN, run_on_two

ON_TWO_AXES = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
model = build()
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["fsdp"])
"""

EXCHANGED = """
mine = model[0].weight.to_local().detach()
both = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(both, mine.contiguous(), group=mesh["fsdp"].get_group())
with torch.no_grad():
    mine.copy_(both[1 - mesh["fsdp"].get_local_rank()])
"""

LARGE = """
def build():
    return nn.Sequential(nn.Linear(16, 1 << 18), nn.Tanh(), nn.Linear(1 << 18, 16), nn.LayerNorm(16))
"""
"""Of so large a model only one rank of each disk keeps the values from before sharding."""

SEEDS = "torch.manual_seed(rank)\n"

TRAIN = "train(model, steps=2)\n"


def parts_in(ran):
    return [one.folder / "job.shardviz" for one in ran]


def parts_of(ran, own="2 of 4 ranks", elsewhere=("ranks 2, 3", "ranks 0, 1")):
    """Return the parts that two nodes wrote, after a look at what each said of it."""
    for one, others in zip(ran, elsewhere, strict=True):
        assert (one.code, one.out) == (2, ""), one.err
        (line,) = [line for line in one.err.splitlines() if "wrote job.shardviz" in line]
        assert f"with {own}; {others} wrote to other machines" in line
        assert "shardviz gather job.shardviz OTHER.shardviz -o ALL.shardviz" in line
        assert not list(one.folder.glob(".job*"))
    return parts_in(ran)


def gathered_of(tmp_path, body):
    """Run a job on two nodes, gather its parts and return the report on them."""
    return report_on_all(tmp_path, parts_of(run_on_two(tmp_path / "two", BEGIN + body + END)))


def report_on_all(tmp_path, parts):
    """Return the report on parts, which is the one on what `gather` makes of them."""
    together = report_on(dump_of(read_parts(parts)))
    assert main(["gather", *map(str, parts), "-o", str(tmp_path / "all")]) == 0
    assert check_dump(tmp_path / "all") == together
    return together


@spmd(mesh={"fsdp": 2})
def test_ranks_that_do_not_see_each_others_files_keep_their_own(mesh, tmp_path, monkeypatch, capsys):
    """Two working folders stand for two disks."""
    rank, parts = mesh.get_rank(), [tmp_path / f"node_{number}" / "job.shardviz" for number in (0, 1)]
    parts[rank].parent.mkdir()
    monkeypatch.chdir(parts[rank].parent)
    model = nn.Linear(8, 8)
    stamps = shardviz.stamp(model)
    mine = model.weight.detach().chunk(2)[1 - rank].contiguous()
    model.weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
    shardviz.capture(model, Path("job.shardviz"), mesh=mesh, stamps=stamps)
    assert says_it_is_a_part(Path("job.shardviz"))
    said = f"wrote job.shardviz with 1 of 2 ranks; rank {1 - rank} wrote to other machines"
    assert said in " ".join(capsys.readouterr().err.split())
    distributed.barrier()
    (finding,) = report_on(dump_of(read_parts(parts))).findings
    assert (finding.kind, finding.tensor) == ("misordered", "weight")


@nightly
@since_torch(2, 7)  # where FSDP2 steps on a CPU
def test_what_no_node_sees_alone_is_found_in_their_parts(tmp_path):
    script = BEGIN + ON_TWO_RANKS + "exchange(model[0].weight)\n" + STEP + END
    ran = run_on_two(tmp_path / "two", script, before=(*RUN, "--", *RANKS), ranks=1)
    parts = parts_of(ran, "1 of 2 ranks", ("rank 1", "rank 0"))
    (finding,) = report_on_all(tmp_path, parts).findings
    assert finding.kind == "misordered"


@nightly
@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        (ON_TWO_AXES + EXCHANGED + TRAIN, ["misordered"]),
        (ON_TWO_AXES + TRAIN, []),
        (LARGE + ON_TWO_AXES + EXCHANGED + TRAIN, ["misordered"]),
        (SEEDS + ON_TWO_AXES + TRAIN, []),
    ],
    ids=["exchanged", "right", "large", "seeds"],
)
def test_parts_of_two_nodes_say_what_one_node_says(tmp_path, body, kinds):
    together = gathered_of(tmp_path, body)
    on_one = run(tmp_path, body, command=ON_FOUR).report()
    assert [one.kind for one in together.findings] == kinds
    assert (together.findings, together.not_checked) == (on_one.findings, on_one.not_checked)


@nightly
def test_a_traced_step_of_two_nodes_is_gathered_with_the_weights(tmp_path, capsys):
    before = (*RUN, "--trace", "--", *TORCHRUN)
    parts = parts_of(run_on_two(tmp_path / "two", BEGIN + ON_TWO_AXES + TRAIN + END, before=before))
    on_one = run(tmp_path, ON_TWO_AXES + TRAIN, "--trace", command=ON_FOUR)
    assert on_one.code == 0, on_one.err
    assert main(["gather", *map(str, parts), "-o", str(tmp_path / "all")]) == 0
    assert len({read_run(part / "trace").run_id for part in parts}) == 1
    assert main(["diff", str(tmp_path / "all"), str(tmp_path / "job.shardviz")]) == 0, capsys.readouterr().out


PROBING = """
import sys
from shardviz.cli import main
sys.exit(main(["probe", sys.argv[1], "--mesh", "dp=2,tp=2", "-o", "job.shardviz"]))
"""


@nightly
@pytest.mark.parametrize("twin", ["right", "wrong"])
def test_a_probe_on_two_nodes_says_what_one_node_says_once_it_is_gathered(tmp_path, twin):
    program = tmp_path / "program.py"
    (case,) = [one for one in CASES if one.name == "sum over the wrong axis"]
    program.write_text(getattr(case, twin))
    ran = run_on_two(tmp_path / "two", PROBING, str(program), before=TORCHRUN)
    for one in ran:
        assert one.err.count("wrote job.shardviz with 2 of 4 ranks") == 1, one.err
    code = main(["probe", str(program), "--mesh", "dp=2,tp=2", "-o", str(tmp_path / "job.shardviz")])
    assert code == {"right": 0, "wrong": 1}[twin]
    on_one, together = check_dump(tmp_path / "job.shardviz"), report_on(dump_of(read_parts(parts_in(ran))))
    assert (together.findings, together.not_checked) == (on_one.findings, on_one.not_checked)
