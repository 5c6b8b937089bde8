"""The gauges count what they say, and the tree is no worse than the file that keeps them."""

import gc
from pathlib import Path

import pytest

from tests.gauges.__main__ import slowest
from tests.gauges.flow import ARROWS, EVERYWHERE, against_the_flow, circles, is_allowed
from tests.gauges.kept import ratchet, read, worse, write
from tests.gauges.reach.reached import entered_by, not_entered
from tests.gauges.size import Size, called_once, literal_tolerances, long_functions
from tests.gauges.tree import Source, sources


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    """Let go of the trees of all sources, which each process that is forked later would have to share.

    None of their million nodes is garbage until then: looking for it takes as long as making them.
    """
    gc.disable()
    yield
    gc.enable()
    sources.cache_clear()


def source(path, text=""):
    return Source(Path(path), text)


def test_the_tree_is_no_worse_than_the_kept_file_says():
    assert worse(ratchet(), read()) == []


def test_every_room_has_its_arrows():
    rooms = {file.room for file in sources() if file.module.startswith("shardviz")}
    assert rooms - ARROWS.keys() == set()
    assert {other for others in ARROWS.values() for other in others} <= ARROWS.keys()


@pytest.mark.parametrize(
    ("room", "other", "allowed"),
    [
        ("dump", "layout", True),
        ("layout", "dump", False),
        ("relate", "layout", True),
        ("relate", "dump", False),
        ("explain", "relate", True),
        ("explain", "text", True),
        ("explain", "check", False),
        ("explain", "live", False),
        ("check", "explain", True),
        ("live", "dump", True),
        ("live", "check", False),
        ("picture", "check", True),
        ("check", "picture", False),
        ("commands", "picture", True),
    ],
)
def test_arrows_point_along_the_flow(room, other, allowed):
    assert is_allowed(room, other) is allowed


def test_an_import_against_the_flow_is_named_once_a_room_and_none_for_types_alone():
    text = "from shardviz.check.run import one\nif TYPE_CHECKING:\n    from shardviz.live.api import two\n"
    inner = "def late():\n    import shardviz.check.run\n    from ..errors import ShardvizError\n"
    files = [
        source("shardviz/layout/mesh.py", text + inner),
        source("shardviz/check/run.py"),
        source("shardviz/live/api.py"),
        source("shardviz/errors.py"),
    ]
    assert against_the_flow(files) == [("shardviz.layout.mesh", "check")]


def test_a_circle_is_found_through_functions_and_relative_imports():
    files = [
        source("tui/one.py", "from .two import a"),
        source("tui/two.py", "def f():\n    from shardviz.tui import three"),
        source("tui/three.py", "import shardviz.tui.one"),
        source("tui/four.py", "from .three import b"),
    ]
    assert circles(files) == [["shardviz.tui.one", "shardviz.tui.three", "shardviz.tui.two"]]


def test_sizes_count_lines_and_statements_without_docstrings():
    file = source("shardviz/text.py", '"""Text."""\n\n\ndef f() -> int:\n    """Return one."""\n    return 1\n')
    assert Size.of([file]) == Size(lines=6, statements=2, modules=1)


def test_long_functions_and_those_called_once_are_named():
    text = "def f():\n" + "    pass\n" * 60 + "def _g(): pass\ndef _h(): _g()\n_h(), _h()\n"
    file = source("shardviz/text.py", text)
    assert long_functions([file]) == [("shardviz/text.py:1 f", 61)]
    assert called_once([file]) == ["shardviz/text.py:62 _g"]


def test_literal_tolerances_are_found_outside_their_module_alone():
    text = "a < 1e-6\nb > 0.0\nc == 1.0\nabs(d - e) <= 0.02 * f\ng < 3\n"
    found = literal_tolerances([source("shardviz/text.py", text), source("shardviz/relate/tolerance.py", text)])
    assert [one.partition(" ")[2] for one in found] == ["a < 1e-06", "abs(d - e) <= 0.02 * f"]


def test_the_slowest_tests_are_read_from_what_pytest_wrote(tmp_path):
    cases = "".join(f'<testcase classname="a" name="{name}" time="{time}"/>' for name, time in (("b", 1), ("c", 2.5)))
    (tmp_path / "run.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert slowest(tmp_path / "run.xml") == [("a::c", 2.5), ("a::b", 1.0)]


def test_what_is_kept_is_read_again_and_only_the_ratchet_may_not_rise(tmp_path):
    file = tmp_path / "today.txt"
    now = {"statements a line": "0.55", "functions over 60 lines": "7", "check: lines, statements, modules": "9 9 1"}
    now |= {"imports against the flow": "12", "circles of imports": "2"}
    write(now, ["for readers: 1"], file)
    assert read(file) == now
    risen = {name: value if "lines," in name else str(float(value) + 0.01) for name, value in now.items()}
    assert {line.partition(":")[0] for line in worse(risen, now)} == {name for name in now if "lines," not in name}
    assert worse(now, risen) == []
    assert all("make gauges" in line for line in worse(risen, now))


def test_what_a_process_enters_is_written_down_once(tmp_path):
    file = next(file for file in sources() if file.module == "shardviz.text")
    runs = [["-c", "from shardviz.text import listed; listed(['a', 'b'], 1)"]]
    entered = entered_by(runs, tmp_path)
    missing = {line.rpartition(" ")[2] for line in not_entered([file], entered)}
    assert "listed" not in missing
    assert "fold" in missing
    notes = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert entered_by(runs, tmp_path) == entered
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == notes


def test_rooms_that_all_may_import_import_none():
    assert all(not ARROWS[room] for room in EVERYWHERE)
