"""Wrong uses of `shardviz run`: one line that says why, a hint, and the exit code; and a job that Ctrl-C ends."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardviz.cli import main
from shardviz.layout.mesh import Mesh
from tests.check.records import change_run
from tests.dumps import make_dump
from tests.lanes import at_night

WAITS = "import time; print('ready', flush=True); time.sleep(60)"
ENDS_WELL = (
    "import signal, sys, time\nsignal.signal(2, lambda *_: sys.exit(0))\nprint('ready', flush=True); time.sleep(60)"
)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("torchrun", "--nproc-per-node", "2", "a.py"), "has no option --nproc-per-node", "put -- before the command"),
        (("--", "no-such-program"), "cannot start no-such-program: No such file", "activate the environment"),
        (("--", "./a.py"), "cannot start ./a.py: Permission denied", "put python or torchrun before it"),
        (("--map", "absent", "--", "true"), "cannot read absent: No such file", "give a file, or one of deepseek"),
        (("--patience", "-3", "--", "true"), "'-3' is not a valid timeout", "shardviz run --help"),
        (("--patience", "nan", "--", "true"), "'nan' is not a valid timeout", "shardviz run --help"),
        (("-o", "a.py/job", "--", "true"), "cannot write", "give another folder with -o"),
    ],
)
def test_a_wrong_use_is_one_line_and_a_hint(tmp_path, monkeypatch, capfd, words, message, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    assert main(["run", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    error, advice = err.splitlines()
    assert error.startswith("shardviz: error: ")
    assert message in error
    assert advice.startswith("Hint: ")
    assert hint in advice


@pytest.mark.parametrize("fills", ["before", "while"])
def test_a_full_disk_is_named_before_the_job_and_after_it(tmp_path, monkeypatch, capfd, fills):
    """Ranks cannot even note down that they are there: `no sharding call was seen` would be untrue."""
    monkeypatch.chdir(tmp_path)
    free = iter([0] if fills == "before" else [1 << 30, 0])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=next(free)))
    assert main(["run", "-o", str(tmp_path / "job"), "--", "touch", "ran"]) == 2
    assert capfd.readouterr().err.splitlines() == [
        f"shardviz: error: no room for {tmp_path}/job: 0 B are free in {tmp_path}",
        "Hint: free some space, or give a folder on another disk with -o",
    ]
    assert Path("ran").exists() == (fills == "while")


def test_a_dump_of_the_same_command_is_replaced_and_a_missing_program_is_told_first(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    make_dump(tmp_path / "a.shardviz", Mesh(("tp",), (2,)), {"w": "[4/tp]"})
    change_run(tmp_path / "a.shardviz", command=("true", "a.py"))
    told = []
    for job in (["true", "a.py"], ["true", "a.py", "--other"], ["no-such-program", "a.py"]):
        assert main(["run", "--", *job]) == 2
        told.append(capfd.readouterr().err)
    assert "no sharding call was seen" in told[0]
    assert f"{tmp_path}/a.shardviz exists" in told[1]
    assert "cannot start no-such-program" in told[2]


@pytest.mark.parametrize(
    ("number", "script", "code", "said"),
    [
        (signal.SIGINT, WAITS, 130, "was ended by Ctrl-C\n"),
        (signal.SIGTERM, WAITS, 143, "was ended by SIGTERM\n"),
        *at_night([(signal.SIGHUP, WAITS, 129, "was ended by SIGHUP\n")]),
        (signal.SIGINT, ENDS_WELL, 2, ""),
    ],
)
def test_a_signal_ends_the_job_first_and_is_not_a_failed_job(tmp_path, number, script, code, said):
    (tmp_path / "job.py").write_text(f"import os; print(os.getpid(), flush=True)\n{script}")
    command = [sys.executable, "-m", "shardviz", "run", "--", sys.executable, "job.py"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes) as process:
        job = int(process.stdout.readline())
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == code, rest
    assert (f"shardviz: interrupted: {Path(sys.executable).name} {said}" in rest) == bool(said)
    assert "the job failed" not in rest
    with pytest.raises(ProcessLookupError):
        os.kill(job, 0)
    assert [path.name for path in Path(tmp_path).iterdir()] == ["job.py"]


def test_a_checkpoint_to_stamp_that_is_not_there_is_not_only_an_unknown_probe(tmp_path, capsys):
    assert main(["stamp-checkpoint", str(tmp_path / "absent"), "-o", str(tmp_path / "copy")]) == 2
    error, advice = capsys.readouterr().err.splitlines()
    assert "absent" in error
    assert "no checkpoint is there" in error
    assert "give a checkpoint, FILE.py:FUNCTION" in advice
