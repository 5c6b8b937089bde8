"""However a job ends: one line says so, the report is there, and nothing is left running."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardviz.check.run import check_dump
from tests.lanes import nightly
from tests.live.run.jobs import BEGIN, END, ON_TWO_RANKS, TORCHRUN, command_for, environment, run

STAYS = (
    ON_TWO_RANKS
    + """
import time
exchange(model[0].weight)
train(model)
open(f"pid-{rank}", "w").write(str(os.getpid()))
time.sleep(300)
"""
)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started(folder, *command):
    """Start a job that stays, and return it and its ranks' process numbers once they have come so far."""
    (folder / "job.py").write_text(BEGIN + STAYS + END)
    with open(folder / "said", "w") as said:
        process = subprocess.Popen(
            command_for(folder, *command),
            cwd=folder,
            env=environment(),
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    pids = [folder / f"pid-{rank}" for rank in range(2)]
    deadline = time.monotonic() + 240
    while not all(pid.exists() and pid.read_text() for pid in pids) and process.poll() is None:
        assert time.monotonic() < deadline, (folder / "said").read_text()
        time.sleep(0.2)
    assert process.poll() is None, (folder / "said").read_text()
    return process, [int(pid.read_text()) for pid in pids]


@nightly
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 143, "was ended by SIGTERM"),
        (signal.SIGINT, 130, "was ended by Ctrl-C"),
        (signal.SIGHUP, 129, "was ended by SIGHUP"),
    ],
)
def test_a_signal_ends_the_job_after_its_report_of_exchanged_shards_and_leaves_nothing_running(
    tmp_path, number, code, said
):
    process, ranks = started(tmp_path, *TORCHRUN, "job.py")
    process.send_signal(number)
    assert process.wait(240) == code
    text = (tmp_path / "said").read_text()
    assert [(one.kind, one.tensor) for one in check_dump(tmp_path / "job.shardviz").findings] == [
        ("misordered", "0.weight")
    ]
    assert "✗ misordered  0.weight" in text
    assert "✓ 2.weight" in text
    assert f"shardviz: interrupted: {Path(sys.executable).name} {said}\n" in text
    assert "the job failed" not in text
    assert not [rank for rank in ranks if is_running(rank)]
    assert not list(tmp_path.glob(".job*"))


@nightly
def test_ranks_are_ended_where_what_started_them_does_not_pass_a_signal_on(tmp_path):
    script = " ".join((*TORCHRUN, "job.py", "&", "wait"))
    process, ranks = started(tmp_path, "sh", "-c", script)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 143
    assert not [rank for rank in ranks if is_running(rank)]


@nightly
def test_the_rank_that_was_killed_is_named(tmp_path):
    killed = "train(model)\nif rank == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()\n"
    ran = run(tmp_path, ON_TWO_RANKS + killed)
    assert ran.code == 3
    assert "✓ 0.weight" in ran.out
    assert "the job failed: rank 1 was ended by SIGKILL" in ran.err


AT_EXIT = "import atexit, os\nif os.environ['RANK'] == '1':\n    atexit.register(os.abort)\n" + BEGIN + ON_TWO_RANKS
"""Registered before the rank has joined others, it aborts after all that shardviz does at the exit."""


@nightly
def test_a_rank_that_is_aborted_after_its_script_did_its_work_fails_nothing(tmp_path):
    ran = run(tmp_path, AT_EXIT + "train(model)\n" + END + "import time; time.sleep(rank * 2)\n", whole=True)
    assert ran.code == 0, ran.err
    assert "✓ 0.weight" in ran.out
    assert "rank 1 was aborted while Python exited, after the script had ended" in ran.err
    assert "the job failed" not in ran.err


@nightly
@pytest.mark.parametrize("wrong", ["os.abort()", "raise SystemExit(4)", "raise KeyError('lost')"])
def test_a_rank_that_is_aborted_in_the_middle_has_failed(tmp_path, wrong):
    ran = run(tmp_path, ON_TWO_RANKS + f"train(model)\nif rank == 1:\n    {wrong}\ndist.barrier()\n")
    assert ran.code == 3, ran.err
    how = {"os.abort()": "was ended by SIGABRT", "raise SystemExit(4)": "exited with 4"}.get(wrong, "exited with 1")
    assert f"the job failed: rank 1 {how}" in ran.err


FORKS = """
from torch.utils.data import DataLoader
class Data(torch.utils.data.Dataset):
    change = nn.Linear(16, 16)
    def __len__(self):
        return 8
    def __getitem__(self, number):
        with torch.no_grad():
            return self.change(torch.ones(16))
optimizer = torch.optim.SGD(model.parameters())
for rows in DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context="fork"):
    model(rows).sum().backward()
    optimizer.step()
pid = os.fork()
if pid == 0:
    nn.Linear(2, 2)(torch.ones(2))
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


@nightly
def test_what_a_rank_forks_is_left_alone(tmp_path):
    ran = run(tmp_path, ON_TWO_RANKS + FORKS)
    assert ran.code == 0, ran.err
    assert "✓ 0.weight" in ran.out
    assert ran.report().findings == ()
    assert "failed" not in ran.err


@nightly
def test_a_disk_without_room_for_the_dump_is_one_line_and_the_job_goes_on(tmp_path):
    # No file may be larger than a block: neither the values from before sharding nor the dump can be written.
    limited = ("sh", "-c", 'ulimit -f 1; exec "$@"', "sh", *TORCHRUN)
    ran = run(tmp_path, ON_TWO_RANKS + "train(model)\nprint('trained', flush=True)\n", command=limited)
    assert ran.code == 2, ran.err
    assert ran.err.count("trained") == 2
    (line,) = [line for line in ran.err.splitlines() if "not captured: Sequential:" in line]
    assert "File too large" in line
    assert not (tmp_path / "job.shardviz").exists()
