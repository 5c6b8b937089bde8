"""A dump whose files a test may spoil: they are put back after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.dump.samples import write_sample
from tests.dumps import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_sample(tmp_path_factory.mktemp("hostile") / "a.shardviz")
    (path / "rank_00000.json").unlink()  # a missing rank is no error, and there is less to read
    return path


@pytest.fixture
def restored(one_rank: Path) -> Iterator[Path]:
    """The dump of one rank, for a test that spoils its files."""
    contents = {name: (one_rank / name).read_bytes() for name in ("run.json", "rank_00001.json")}
    yield one_rank
    for name, content in contents.items():
        replace_file(one_rank / name, content)
