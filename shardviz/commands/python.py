"""The verbs that Python has, too: `shardviz.show` and `shardviz.run_probe`.

Nothing here communicates: a DTensor is drawn as its placements claim. Torch is used only for torch's own objects.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.display import Picture

_LAYOUT = re.compile(r"\s*[\w.]*\[")
"""How a layout in the notation begins."""


def run_probe(file: str) -> None:
    """Run a file as `shardviz probe FILE` does, with the command line's arguments, and exit.

    Under torchrun this process becomes one rank of that job; otherwise the ranks are launched.

    Args:
        file: The probe's file: `__file__`.

    Example:
        At the end of a probe, so that `python FILE --mesh 2,4` and `torchrun --nproc-per-node 8 FILE` run it:

            if __name__ == "__main__":
                shardviz.run_probe(__file__)
    """
    from shardviz.cli import main

    sys.exit(main(["probe", file, *sys.argv[1:]]))


def show(what: object, tensor: str | None = None, *, mesh: Mesh | str | None = None) -> None:
    """Display a picture in a notebook, or print it; of several ranks only rank 0 prints.

    Args:
        what: What `shardviz.load` gives, a tensor, a report or a finding of it; a dump, or the path of one or of a
            checkpoint; a `shardviz.Layout`, or one in the notation, `"[12/tp/fsdp, 12]"`; a mesh; a DTensor; or a
            module, whose parameters and buffers are listed.
        tensor: The name of the one tensor to draw, for a run, a dump or a module.
        mesh: The mesh of a layout in the notation, `"fsdp=2,tp=4"`.

    Raises:
        ShardvizError: It is none of these, or the dump or the tensor is not there.
    """
    from shardviz.checkpoint.open import is_checkpoint
    from shardviz.notebook.load import load
    from shardviz.picture.display import display, picture_of

    if _rank() != 0:
        return
    if isinstance(what, str) and _LAYOUT.match(what) and not Path(what).exists():
        what = _layout(what, mesh)
    if isinstance(what, (str, Path)) and is_checkpoint(Path(what)):
        what = load(what)
    display(_of_torch(what, tensor) or picture_of(what, tensor))


def _layout(text: str, mesh: Mesh | str | None) -> Layout:
    from shardviz.layout.mesh import parse_mesh
    from shardviz.layout.notation import parse

    if mesh is None:
        raise ShardvizError(f"layout {text!r} needs a mesh", f'shardviz.show({text!r}, mesh="fsdp=2,tp=4")')
    return parse(text).layout(parse_mesh(mesh) if isinstance(mesh, str) else mesh)


def _rank() -> int:
    """Return this process's rank: torch's own if a process group is up, otherwise torchrun's."""
    if "torch.distributed" in sys.modules:
        from shardviz.live.showing import rank

        found = rank()
        if found is not None:
            return found
    given = os.environ.get("RANK", "")
    return int(given) if given.isdigit() else 0


def _of_torch(what: object, name: str | None) -> Picture | None:
    """Draw a tensor or a module; None for anything else."""
    if "torch" not in sys.modules:
        return None
    from shardviz.live.showing import claimed_of, mesh_of, table_of
    from shardviz.picture.display import of_subject, of_table, picture_of
    from shardviz.picture.model.subject import of_layout

    if (mesh := mesh_of(what)) is not None:
        return picture_of(mesh)
    if (claimed := claimed_of(what, name)) is not None:
        layout, dtype, name = claimed
        return of_subject(replace(of_layout(layout, dtype), name=name))
    rows = table_of(what)
    return None if rows is None else of_table(rows)
