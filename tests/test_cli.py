"""The command line: exit codes, what goes to which stream, the exact text of errors, and what is imported."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from shardviz.cli import VERBS, main
from shardviz.dump.read import read_run
from shardviz.dump.write import rank_file
from shardviz.layout.mesh import parse_mesh
from tests.check.records import change_rank, change_run, read_rank, without
from tests.dumps import Made, make_dump
from tests.lanes import at_night

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MESH = parse_mesh("fsdp=2,tp=4")
SWAPPED = Made("[16/fsdp/tp, 8]", "[16/tp/fsdp, 8]")


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return make_dump(tmp_path / "h.shardviz", MESH, {"layers.0.w": "[16/tp/fsdp, 8]", "layers.1.w": "[16/tp/fsdp, 8]"})


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    return make_dump(tmp_path / "s.shardviz", MESH, {"w": SWAPPED, "b": "[8/tp]"})


def shardviz(*args: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardviz", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def printed(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """Return what a command prints, run in this process, whose stdout is no terminal either."""
    main(list(map(str, args)))
    return capsys.readouterr().out


def test_a_clean_dump_exits_0_and_a_dump_with_findings_1(healthy: Path, swapped: Path) -> None:
    assert main(["check", str(healthy)]) == 0
    assert main(["check", str(swapped)]) == 1


def test_help_lists_every_verb_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    for verb in VERBS:
        summary = str(import_module(f"shardviz.commands.{verb.replace('-', '_')}").__doc__).partition(".\n")[0]
        assert re.search(rf"^  {verb} +{re.escape(summary)}$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80
    assert err == ""


def test_no_verb_is_a_usage_error_and_leaves_stdout_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: shardviz COMMAND")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    text, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert f"usage: shardviz {verb}" in text
    assert max(map(len, text.splitlines())) <= 80
    assert f"  shardviz {verb}" in examples


def test_the_version_names_torch_without_importing_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"shardviz [0-9.]+\S*, torch [0-9.]+\S*, Python [0-9.]+\S*\n", capsys.readouterr().out)


def test_help_of_a_verb_is_what_the_verb_says_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "mesh"]) == 0
    asked = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["mesh", "--help"])
    assert asked == capsys.readouterr().out


ERRORS = {
    "--color": "shardviz has no option --color\nHint: options follow the command",
    "--verzion": "shardviz has no option --verzion\nHint: did you mean --version?",
    "help chek": "unknown command 'chek'\nHint: did you mean check?",
    "show d.shardviz --memroy": "shardviz show has no option --memroy\nHint: did you mean --memory?",
    "check --fromat=json d.shardviz": "shardviz check has no option --fromat\nHint: did you mean --format?",
    "mesh --zzz": "shardviz mesh has no option --zzz\nHint: shardviz mesh --help",
    "schema run rank": "shardviz schema takes no further argument 'rank'\nHint: shardviz schema --help",
    "probe tp_fsdp --mesh fsdb=2,tp=4": (
        "probe tp_fsdp has axes fsdp, tp, but the mesh has fsdb, tp\nHint: --mesh fsdp=2,tp=4"
    ),
    "chek x": "unknown command 'chek'\nHint: did you mean check?",
    "xyzzy": f"unknown command 'xyzzy'\nHint: commands: {', '.join(VERBS)}",
    "check": "the following arguments are required: DUMP\nHint: shardviz check --help",
    "check d": "d does not exist: no dump and no checkpoint is there\nHint: did you mean d.shardviz?",
    "check .": ". is not a dump: it has no run.json\nHint: give one of the dumps in it: d.shardviz",
    "check d.shardviz/run.json": "d.shardviz/run.json is one file of a dump\nHint: give its folder: d.shardviz",
    "view d.shardviz --port 80": (
        "--port sets where --web listens, and --web is not given\nHint: add --web, or leave --port out"
    ),
    "check no_such": (
        "no_such does not exist: no dump and no checkpoint is there\nHint: shardviz probe tp_fsdp --mesh 2,4 writes one"
    ),
    "show d.shardviz laiers.0.w": "the dump has no tensor 'laiers.0.w'\nHint: did you mean layers.0.w?",
    "show d.shardviz w": "2 tensors end in 'w': layers.[0-1].w\n"
    "Hint: write more of the name, as in layers.0.w, or '*.w' for all of them",
    "show d.shardviz layers": "the dump has no tensor 'layers'\nHint: did you mean layers.0.w?",
    "show d.shardviz z*": "the dump has no tensor 'z*'\nHint: it has layers.0.w, layers.1.w",
    "show d.shardviz layers.0.w -o no/such/file": (
        "cannot write no/such/file: No such file or directory\nHint: choose another file with -o"
    ),
    "show d.shardviz -o w.svg": (
        "an SVG shows one tensor, and no tensor is named\n"
        "Hint: name one of layers.0.w, layers.1.w; or use --format html for all"
    ),
    "show d.shardviz layers.0.w --format html": (
        "an HTML page shows the whole run, not only layers.0.w\nHint: leave it out, or use --format svg"
    ),
    "show d.shardviz layers.0.w -o no/w.svg": (
        "cannot write no/w.svg: No such file or directory\nHint: choose another file with -o"
    ),
    "mesh 2,0": "mesh axis dim1 has size 0\nHint: every axis needs at least one rank",
    "mesh 2,x": "mesh '2,x': 'x' is not a size\nHint: write it as 2,4 or fsdp=2,tp=4",
    "mesh 2,4 --axes a": "--axes has 1 name for 2 sizes: a\nHint: name each axis, as in --axes a,dp",
    "mesh 2 --axes a,b": "--axes has 2 names for 1 size: a, b\nHint: name each axis, as in --axes a",
    "mesh a=2 --axes b": "mesh (a=2) already has names\nHint: leave --axes out",
    "probe tp_fsdp --mesh 2,4,2": (
        "mesh '2,4,2' has 3 sizes for 2 axes: fsdp, tp\nHint: give one size per axis, as in fsdp=2,tp=4"
    ),
    "audit --mesh 2;2": "mesh '2;2': '2;2' is not a size\nHint: write it as 2,4 or fsdp=2,tp=4",
    "explain [*/tp] --mesh tp=2": (
        "layout '[*/tp]' has a * in place of a size\nHint: write the size, or add --shape 12,12"
    ),
    "explain [12/tpp] --mesh fsdp=2,tp=2": (
        "mesh (fsdp=2, tp=2) has no axis 'tpp'\nHint: did you mean tp? its axes are fsdp, tp"
    ),
    "explain Shard(0) --mesh tp=2": ("placements alone do not give the size of the tensor\nHint: add --shape 12,12"),
    "explain Shard(1) --mesh tp=2 --shape 4": "Shard(1) on a tensor of 1 dim\nHint: its dims are 0 to 0",
    "explain Shard(-2) --mesh tp=2 --shape 4": "Shard(-2) on a tensor of 1 dim\nHint: -1 is its last dim, -1 its first",
    "explain Shard(0) --mesh tp=2 --shape []": (
        "Shard(0) on a tensor of 0 dims\nHint: a single number cannot be split"
    ),
    "explain (Shard(0)) --mesh fsdp=2,tp=4 --shape 12x12": (
        "1 placement for a mesh of 2 axes (fsdp=2, tp=4)\nHint: write one per axis, outermost first: fsdp, tp"
    ),
    "explain shard(0) --mesh tp=2": (
        "'shard(0)' is not a placement\nHint: Replicate(), Shard(0), _StridedShard(0, split_factor=2) or Partial()"
    ),
    "explain flaot32[12/tp] --mesh tp=2": (
        "layout 'flaot32[12/tp]': flaot32 is not a dtype\nHint: did you mean float32?"
    ),
    "explain [4] --mesh 2000,2000": "mesh (dim0=2000, dim1=2000) has more than 1,048,576 ranks",
    "explain [4] --mesh 200,200": ("mesh (dim0=200, dim1=200) has 40,000 ranks, more than 16,384"),
    "explain [4] --mesh tp=2 --shape x": "shape 'x' is not a list of sizes\nHint: write it as --shape 12,12",
}


@pytest.mark.parametrize("command", ERRORS)
def test_a_mistake_gets_one_line_and_a_hint(
    command: str, healthy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(healthy.parent)
    healthy.rename("d.shardviz")
    assert main(command.split(" ")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"shardviz: error: {ERRORS[command]}\n"


def test_formats_that_are_not_built_are_not_offered(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(healthy), "--format", "pdf"]) == 2
    assert "argument --format: invalid choice: 'pdf'" in capsys.readouterr().err
    assert main(["probe", "tp", "--launch", "frok"]) == 2
    assert capsys.readouterr().err.endswith("Hint: did you mean fork?\n")
    assert main(["probe", "tp", "--launch", "threads"]) == 2
    assert "argument --launch: invalid choice: 'threads' (choose from 'fork', 'spawn')" in capsys.readouterr().err


def test_a_file_name_with_control_characters_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "a\x1b[2Jb"]) == 2
    assert capsys.readouterr().err.startswith(
        "shardviz: error: a\\u001b[2Jb does not exist: no dump and no checkpoint is there\n"
    )


def test_a_reader_that_has_enough_ends_it_quietly(healthy: Path) -> None:
    command = f"{sys.executable} -m shardviz mesh 64,64 --all | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "mesh (dim0=64, dim1=64)  4,096 ranks\n0\n"
    assert done.stderr == ""


def test_a_full_disk_is_one_line(healthy: Path) -> None:
    command = f"{sys.executable} -m shardviz show {healthy} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "shardviz: error: No space left on device\n")


def test_without_a_stdout_nothing_is_reported_and_the_exit_code_stands(swapped: Path) -> None:
    command = f"{sys.executable} -m shardviz check {swapped} >&- 2>&-; echo $?"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_an_interrupt_is_one_line(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardviz.commands.common.dumps.read_parts", interrupt)
        assert main(["check", str(healthy)]) == 130
    assert capsys.readouterr().err == "shardviz: interrupted\n"


def test_a_damaged_file_is_reported_on_stderr_and_the_rest_is_shown(
    healthy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (healthy / "rank_00003.json").write_text("{")
    assert main(["show", str(healthy)]) == 0
    out, err = capsys.readouterr()
    assert "layers.[0-1].w" in out
    assert err.startswith(f"shardviz: warning: {healthy}/rank_00003.json is damaged")


def test_a_check_says_once_that_a_file_is_damaged(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (healthy / "rank_00003.json").write_text("{")
    assert main(["check", str(healthy)]) == 1
    out, err = capsys.readouterr()
    assert (out.count("rank_00003.json is damaged"), err) == (1, "")


def test_of_many_damaged_files_the_first_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=12"), {"w": "[12/tp]"})
    for rank in range(12):
        (folder / rank_file(rank)).write_text("{")
    assert main(["show", str(folder), "w"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "more files" in line] == [
        "shardviz: warning: 4 more files of ranks cannot be read"
    ]
    assert len(lines) == 8 + 1 + 2
    assert lines[-1] == "Hint: it has none that can be read"


def test_a_pipe_gets_no_color_unless_it_is_asked_for(swapped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in printed(capsys, "check", swapped)
    assert "\x1b[" in printed(capsys, "check", swapped, "--color", "always")


@pytest.mark.parametrize(
    ("environment", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), *at_night([({"TERM": "dumb"}, False)])]
)
def test_a_terminal_gets_color_unless_it_says_no(
    swapped: Path, environment: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert ("\x1b[" in _on_a_terminal(["check", str(swapped)], {"TERM": "xterm-256color", **environment})) == colored


def test_work_that_takes_long_says_how_far_it_is_on_a_terminal_only(
    healthy: Path,
) -> None:
    slow = "import time; from shardviz.commands.common import streams as p; p.PATIENCE = 0.0; p.INTERVAL = 0.01;"
    slow += "from shardviz.check import run; check = run.report_on;"
    slow += "run.report_on = lambda dump: (time.sleep(0.3), check(dump))[1];"
    code = f"{slow} import sys; from shardviz.cli import main; main(sys.argv[1:])"
    shown = _on_a_terminal(["check", str(healthy)], {"TERM": "dumb"}, ["-c", code])
    assert "\r\x1b[Kchecking 2 tensors on 8 ranks, 0 s" in shown
    assert shown.index("\r\x1b[K  tensor") > shown.rindex("checking 2 tensors")
    done = subprocess.run([sys.executable, "-c", code, "check", str(healthy)], capture_output=True, check=True)
    assert done.stderr == b""


def test_probes_go_on_below_where_the_terminal_is_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "probes").splitlines()
    shown = _on_a_terminal(["probes"], {"TERM": "dumb", "COLUMNS": "60"}).splitlines()
    assert max(map(len, shown)) <= 60
    assert len(shown) > len(lines)


def _on_a_terminal(args: list[str], environment: dict[str, str], run: Sequence[str] = ("-m", "shardviz")) -> str:
    ours, theirs = pty.openpty()
    command = [sys.executable, *run, *args]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, **environment}):
        os.close(theirs)
        shown = b""
        while block := _read(ours):
            shown += block
    os.close(ours)
    return shown.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # Linux says so when the other end is closed
        return b""


def test_a_stream_that_cannot_say_box_drawing_gets_ascii(swapped: Path) -> None:
    done = shardviz("show", swapped, "w", PYTHONIOENCODING="ascii")
    assert done.stdout.isascii()
    assert "| x 4" in done.stdout.replace("      ", " ")


@pytest.mark.parametrize("style", ["text", "json", "github", "junit"])
def test_a_name_that_a_stream_cannot_say_is_spelled_out(
    style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = make_dump(tmp_path / "d.shardviz", MESH, {"层.w": SWAPPED})
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with redirect_stdout(stream):
        assert main(["check", str(dump), "--format", style]) == 1
    assert capsys.readouterr().err == ""
    assert re.search(rb"\\u5c42\.w|&#23618;\.w", stream.buffer.getvalue())


def test_view_of_two_into_a_pipe_prints_what_diff_prints(
    healthy: Path, swapped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "view", healthy, swapped) == printed(capsys, "diff", healthy, swapped) != ""
    assert main(["view", str(healthy), "nowhere"]) == 2


def test_view_into_a_pipe_prints_what_show_prints(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "view", healthy) == printed(capsys, "show", healthy) != ""


OFFLINE = {
    "--help": ["torch", "textual", "numpy", "rich", "msgspec"],
    "--version": ["torch", "textual", "numpy", "rich"],
    "check D": ["torch", "textual"],
    "show D": ["torch", "textual"],
    "show D w": ["torch", "textual"],
    "view D": ["torch", "textual"],
    "explain [8/tp] --mesh tp=2": ["torch", "textual"],
    "mesh 2,4": ["torch", "textual"],
    "probes": ["torch", "textual"],
}
"""Commands in the order in which one interpreter runs them, and what none up to there may import."""

IN_ONE_INTERPRETER = """
import json, sys
from shardviz.cli import main
for command, forbidden in json.loads(sys.argv[1]).items():
    main([sys.argv[2] if word == "D" else word for word in command.split(" ")])
    print(json.dumps([command, [name for name in forbidden if name in sys.modules]]), file=sys.stderr)
"""


def test_no_offline_command_imports_torch(swapped: Path) -> None:
    command = [sys.executable, "-c", IN_ONE_INTERPRETER, json.dumps(OFFLINE), swapped]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    assert imported == [[command, []] for command in OFFLINE]


def test_importing_shardviz_imports_nothing_of_it() -> None:
    code = "import sys, shardviz; print(*sorted(name for name in sys.modules if name.startswith('shardviz.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
    code = "import sys, shardviz; shardviz.Mesh(('a',), (2,)); assert 'torch' not in sys.modules; shardviz.check_dump"
    subprocess.run([sys.executable, "-c", code + "; assert 'torch' not in sys.modules"], check=True)


def _broken(*args: object, **kwargs: object) -> None:
    raise ValueError("of the tool\nand more")


def test_a_bug_of_shardviz_is_one_line_that_says_where_to_report_it(
    healthy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardviz.commands.common.dumps.read_parts", _broken)
    monkeypatch.delenv("SHARDVIZ_DEBUG", raising=False)
    assert main(["check", str(healthy)]) == 70
    line, hint = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"shardviz: error: a bug in shardviz: ValueError: of the tool \(test_cli\.py:\d+, in _broken\)", line
    )
    assert hint == "Hint: report it in shardviz's issue tracker, with the command and what SHARDVIZ_DEBUG=1 prints"


def test_the_traceback_of_a_bug_can_be_asked_for(
    healthy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardviz.commands.common.dumps.read_parts", _broken)
    monkeypatch.setenv("SHARDVIZ_DEBUG", "1")
    assert main(["check", str(healthy)]) == 70
    assert "Traceback (most recent call last):" in capsys.readouterr().err


def _not_checked(folder: Path, names: Sequence[str]) -> None:
    for rank in MESH.ranks:
        change_rank(folder, rank, not_checked=tuple((name, "its ids are not exact") for name in names))
        for name in names:
            without(folder, rank, name)
    without_ids = tuple(stamp for stamp in read_run(folder).stamps if stamp.name not in names)
    change_run(folder, stamps=without_ids)


def test_strict_fails_where_anything_was_not_checked(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", MESH, {"w": "[16/tp, 8]", "b": "[8]"})
    assert main(["check", str(folder), "--strict"]) == 0
    _not_checked(folder, ["b"])
    assert main(["check", str(folder)]) == 0
    assert main(["check", str(folder), "--strict"]) == 1


@pytest.mark.parametrize("strict", [[], ["--strict"]])
@pytest.mark.parametrize("style", ["text", "json", "github", "junit"])
def test_a_check_of_nothing_is_one_line_and_not_clean(
    tmp_path: Path, style: str, strict: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_dump(tmp_path / "d.shardviz", MESH, {"w": "[16/tp, 8]", "b": "[8]"})
    for rank in MESH.ranks:
        record = read_rank(folder, rank)
        change_rank(
            folder,
            rank,
            bodies=tuple(replace(body, moment="initial", held=None) for body in record.bodies),
            not_checked=(("w", "its ids are not exact"), ("b", "its ids are not exact")),
        )
    assert main(["check", str(folder), "--format", style, *strict]) == 2
    expected = "shardviz: error: nothing was checked in 2 tensors: its ids are not exact\n"
    assert capsys.readouterr().err == expected


def test_a_dump_without_tensors_is_not_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(make_dump(tmp_path / "d.shardviz", MESH, {}))]) == 2
    assert capsys.readouterr().err == "shardviz: error: nothing was checked: the dump has no tensors\n"
