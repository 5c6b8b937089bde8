"""Every place of all recorded cases has one state: `compare` looks at a part of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contract import store
from tests.contract.places import PARTS, cases_of, mistakes_in
from tests.lanes import nightly

if TYPE_CHECKING:
    from pathlib import Path


@nightly
@pytest.mark.parametrize("part", range(1, PARTS))
@pytest.mark.parametrize("name", store.rooms())
def test_every_place_has_one_state_and_what_is_held_is_near_its_reference(name: str, part: int, tmp_path: Path) -> None:
    room = store.load(name)
    room.keep(cases_of(room, part))
    store.lay_out(room, tmp_path / "files")
    wrong = []
    for number, case in enumerate(room.cases.values()):
        folder = store.place(case, tmp_path / "files", tmp_path / str(number))[0]
        wrong += [f"{case.name}: {text}" for text in mistakes_in(folder)]
    assert not wrong, "\n".join(wrong)
