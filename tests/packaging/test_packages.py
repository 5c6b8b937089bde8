"""What is installed is what is in the checkout: setuptools is told every package by name."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = {"shardviz": "shardviz", "probes": "shardviz.probes", "tui": "shardviz.tui"}


def test_every_package_of_the_checkout_is_in_the_wheel():
    listed = re.search(r"\npackages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    assert listed is not None
    there = set()
    for room, package in ROOMS.items():
        for init in (ROOT / room).rglob("__init__.py"):
            below = init.parent.relative_to(ROOT / room).parts
            there.add(".".join((package, *below)))
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == there


def test_every_style_sheet_and_script_of_the_checkout_is_in_the_wheel():
    data = (ROOT / "pyproject.toml").read_text().partition("[tool.setuptools.package-data]")[2].partition("\n[")[0]
    given = re.findall(r'\n"?([\w.]+)"? = \[(.*)\]', data)
    listed = {(package, suffix) for package, patterns in given for suffix in re.findall(r'"\*(\.\w+)"', patterns)}
    there = {
        (".".join((package, *path.parent.relative_to(ROOT / room).parts)), path.suffix)
        for room, package in ROOMS.items()
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".css", ".tcss", ".js")
    }
    assert there <= listed


def test_the_readme_has_two_commands_that_set_up_everything():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^python3 -m venv .*$", readme, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("shardviz probe tp_fsdp --mesh 2,4")
    assert commands[1].endswith("python -m pytest -n 3")
