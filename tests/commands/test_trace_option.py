"""`--trace`: which modules of a step are followed."""

import pytest

from shardviz.cli import main
from shardviz.errors import ShardvizError
from shardviz.live.trace_modules import ALL, NONE, Followed


@pytest.mark.parametrize(
    ("text", "followed"), [("all", ALL), ("off", NONE), ("modules=layers.1.*", Followed("layers.1.*"))]
)
def test_it_is_all_off_or_a_pattern(text, followed):
    assert Followed.parse(text) == followed


@pytest.mark.parametrize("text", ["", "some", "modules=", "module=x", "ALL"])
def test_anything_else_is_refused_with_what_it_may_be(text):
    with pytest.raises(ShardvizError, match="is not all, off or modules=PATTERN") as raised:
        Followed.parse(text)
    assert "modules=layers.1" in raised.value.hint


@pytest.mark.parametrize(("text", "module"), [("lines", ""), ("lines=", ""), ("lines=layers.1", "layers.1")])
def test_lines_of_a_job_are_of_one_module_and_all_modules_are_followed(text, module):
    assert Followed.parse(text, of_job=True) == Followed("*", module)
    with pytest.raises(ShardvizError, match="is not all, off or modules=PATTERN"):
        Followed.parse(text)


def test_a_pattern_is_of_names_as_of_files_and_the_model_is_always_in_it():
    assert Followed("layers.*.attn").includes("layers.3.attn")
    assert not Followed("layers.*.attn").includes("layers.3.mlp")
    assert Followed("layers.*").includes("")
    assert not NONE.includes("")


def test_a_step_to_trace_without_a_trace_is_refused(capsys):
    assert main(["run", "--trace-step", "2", "--", "python", "train.py"]) == 2
    assert "--trace-step 2: no step is traced without --trace" in capsys.readouterr().err
