"""The examples of the catalogue's pages are what shardviz prints of recorded cases today."""

from __future__ import annotations

from tests.docs.examples import examples


def test_the_page_of_a_cause_shows_what_its_recorded_case_prints() -> None:
    of_causes = examples(["maps"])
    assert "misapplied-function" in of_causes
    for cause, example in of_causes.items():
        assert example.command.startswith("shardviz ")
        assert example.printed, cause
        assert "input_" not in example.command, example.command
