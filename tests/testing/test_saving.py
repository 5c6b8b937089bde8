"""`shardviz probe --save-test`: the file that it writes."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from shardviz import probe_files
from shardviz.cli import main
from shardviz.commands.probe import check_file
from shardviz.errors import ShardvizError
from tests.lanes import TORCH, nightly, since_torch
from tests.testing.sessions import main as pytest_main
from tests.testing.sessions import only_in

MINE = """
from torch import nn
from torch.distributed.fsdp import fully_shard

AXES = ("fsdp",)


def build():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)
"""


NARROW = """
from torch import nn
from torch.distributed.fsdp import fully_shard

AXES = ("fsdp",)


def build():
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(2)))


def parallelize(model, mesh):
    model.bfloat16()
    fully_shard(model, mesh=mesh)
"""
BY_DAY = {"narrow": "2", **({"pp_fsdp_tp": "2,1,2"} if TORCH >= (2, 7) else {})}
AT_NIGHT = {"mine": "2", "fsdp_meta": "2"}
"""The meshes of probes whose tests are run, in one session of pytest for all of a lane."""


@dataclass(frozen=True)
class Saved:
    """Tests that were saved: their texts, and what pytest printed of them."""

    texts: dict[str, str]
    printed: str

    def text_of_passed(self, probe):
        assert f"test_{probe}.py::test_every_weight_is_where_it_was PASSED" in self.printed, self.printed
        return self.texts[probe]


def save(probe, mesh, folder, name="saved"):
    file = folder / f"test_{name}.py"
    assert main(["probe", probe, "--mesh", mesh, "-o", str(folder / f"dump_{name}"), "--save-test", str(file)]) == 0
    return file.read_text()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_and_run(tmp_path_factory.mktemp("saved"), BY_DAY)


@pytest.fixture(scope="module")
def saved_at_night(tmp_path_factory):
    return saved_and_run(tmp_path_factory.mktemp("saved"), AT_NIGHT)


def saved_and_run(folder, meshes):
    own = {"mine": folder / "probes" / "mine.py", "narrow": folder / "narrow.py"}
    own["mine"].parent.mkdir()
    own["mine"].write_text(MINE)
    own["narrow"].write_text(NARROW)
    texts = {name: save(str(own.get(name, name)), mesh, folder, name) for name, mesh in meshes.items()}
    return Saved(texts, pytest_main(folder, ["-v", "-p", "no:cacheprovider", *only_in(folder), str(folder)])[1])


@nightly
def test_the_saved_test_of_ones_own_probe_finds_it_names_layers_once_and_passes(saved_at_night):
    text = saved_at_night.text_of_passed("mine")
    assert 'probe = load_probe(Path(__file__).parent / "probes/mine.py", "build")' in text
    assert '    "*.weight": "[8/fsdp, 8]",\n    "*.bias": "[8/fsdp]",\n' in text


def test_the_saved_test_of_a_shipped_probe_imports_it_by_name(tmp_path):
    text = save("tp_fsdp", "2,2", tmp_path)
    assert "from shardviz.probes import tp_fsdp as probe\n" in text
    assert '    "up.weight": "[24/tp/fsdp, 12]",\n' in text
    assert '@spmd(mesh={"fsdp": 2, "tp": 2})\n' in text


def test_where_sharding_casts_to_a_dtype_without_room_for_ids_the_model_is_built_again(saved):
    text = saved.text_of_passed("narrow")
    assert "    capture_sharding(probe.build, probe.parallelize, shard_dump, mesh=mesh)\n" in text


@since_torch(2, 7)
def test_the_saved_test_of_a_pipeline_names_the_axes_of_its_stages_and_layers_once(saved):
    text = saved.text_of_passed("pp_fsdp_tp")
    assert '    "layers.*.up.weight": "[24/tp/fsdp, 12]",\n' in text
    assert "    assert_ordered(model, stamps=stamps, stage_axes=probe.STAGE_AXES)\n" in text


@nightly
def test_the_saved_test_of_weights_that_move_to_another_model_passes(saved_at_night):
    saved_at_night.text_of_passed("fsdp_meta")


def test_a_file_that_is_there_is_not_replaced_unless_forced(tmp_path):
    file = tmp_path / "test_saved.py"
    file.touch()
    with pytest.raises(ShardvizError, match="exists"):
        check_file(file, force=False)
    check_file(file, force=True)
    with pytest.raises(ShardvizError, match="is not a Python file"):
        check_file(Path("saved.txt"), force=False)


def test_shipped_probes_are_reported_from_others(tmp_path):
    assert probe_files.is_shipped(probe_files.find("tp_fsdp"))
    probe = tmp_path / "mine.py"
    probe.write_text(MINE)
    assert not probe_files.is_shipped(probe_files.find(str(probe)))
