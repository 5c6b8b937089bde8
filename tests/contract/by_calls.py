"""`python -m tests.contract.by_calls`: the room `calls`, of what ranks call inside of a module, made by rule.

Small modules (`taped_modules`, `taped_parts`, `taped_rows`) and steps around a model (`taped_steps`) are run for all
ranks in one process (`taping`), each of them right and with every mistake that its `Tape.is_wrong` names. Meshes take
turns.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardviz.layout.mesh import parse_mesh
from tests.contract import store, taped_modules, taped_parts, taped_rows
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.contract.step_changes import S0, S1, R
from tests.contract.taped_steps import BOTH, STEPS, split_loss, step_of
from tests.contract.taping import dump_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.contract.by_step import Step

ROOM = "calls"
MOST_ALIKE = 2
MESHES = tuple(map(parse_mesh, ("tp=2", "dp=2,tp=2", "tp=4")))
RETURNED: dict[tuple[str, str], str] = {
    (S0, R): "mlp residual_in_sum fused labels replaced branches hooked noise halves apart",
    (R, R): "attention vocabulary loop padding room ratio drawn selected",
    (R, S0): "experts positions masked gathered heads_of_keys counted exchanged rolled",
    (S0, S1): "norm softmax",
    (R, S1): "causal grouped biased",
}
"""The modules by the placements of what they return."""


def bugs_of(*functions: Callable[..., object]) -> list[str]:
    """Return the mistakes that some functions name."""
    calls = re.findall(r"is_wrong\(([^)]*)\)", "".join(map(inspect.getsource, functions)))
    return list(dict.fromkeys(text for call in calls for text in re.findall(r'"([^"]*)"', call)))


def modules() -> Iterator[tuple[str, Step]]:
    """Yield every module right and with each mistake, on two ranks and on another mesh."""
    programs = {**vars(taped_modules), **vars(taped_parts), **vars(taped_rows)}
    for returned, names in RETURNED.items():
        for name in names.split():
            for at, bug in enumerate(("", *bugs_of(programs[name]))):
                for mesh in (MESHES[0], MESHES[1 + at % 2]):
                    size = "x".join(map(str, mesh.shape))
                    yield f"{name} {bug or 'right'}, {size}", dump_of(programs[name], mesh, bug, returned)


def steps() -> Iterator[tuple[str, Step]]:
    """Yield every step right and with each mistake."""
    for program, (_, helpers) in STEPS.items():
        for bug in ("", *bugs_of(program, *helpers), BOTH):
            mesh = parse_mesh("dp=2,tp=2" if bug == BOTH or program is split_loss else "dp=2,tp=1")
            yield f"{program.__name__} {bug or 'right'}", step_of(program, mesh, bug)


def main() -> None:
    """Make the room, judge it, and keep what is judged in many ways."""
    room_ = store.Room(ROOM)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for at, (name, step) in enumerate(chain(modules(), steps())):
            room_.add(name, ("check", "{0}"), [store.files_of(step.write(Path(folder, f"{at}.shardviz")))])
        room_.keep(chosen(judge_room(room_), MOST_ALIKE, program_of))
    record(room_)


def program_of(name: str) -> str:
    """Return the program's name."""
    return name.partition(" ")[0]


if __name__ == "__main__":
    main()
