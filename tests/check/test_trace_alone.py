"""A dump that has a traced step and no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.cli import main
from shardviz.commands import view
from shardviz.dump.gather import NO_WEIGHTS
from tests.check.checking import check_made
from tests.check.records import change_rank

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_trace_alone_is_for_diff_and_is_printed_instead_of_viewed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_made(tmp_path, "tp=2", {"w": "[8/tp]"})
    folder = tmp_path / "made.shardviz"
    for rank in range(2):
        change_rank(folder, rank, tensors=(), bodies=(), not_checked=(("", NO_WEIGHTS),))
    (folder / "trace").mkdir()
    assert main(["check", str(folder)]) == 2
    assert f"the dump has only a traced step; compare it with a second job's: shardviz diff {folder} OTHER" in (
        capsys.readouterr().err
    )
    monkeypatch.setattr(view, "_on_a_screen", lambda: True)
    assert main(["view", str(folder)]) == 0
    assert "has no tensors" in capsys.readouterr().out
