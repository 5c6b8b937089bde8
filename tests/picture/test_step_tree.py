"""A step as a tree of modules, the first wrong one open: lines, JSON, the page, and the numbers as heat."""

import json

import numpy as np
import pytest

from shardviz.check.diff import Difference
from shardviz.check.step.comparison import compared
from shardviz.check.step.departure import Beside, Departure, StepDifference
from shardviz.check.step.evidence import Evidence
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, MeshRecord, TensorRecord
from shardviz.dump.records.trace import PointRecord, of_point
from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.picture.html.run import difference_html, modules_section
from shardviz.picture.model.step import StepHeat, step_heats, step_json, step_tree
from shardviz.picture.text.difference import difference_lines
from shardviz.picture.text.step import heat_lines, module_lines, node_line, step_lines
from shardviz.picture.text.terminal import ASCII, UNICODE, Terminal
from tests.findings import finding_of

ENDED = ("embed", "layers.0.attn", "layers.0", "layers.1.attn.o", "layers.1.attn", "layers.1", "head", "")
WRONG = ENDED[3:]
WHOLE = np.arange(24.0).reshape(4, 6) + 1
FOUND = finding_of("wrong-value", "error", "output", (0,), "the output is off", cause="a sum", module="layers.1.attn.o")


def point(name, what, **more):
    is_wrong = name in WRONG if what == "output" else name in WRONG[1:]
    state = "odd" if is_wrong else "right"
    layout = "" if is_wrong else "[4, 6/tp]"
    return PointRecord(name, what, ENDED.index(name), state, layout=layout, type="Linear", **more)


@pytest.fixture
def dump(tmp_path):
    folder = prepare_folder(tmp_path / "run")
    mesh = MeshRecord(("tp",), (2,), (0, 1))
    write_run(folder, RunRecord(1, "test", "none", 2, mesh=mesh, probe="test"))
    trace = tuple(point(name, what) for name in ENDED for what in ("input", "output"))
    name = of_point("layers.1.attn.o", "output", 0, 0)
    for rank in (0, 1):
        own = (2 * WHOLE[:, 3 * rank : 3 * rank + 3]).tolist()
        bodies = [Body("activation", "step", (4, 6), (4, 3), "float64", values=own)]
        bodies.append(Body("output", "step", (2,), (2,), "float64", values=[5.0, 1.0]))
        names = [name, "output"]
        if rank == 0:
            bodies += [
                Body("activation", "reference", (4, 6), (4, 6), "float64", values=WHOLE.tolist()),
                Body("output", "reference", (2,), (2,), "float64", values=[1.0, 1.5]),
            ]
            names += [name, "output"]
        tensors = tuple(TensorRecord(one, at) for at, one in enumerate(names))
        write_rank(folder, RankRecord(1, rank, 2, "host", bodies=tuple(bodies), tensors=tensors, trace=trace))
    return dump_of(read_files(folder))


def lines_of(dump, findings, glyphs=UNICODE):
    heats = step_heats(dump) if findings else []
    return [one.plain for one in step_lines(step_tree(dump, findings), heats, Terminal(100, glyphs))]


def test_calls_are_nested_by_name_and_stand_before_what_they_call(dump):
    (model,) = step_tree(dump, [FOUND]).roots
    assert [node.name for node in model.children] == ["embed", "layers.0", "layers.1", "head"]
    assert model.children[2].children[0].children[0].is_first
    assert model.size == 7


def test_the_calls_around_the_first_wrong_one_are_open_and_all_others_closed(dump):
    shown = [node.name for node in step_tree(dump, [FOUND]).lines()]
    assert shown == ["the model", "embed", "layers.0", "layers.1", "layers.1.attn", "layers.1.attn.o", "head"]


def test_a_right_step_is_closed_below_the_model_itself(dump):
    assert [node.name for node in step_tree(dump, []).lines()] == ["the model", "embed", "layers.0", "layers.1", "head"]


def test_the_first_wrong_one_is_marked_and_closed_ones_say_how_many_they_close_over(dump):
    lines = lines_of(dump, [FOUND])
    assert sum("first wrong module" in line for line in lines) == 1
    assert next(line for line in lines if "layers.0" in line).endswith("… 1 call")
    assert any("✓✗" in line and "layers.1.attn.o" in line for line in lines)
    assert "✗ the output is off" in lines


def test_a_module_names_its_own_tensors_that_findings_name_and_what_closes_over_it_counts_them(dump):
    of = finding_of("wrong-scale", "error", "layers.0.attn.w", (0,), "the gradient is off")
    opened = lines_of(dump, [of])
    assert [line for line in opened if "✗ w" in line and "layers.0.attn" in line] == [
        "✓✓··     layers.0.attn  Linear  ✗ w"
    ]
    closed = step_tree(dump, [of])
    assert node_line(closed.roots[0], UNICODE, is_open=False).plain.endswith("✗ 1 tensor inside")
    assert [node.wrong for node in closed.within("layers.0.attn").roots] == [("w",)]
    assert "tensor inside" not in "\n".join(lines_of(dump, [FOUND]))


def test_the_calls_of_one_module_are_all_open(dump):
    tree = step_tree(dump, [])
    lines = [line.plain for line in module_lines(tree, "layers.1", Terminal(100, UNICODE))]
    assert lines[0].startswith("3 calls")
    assert [line.split()[1] for line in lines[-3:]] == ["layers.1", "layers.1.attn", "layers.1.attn.o"]


def test_the_numbers_of_ranks_stand_beside_those_due_and_the_difference(dump):
    heats = step_heats(dump)
    assert [heat.ranks for heat in heats] == [(0,), (1,)]
    assert heats[0].layout == "[4, 6/tp]"
    assert np.array_equal(heats[1].due, WHOLE[:, 3:])
    assert np.array_equal(heats[1].off, WHOLE[:, 3:])
    assert any("has" in line and "unsharded model" in line and "difference" in line for line in lines_of(dump, [FOUND]))


def test_ascii_is_enough(dump):
    assert all(line.isascii() for line in lines_of(dump, [FOUND], ASCII))


def test_differences_within_rounding_are_blank_and_any_other_is_seen():
    off = np.array([[0.0, 1e-9, 1e-3, 9.0]])
    heat = StepHeat((0,), "", (1, 4), off + 1, off + 1, off, 1e-6, True)
    assert heat.levels("off", 6) == [[0, 0, 1, 5]]
    assert heat_lines(heat, UNICODE)[2].plain.rstrip().endswith("  ·█")


def test_numbers_that_are_not_finite_are_the_darkest():
    off = np.array([[0.0, np.nan, np.inf]])
    assert StepHeat((0,), "", (1, 3), off, off, off, 1e-6, True).levels("off", 6) == [[0, 5, 5]]


def test_json_has_the_same_tree(dump):
    (model,) = [json.loads(json.dumps(root.to_json())) for root in step_tree(dump, [FOUND]).roots]
    attention = model["calls"][2]["calls"][0]
    assert attention["calls"][0]["first_wrong"]
    assert attention["states"] == {"input": "odd", "output": "odd"}
    assert model["calls"][1]["layouts"] == {"input": "[4, 6/tp]", "output": "[4, 6/tp]"}


def test_the_page_has_the_tree_with_the_first_wrong_one_open(dump):
    page = modules_section(step_tree(dump, [FOUND]), step_heats(dump))
    assert page.count('<details open="">') == 3
    assert page.count("<details>") == 1
    assert "first wrong module" in page
    assert page.count('role="img"') == 6


def test_a_step_that_was_not_followed_says_so(dump, tmp_path):
    folder = prepare_folder(tmp_path / "other")
    write_run(folder, RunRecord(1, "test", "none", 1, mesh=MeshRecord(("tp",), (1,), (0,))))
    write_rank(folder, RankRecord(1, 0, 1, "host"))
    empty = dump_of(read_files(folder))
    assert "was not followed" in lines_of(empty, [])[0]
    assert modules_section(step_tree(empty, []), []) == ""


def test_two_jobs_steps_are_a_page_text_and_json(dump):
    evidence = Evidence(dump, tuple(compared(dump)))
    first = Departure("sharded", FOUND.module, "", "the second run: its output is off", "a sum is missing", 2)
    step = StepDifference((first,), 3, agreement="the jobs agree", sides=Beside(evidence, (FOUND,), "the first run"))
    page = difference_html("two and four", step)
    assert "first wrong module" in page
    assert "the first run&#x27;s" in page or "the first run's" in page
    assert "the unsharded model" not in page
    said = "\n".join(one.plain for one in difference_lines(Difference((), (), (), (), 0, step), Terminal(100, UNICODE)))
    assert "first wrong module" in said
    assert "✓ the first run's" in said
    found = step_json(step)
    assert found["calls"]
    assert "beside" not in step.to_json()
