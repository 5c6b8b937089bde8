import json
import re
from pathlib import Path

import pytest

from shardviz import probe_files
from shardviz.cli import main
from shardviz.commands.probes import ProbeScore, as_json
from shardviz.errors import ProbeError

PROBE = "def build(): ...\ndef parallelize(model, mesh): ...\n"


def test_shipped_probes_come_by_name_with_a_line_each():
    by_name = {recipe.name: recipe for recipe in probe_files.shipped()}
    assert by_name["tp_fsdp"].axes == ("fsdp", "tp")
    assert by_name["tp_fsdp"].mesh == (2, 4)
    assert by_name["bugs/left_to_right_2d"].summary.endswith("(pytorch#129229).")
    assert all(recipe.summary.endswith(".") for recipe in by_name.values())


def test_a_misspelt_probe_gets_the_name_that_was_meant():
    with pytest.raises(ProbeError) as caught:
        probe_files.find("tp_fdsp")
    assert str(caught.value) == "unknown probe 'tp_fdsp'\nHint: did you mean tp_fsdp?"


def test_a_users_file_is_read_and_not_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        '"""My model."""\nraise SystemExit\nAXES = ("dp",)\ndef make(): ...\ndef parallelize(model, mesh): ...\n'
    )
    recipe = probe_files.find(f"{file}:make")
    assert (recipe.summary, recipe.axes, recipe.mesh, recipe.build) == ("My model.", ("dp",), (), "make")


def test_axes_and_mesh_may_be_assigned_in_one_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PROBE + 'AXES = ("cp",)\nAXES, MESH = ("dp", "tp"), (2, 4)\n')
    found = probe_files.find(str(file))
    assert (found.axes, found.mesh) == (("dp", "tp"), (2, 4))
    file.write_text(PROBE + 'AXES = ("cp",)\nAXES, MESH = both()\n')
    with pytest.raises(ProbeError, match="AXES is not a literal tuple of str"):
        probe_files.find(str(file))


def test_functions_that_a_users_file_imports_count_as_its_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from model import make as build\nfrom training import parallelize\n")
    assert probe_files.find(str(file)).build == "build"


@pytest.mark.parametrize(
    ("source", "misspelt"),
    [
        ("def bacth(): ...", [("bacth", "batch")]),
        ("BATCH_AXIS = ('dp',)\nEXPECT = {}", [("BATCH_AXIS", "BATCH_AXES"), ("EXPECT", "expect")]),
        ("def batch(): ...\ndef batches(): ...", []),
        ("steps = 3\nclass Model:\n    num_steps = steps", []),
        ("def batch_of(rows): ...\ndef batch(): return batch_of(8)", []),
        ("hidden = 3\ndef helper(): ...", []),
        (
            "import torch\nimport json as steps\nfrom torch import optim as optimizers",
            [],
        ),
        ("from json import dumps as bacth", [("bacth", "batch")]),
    ],
)
def test_what_looks_like_a_hook_and_is_used_nowhere_is_named(tmp_path, source, misspelt):
    file = tmp_path / "mine.py"
    file.write_text(PROBE + source)
    assert list(probe_files.find(str(file)).misspelt) == misspelt


def test_no_shipped_probe_has_a_misspelt_hook():
    assert [recipe.name for recipe in probe_files.shipped() if recipe.misspelt] == []


def test_hooks_are_all_that_the_live_half_looks_for():
    sources = "".join(path.read_text() for path in Path(probe_files.__file__).parent.glob("live/**/*.py"))
    looked_for = set(re.findall(r'(?:get|has)attr\((?:self\.)?(?:on\.)?probe, "(\w+)"', sources))
    assert looked_for <= set(probe_files.HOOKS)
    assert set(probe_files.HOOKS) - looked_for == {"build", "parallelize", "AXES", "MESH", "KINDS", "TORCH"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def parallelize(model, mesh): ...", "has no build()"),
        ("def build(): ...", "has no parallelize()"),
        ("def build(:", "is not Python: invalid syntax (mine.py, line 1)"),
        ("AXES = 3\ndef build(): ...\ndef parallelize(m, d): ...", "AXES is not a literal tuple of str"),
        ("from absent_plan import AXES, build, parallelize", "AXES is not a literal tuple of str"),
        ("MESH = ('2',)\ndef build(): ...\ndef parallelize(m, d): ...", "MESH is not a literal tuple of int"),
    ],
)
def test_a_file_that_is_no_probe_says_what_is_wrong_with_it(tmp_path, source, message):
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ProbeError) as caught:
        probe_files.find(str(file))
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("tp_fsd.py", "did you mean {here}/tp_fsdp.py?"),
        ("nowhere.py", "{here} has no file with a similar name"),
        ("no/where.py", "folder {here}/no does not exist"),
    ],
)
def test_a_file_that_is_not_there_is_one_line_with_the_one_that_is_meant(tmp_path, asked, hint):
    (tmp_path / "tp_fsdp.py").write_text("")
    with pytest.raises(ProbeError, match=r"cannot read probe .*: No such file or directory") as caught:
        probe_files.find(str(tmp_path / asked))
    assert caught.value.hint == hint.format(here=tmp_path)


def test_a_torch_too_old_for_a_probe_is_reported_which_one_it_needs(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("TORCH = (99, 1)\ndef build(): ...\ndef parallelize(model, mesh): ...\n")
    with pytest.raises(ProbeError, match=r"mine.py needs torch 99.1 or newer, found [0-9]"):
        probe_files.check_torch(probe_files.find(str(file)))


@pytest.mark.parametrize(
    ("imports", "plan"),
    [
        ("from plan import AXES, MESH", "AXES = ('pp', 'tp')\nMESH = (2, 4)"),
        ("from plan import AXES_OF_ALL as AXES, MESH", "MESH = 2, 4\nAXES_OF_ALL: tuple = ('pp', 'tp')"),
        ("from plan import *", "NAMES = ('pp', 'tp')\nAXES = NAMES\nMESH = (2, 4)"),
        ("from plan import AXES, MESH", "from deeper.sizes import MESH, NAMES as AXES"),
        ("from plan import ALL, MESH\nAXES = ALL", "ALL = ()\nMESH = [2, 4]\nfrom deeper.sizes import NAMES as ALL"),
    ],
)
def test_axes_may_come_from_an_import_which_is_read_and_not_run(tmp_path, imports, plan):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/sizes.py").write_text("raise SystemExit\nfrom . import NAMES\nMESH = (2, 4)\n")
    (tmp_path / "deeper/__init__.py").write_text("NAMES = ('pp', 'tp')\n")
    (tmp_path / "plan.py").write_text(f"raise SystemExit\n{plan}\n")
    (tmp_path / "mine.py").write_text(f"{imports}\n{PROBE}")
    recipe = probe_files.find(str(tmp_path / "mine.py"))
    assert (recipe.axes, recipe.mesh) == (("pp", "tp"), (2, 4))


def test_axes_of_an_installed_package_are_read_in_its_file(tmp_path, monkeypatch):
    (tmp_path / "site/acme_plans").mkdir(parents=True)
    (tmp_path / "site/acme_plans/__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "site/acme_plans/dense.py").write_text("AXES = ('dp',)\n")
    (tmp_path / "mine.py").write_text(f"from acme_plans.dense import AXES\n{PROBE}")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert probe_files.find(str(tmp_path / "mine.py")).axes == ("dp",)


@pytest.mark.parametrize(
    "plan",
    ["AXES = make()", "from mine import AXES", "AXES = AXES", "AXES = ('dp', 2)", "AXES = (:", "OTHER = ('dp',)"],
)
def test_axes_that_cannot_be_read_without_running_are_refused_and_circles_end(tmp_path, plan):
    (tmp_path / "plan.py").write_text(plan)
    (tmp_path / "mine.py").write_text(f"from plan import AXES\n{PROBE}")
    with pytest.raises(ProbeError, match="AXES is not a literal tuple of str"):
        probe_files.find(str(tmp_path / "mine.py"))


def test_probes_are_listed_as_json_with_all_that_is_known_without_running(capsys):
    assert main(["probes", "--format", "json"]) == 0
    listed = {probe["name"]: probe for probe in json.loads(capsys.readouterr().out)}
    own = listed["bugs/left_to_right_2d"]
    assert (own["axes"], own["kinds"], own["distribution"]) == (["fsdp", "tp"], ["misordered"], "shardviz")
    assert Path(own["path"]).name == "left_to_right_2d.py"
    assert set(own) == {"name", "summary", "axes", "mesh", "kinds", "path", "distribution", "version"}


def test_scores_as_json_say_what_was_expected_and_found():
    right = ProbeScore("bugs/one", frozenset({"untied"}), frozenset({"untied"}))
    missed = ProbeScore("bugs/two", frozenset({"missing"}), frozenset())
    alarm = ProbeScore("quiet/three", frozenset(), frozenset({"foreign"}))
    told = as_json([right, missed, alarm], {"bugs/four": "not run: too new"})
    assert told["probes"][1] == {"name": "bugs/two", "expected": ["missing"], "found": [], "right": False}
    assert (told["bugs"], told["detected"], told["named"], told["false_alarms"]) == (2, 1, 1, 1)
    assert told["not_run"] == {"bugs/four": "not run: too new"}
