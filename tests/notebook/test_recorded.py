"""Every recorded run of a right probe: the shards of its weights and results give what the unsharded model has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import shardviz
from shardviz.errors import DumpError
from shardviz.relate.tolerance import NORM
from tests.contract.store import lay_out, load, place

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from shardviz.notebook.dumps import TensorOfRun

PROBE = "test_a_probe_is_clean_at_its_own_mesh_and_at_others["
ROLES = ("param", "grad", "output")


def whole(tensor: TensorOfRun) -> NDArray[Any] | None:
    """Return a tensor that is put together; None if it is larger than what a probe writes."""
    try:
        return tensor.full()
    except DumpError as error:
        if "hash" in error.message:
            return None
        raise


def test_what_ranks_hold_makes_what_the_unsharded_model_has(tmp_path: Path) -> None:
    room = load("probes")
    files = tmp_path / "files"
    lay_out(room, files)
    compared = 0
    for number, case in enumerate(case for case in room.cases.values() if PROBE in case.name):
        (tmp_path / f"{number}").mkdir()
        run = shardviz.load(place(case, files, tmp_path / f"{number}")[0])
        assert run.check().clean or not run.tensors, case.name
        results = [result for tensor in run.tensors.values() for result in (tensor, tensor.grad) if result is not None]
        for result in results:
            wanted = result.reference if result.role in ROLES else None
            full = whole(result) if wanted is not None else None
            if full is not None:
                allowed = NORM["bfloat16" if "mixed_precision" in case.name else "float32"]
                assert np.linalg.norm(full - wanted) <= allowed * np.linalg.norm(wanted), (case.name, result)
                compared += 1
    assert compared > 80
