"""What is installed is what is in the checkout, and the README's commands set it up."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it there

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
FOLDERS = {"shardviz", "probes", "tui", "tests", "demos"}
FILES = {"pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "SECURITY.md"}


@pytest.mark.parametrize("room", ["probes", "tui"])
def test_a_room_at_the_top_is_a_package_of_shardviz_by_a_link(room):
    assert (ROOT / "shardviz" / room).readlink() == Path("..", room)


def test_every_folder_with_modules_is_a_package():
    for room in ("shardviz", "probes", "tui"):
        for module in (ROOT / room).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} has no __init__.py"


def test_the_top_level_holds_what_the_design_allows():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tops = {name.partition("/")[0] for name in tracked.splitlines()}
    assert {top for top in tops if not top.startswith(".")} == FOLDERS | FILES


def test_the_readme_has_two_commands_that_set_up_everything():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^python3 -m venv .*$", readme, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("shardviz probe tp_fsdp --mesh 2,4")
    assert commands[1].endswith("python -m pytest -n 3")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1100


def test_every_python_with_a_classifier_is_tested_and_so_is_the_lowest_torch():
    tested = re.findall(r'python: "([\d.]+)", torch: "([\d.]+)"', WORKFLOW)
    listed = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert listed
    assert listed <= {python for python, _ in tested}
    (lowest,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    assert f"{lowest.removeprefix('torch>=')}.0" in {torch for _, torch in tested}


def test_the_changelog_has_the_version():
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()
