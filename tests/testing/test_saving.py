"""`shardviz probe --save-test`: the file that it writes."""

import sys
from pathlib import Path

import pytest

from shardviz import recipes
from shardviz.cli import main
from shardviz.errors import ShardvizError
from shardviz.testing.saving import check_file
from tests.testing.sessions import execute

MINE = """
from torch import nn
from shardviz.live.compat import fully_shard

AXES = ("fsdp",)


def build():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)
"""


def saved(probe, mesh, folder):
    file = folder / "test_saved.py"
    assert main(["probe", probe, "--mesh", mesh, "-o", str(folder / "dump"), "--save-test", str(file)]) == 0
    return file


def test_the_saved_test_of_ones_own_probe_finds_it_names_layers_once_and_passes(tmp_path):
    probe = tmp_path / "probes" / "mine.py"
    probe.parent.mkdir()
    probe.write_text(MINE)
    file = saved(str(probe), "2", tmp_path)
    text = file.read_text()
    assert 'probe = load_probe(Path(__file__).parent / "probes/mine.py", "build")' in text
    assert '    "*.weight": "[8/fsdp, 8]",\n    "*.bias": "[8/fsdp]",\n' in text
    done = execute([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_saved_test_of_a_shipped_probe_imports_it_by_name(tmp_path):
    text = saved("tp_fsdp", "2,2", tmp_path).read_text()
    assert "from shardviz.probes import tp_fsdp as probe\n" in text
    assert '    "up.weight": "[24/tp/fsdp, 12]",\n' in text
    assert '@spmd(mesh={"fsdp": 2, "tp": 2})\n' in text


def test_a_file_that_is_there_is_not_replaced_unless_forced(tmp_path):
    file = tmp_path / "test_saved.py"
    file.touch()
    with pytest.raises(ShardvizError, match="exists"):
        check_file(file, force=False)
    check_file(file, force=True)
    with pytest.raises(ShardvizError, match="is no Python file"):
        check_file(Path("saved.txt"), force=False)


def test_shipped_probes_are_told_from_others(tmp_path):
    assert recipes.is_shipped(recipes.find("tp_fsdp"))
    probe = tmp_path / "mine.py"
    probe.write_text(MINE)
    assert not recipes.is_shipped(recipes.find(str(probe)))
