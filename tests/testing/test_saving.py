"""`shardviz probe --save-test`: the file that it writes."""

import sys
from pathlib import Path

import pytest

from shardviz import probe_files
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


NARROW = """
from torch import nn
from shardviz.live.compat import fully_shard

AXES = ("fsdp",)


def build():
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(2)))


def parallelize(model, mesh):
    model.bfloat16()
    fully_shard(model, mesh=mesh)
"""


def test_where_sharding_casts_to_a_dtype_without_room_for_ids_they_are_written_in_passes(tmp_path):
    probe = tmp_path / "narrow.py"
    probe.write_text(NARROW)
    file = saved(str(probe), "2", tmp_path)
    assert "    capture_sharding(probe.build, probe.parallelize, shard_dump, mesh=mesh)\n" in file.read_text()
    done = execute([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_saved_test_of_a_pipeline_names_the_axes_of_its_stages_and_layers_once(tmp_path):
    file = saved("pp_fsdp_tp", "2,2,2", tmp_path)
    text = file.read_text()
    assert '    "layers.*.up.weight": "[24/tp/fsdp, 12]",\n' in text
    assert "    assert_ordered(model, stamps=stamps, stage_axes=probe.STAGE_AXES)\n" in text
    done = execute([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_saved_test_of_weights_that_move_to_another_model_passes(tmp_path):
    file = saved("fsdp_meta", "2", tmp_path)
    done = execute([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_file_that_is_there_is_not_replaced_unless_forced(tmp_path):
    file = tmp_path / "test_saved.py"
    file.touch()
    with pytest.raises(ShardvizError, match="exists"):
        check_file(file, force=False)
    check_file(file, force=True)
    with pytest.raises(ShardvizError, match="is not a Python file"):
        check_file(Path("saved.txt"), force=False)


def test_shipped_probes_are_told_from_others(tmp_path):
    assert probe_files.is_shipped(probe_files.find("tp_fsdp"))
    probe = tmp_path / "mine.py"
    probe.write_text(MINE)
    assert not probe_files.is_shipped(probe_files.find(str(probe)))
