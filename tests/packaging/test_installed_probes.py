"""Probes that another distribution brings: a real one, which pip installs, with an entry point for each probe."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from shardviz import probe_files
from shardviz.cli import main
from shardviz.errors import ProbeError
from shardviz.probe_files import installed

if TYPE_CHECKING:
    from pathlib import Path

PROBE = '''"""Two layers of experts."""
from torch import nn
from torch.distributed.fsdp import fully_shard

from .sizes import SIZE

AXES = ("ep",)


def build():
    return nn.Linear(SIZE, SIZE)


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)
'''

FILES = {
    "acme/__init__.py": "raise SystemExit('listing probes imported the package')",
    "acme/probes/__init__.py": "",
    "acme/probes/moe.py": PROBE,
    "acme/probes/sizes.py": "SIZE = 6",
    "acme/probes/empty.py": "",
    "acme/probes/twice.py": PROBE,
}

ENTRIES = """\
[shardviz.probes]
moe = acme.probes.moe
tp = acme.probes.moe
gone = acme.probes.gone
nowhere = nobody.probes
empty = acme.probes.empty
odd = ???
"""


def wheel_of(folder: Path, name: str, files: dict[str, str], entries: str) -> Path:
    """Write a wheel beside the folder that it is to be installed in."""
    info = f"{name}-1.2.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entries,
    }
    wheel = folder.with_name(f"{name}-1.2-py3-none-any.whl")
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, **metadata}.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, *metadata, f"{info}/RECORD"]))
    return wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "packages"
    wheel = wheel_of(folder, "acme_probes", FILES, ENTRIES)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    return folder


@pytest.fixture(autouse=True)
def acme(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)


def test_probes_are_listed_with_their_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probes"]) == 0
    out, err = capsys.readouterr()
    (row,) = [row for row in out.splitlines() if row.startswith("acme_probes/moe ")]
    assert row.split(maxsplit=2) == ["acme_probes/moe", "ep", "Two layers of experts. (acme_probes 1.2)"]
    assert "tp_fsdp" in out
    assert len(err.splitlines()) == 4, "a line each for those that are broken"


BROKEN = {
    "gone": "probe acme_probes/gone: module acme.probes.gone is not installed\nHint: install acme_probes again",
    "nowhere": "probe acme_probes/nowhere: module nobody.probes is not installed\nHint: install acme_probes again",
    "odd": "probe acme_probes/odd: entry point '???' does not name a module\nHint: write odd = \"package.module\"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_gets_a_line_and_a_hint(name: str) -> None:
    for asked in (name, f"acme_probes/{name}"):
        with pytest.raises(ProbeError) as raised:
            probe_files.find(asked)
        assert str(raised.value) == BROKEN[name]


def test_a_module_that_is_no_probe_is_reported_like_a_file_that_is_none() -> None:
    with pytest.raises(ProbeError, match=r"empty\.py has no build\(\)"):
        probe_files.find("empty")


def test_a_probe_is_found_by_its_bare_name_and_shardvizs_own_come_first() -> None:
    assert probe_files.find("moe") == probe_files.find("acme_probes/moe")
    assert probe_files.find("tp").module == ""
    assert probe_files.find("acme_probes/tp").module == "acme.probes.moe"


def test_a_misspelt_one_gets_the_name_that_was_meant() -> None:
    with pytest.raises(ProbeError) as raised:
        probe_files.find("acme_probes/moo")
    assert raised.value.hint == "did you mean acme_probes/moe?"


def test_a_name_that_two_distributions_have_must_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "other"
    wheel = wheel_of(folder, "other_probes", {"other.py": PROBE}, "[shardviz.probes]\nmoe = other\n")
    zipfile.ZipFile(wheel).extractall(folder)  # as pip does, without its second
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ProbeError) as raised:
        probe_files.find("moe")
    assert raised.value.message == "2 distributions have a probe 'moe'"
    assert raised.value.hint == "name one: acme_probes/moe, other_probes/moe"
    assert [recipe.name for recipe in installed()[0] if recipe.name.startswith("other")] == ["other_probes/moe"]


def test_it_runs_under_its_own_module_name_with_what_stands_beside_it(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = site / "acme" / "__init__.py"
    refusing = package.read_text()
    package.write_text("")
    monkeypatch.chdir(tmp_path)
    try:
        assert main(["probe", "moe", "--mesh", "2"]) == 0
    finally:
        package.write_text(refusing)
    out, err = capsys.readouterr()
    assert err == "wrote moe-2.shardviz; look at it with: shardviz view moe-2.shardviz\n"
    assert "weight  float32[6/ep, 6]" in out
