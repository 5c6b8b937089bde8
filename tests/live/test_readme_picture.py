"""The picture in the README is what its command draws."""

from pathlib import Path

from shardviz.cli import main
from tests.live.probing import run_probe

ROOT = Path(__file__).parents[2]


def test_the_picture_of_the_bug_is_what_show_draws_of_it(tmp_path):
    run_probe("bugs/left_to_right_2d", "2,4", tmp_path / "bug.shardviz")
    drawn = tmp_path / "bug.svg"
    assert main(["show", str(tmp_path / "bug.shardviz"), "weight", "--format", "svg", "-o", str(drawn)]) == 0
    kept = ROOT / "demos" / "left_to_right_2d.svg"
    assert drawn.read_text() == kept.read_text()
    assert "demos/left_to_right_2d.svg" in (ROOT / "README.md").read_text()
