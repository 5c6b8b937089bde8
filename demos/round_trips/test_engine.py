import pytest
import torch
from engine import engine_on, send_by_parts, send_in_one_piece, trainer_on

from shardviz.testing import assert_transferred, spmd

MAP = {"gate_up": "cat(gate, up)"}
LAYOUTS = {"gate_up": "[*/tp, *]", "down": "[*, */tp]"}


@pytest.mark.parametrize("send", [send_by_parts, send_in_one_piece])
@spmd(mesh={"tp": 2})
def test_the_engine_has_what_the_trainer_has(mesh, send):
    trainer, engine = trainer_on(mesh), engine_on(mesh)
    with torch.no_grad():
        assert_transferred(trainer, engine, lambda: send(trainer, engine, mesh), map=MAP, layouts=LAYOUTS, mesh=mesh)
