"""Every command of the demos and the README prints what the page says, and draws the page's pictures.

`SHARDVIZ_GOLDEN=write pytest tests/demos` writes the pages anew from what the commands print; look at the difference.
"""

import os
import re
from pathlib import Path

import pytest

from tests.demos.following import follow
from tests.demos.pages import pictures, rewritten, steps, without_what_varies
from tests.lanes import at_night, nightly

ROOT = Path(__file__).parents[2]
AT_NIGHT = (
    *("live_bug", "plan", "to_3d", "convert", "two_jobs", "checkpoints", "jobs", "round_trips", "hsdp"),
    "notebook",  # by day a kernel runs in tests/notebook
)
SLOW = [ROOT / "demos" / name / "README.md" for name in AT_NIGHT]
"""Pages whose commands take five seconds to half a minute: a plan of 16,384 ranks, jobs of their own, many files."""

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "demos").rglob("*.md"))]


def steps_of(path):
    return steps(path.read_text(encoding="utf-8"))


DIFFERS = "the page differs; SHARDVIZ_GOLDEN=write pytest tests/demos writes it again, look at the difference"
WRITE = os.environ.get("SHARDVIZ_GOLDEN") == "write"


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path not in SLOW] + at_night(SLOW),
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_a_page_shows_what_its_commands_print_and_draw(path, tmp_path, monkeypatch):
    follow_page(path, "", tmp_path, monkeypatch)


@nightly
@pytest.mark.parametrize(
    ("path", "library"),
    [(path, needs) for path in PAGES for needs in sorted({step.needs for step in steps_of(path)} - {""})],
    ids=lambda case: case.relative_to(ROOT).as_posix() if isinstance(case, Path) else case,
)
def test_commands_that_need_a_library_print_what_the_page_shows(path, library, tmp_path, monkeypatch):
    pytest.importorskip(library, reason=f"needs {library}: pip install -e '.[frameworks]'")
    follow_page(path, library, tmp_path, monkeypatch)


def follow_page(path, library, tmp_path, monkeypatch):
    """Run the commands of a page that need this library, or none, and compare what they print and draw."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    page = path.read_text(encoding="utf-8")
    todo = [step for step in steps_of(path) if step.needs == library]
    texts = follow(todo, path.parent)
    drawn = [name for name in pictures(page) if any(Path(name).name in step.typed for step in todo)]
    if WRITE:
        new = iter(texts)
        path.write_text(rewritten(page, [next(new) if step in todo else step.text for step in steps_of(path)]), "utf-8")
        for picture in drawn:
            (path.parent / picture).write_bytes((tmp_path / Path(picture).name).read_bytes())
        return
    for step, text in zip(todo, texts, strict=True):
        assert without_what_varies(text) == without_what_varies(step.text), f"{step.typed or step.file}: {DIFFERS}"
    for picture in drawn:
        assert (tmp_path / Path(picture).name).read_bytes() == (path.parent / picture).read_bytes(), (
            f"{picture}: {DIFFERS}"
        )


def test_every_picture_of_a_page_is_drawn_by_one_of_its_commands():
    for path in PAGES:
        commands = [step.typed for step in steps_of(path)]
        for picture in pictures(path.read_text(encoding="utf-8")):
            assert any(Path(picture).name in command for command in commands), f"{path}: {picture}"


LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_page_links_to_is_there(path):
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_every_folder_of_a_demo_is_in_the_index():
    index = (ROOT / "demos" / "README.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "demos").glob("*/README.md")}
    assert folders
    assert {name for name in folders if f"]({name}/README.md)" in index} == folders


def test_every_file_of_a_demo_is_shown_or_run_by_its_page():
    for path in (ROOT / "demos").glob("*/*"):
        page = (path.parent / "README.md").read_text(encoding="utf-8")
        assert path.name == "README.md" or path.name in page, path
