"""What a command says at its end: the exit code is the verdict, whatever is at the other end of its streams."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shardviz.cli import main
from shardviz.layout.mesh import parse_mesh
from tests.dumps import Made, make_dump
from tests.lanes import at_night, nightly

if TYPE_CHECKING:
    from pathlib import Path

MESH = parse_mesh("fsdp=2,tp=4")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return make_dump(tmp_path / "bad.shardviz", MESH, {"w": Made("[16/fsdp/tp, 8]", "[16/tp/fsdp, 8]"), "β": "[8/tp]"})


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return make_dump(tmp_path / "good.shardviz", MESH, {"w": "[16/tp/fsdp, 8]"})


def shell(folder: Path, command: str) -> tuple[int, str]:
    """Run a command line of bash; return the code of the first command in its pipe, and stderr."""
    line = f"shardviz() {{ {sys.executable} -m shardviz $*; }}; {command}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


WAYS = ["check bad.shardviz"]
FORMATS = ["check bad.shardviz --format json", "check bad.shardviz --format github"]
FORMATS += ["check bad.shardviz --format junit"]
FORMATS += ["diff good.shardviz bad.shardviz", "diff good.shardviz bad.shardviz --format json"]


@pytest.mark.parametrize("way", [*WAYS, *at_night(FORMATS)])
def test_a_closed_pipe_does_not_hide_findings(bad: Path, good: Path, way: str) -> None:
    assert shell(bad.parent, f"shardviz {way} | true") == (1, "")


def test_a_closed_pipe_is_no_finding(good: Path) -> None:
    for way in ("check good.shardviz", "--help"):
        code, err = shell(good.parent, f"shardviz {way} | true")
        assert (code, err) == (0, ""), way


@nightly
def test_nor_is_one_of_a_page(good: Path) -> None:
    assert shell(good.parent, "shardviz show good.shardviz --format html | true") == (0, "")


def test_a_full_stderr_does_not_hide_the_code(good: Path) -> None:
    assert shell(good.parent, "shardviz check nonesuch 2> /dev/full") == (2, "")
    (good / "rank_00003.json").write_text("{")
    assert shell(good.parent, "shardviz check good.shardviz > /dev/null 2> /dev/full") == (1, "")


TIMES = ["inf", "1e300", "-1", "nan", "0", "soon"]


@pytest.mark.parametrize("time", TIMES)
def test_an_impossible_timeout_is_a_usage_error(time: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "tp", f"--timeout={time}"]) == 2
    said = f"argument --timeout: '{time}' is not a valid timeout: expected seconds, greater than 0"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("number", ["-3", "2.5", "many"])
def test_an_impossible_number_of_values_is_a_usage_error(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "tp", "--values", number]) == 2
    assert f"argument --values: '{number}' is not a number of values" in capsys.readouterr().err


def test_a_time_and_a_number_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "no_such_probe", "--timeout", "0.5", "--values", "0", "-o", str(tmp_path / "x")]) == 2
    assert "no_such_probe" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["svg", "html", "htm", "SVG"])
@pytest.mark.parametrize("table", ["--memory", "--comms", "--schedule"])
def test_a_table_is_not_written_as_a_picture(
    good: Path, table: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = good.parent / f"x.{ending}"
    assert main(["show", str(good), table, "-o", str(output)]) == 2
    assert "are text, not a picture" in capsys.readouterr().err
    assert not output.exists()
    assert main(["show", str(good), table, "-o", str(output.with_suffix(".txt"))]) == 0


@nightly
@pytest.mark.parametrize("encoding", ["utf-16", *at_night(["ascii", "latin-1", "utf-8"])])
def test_pictures_and_pages_are_utf_8_whatever_the_terminal_says(bad: Path, encoding: str) -> None:
    for way in (["show", "bad.shardviz", "β", "--format", "svg"], ["show", "bad.shardviz", "--format", "html"]):
        command = [sys.executable, "-m", "shardviz", *way]
        done = subprocess.run(
            command,
            cwd=bad.parent,
            capture_output=True,
            env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"},
            check=True,
        )
        assert "β" in done.stdout.decode("utf-8")


def test_a_stream_that_is_no_file_gets_the_text(good: Path) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["show", str(good), "w", "--format", "svg"]) == 0
    assert said.getvalue().startswith("<svg")


def test_a_file_that_does_not_fit_on_the_disk_is_not_left_half_written(good: Path) -> None:
    """`ulimit -f` counts in kilobytes, and lets the first four of a page be written."""
    code, said = shell(good.parent, "trap '' XFSZ; ulimit -f 4; shardviz show good.shardviz -o page.html")
    assert code == 2
    assert said == "shardviz: error: cannot write page.html: File too large\nHint: choose another file with -o\n"
    assert not (good.parent / "page.html").exists()
