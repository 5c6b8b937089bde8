"""A probe as a job: every rank's arguments, and its launch. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.live import world
from shardviz.live.trace_modules import ALL, Followed

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.layout.mesh import Mesh
    from shardviz.live.world.launching import OnOutput
    from shardviz.live.world.starting import Method
    from shardviz.probe_files import Probe

TASK = "shardviz.live.probe:run_probe"

TIMEOUT = 120.0
"""Seconds that a probe may take by default."""

JOINED_TIMEOUT = 600.0
"""Seconds that each of its collectives may take by default under torchrun, which starts and ends the ranks."""

VALUES_LIMIT = 256
"""Local tensors of at most this many elements are written out value by value, by default."""


@dataclass(frozen=True)
class ProbeJob:
    """One probe to run.

    Attributes:
        folder: The folder of the dump, by its whole path.
        values_limit: Local tensors of at most this many elements are written out value by value.
        followed: Which modules of its step are followed.
        notes: Where rank 0 notes the files of the modules that are imported; None if nobody watches them.
        keeps_evidence: Whether the raw values of the step are written beside the dump, for a later judge.
        force: Whether ranks replace what is in the folder; None if it has been made for them.
        question: "package.module:function", which says from a dump's folder inside of which module ranks should look;
            empty if they look nowhere.
    """

    probe: Probe
    mesh: Mesh
    folder: Path
    command: tuple[str, ...] = ()
    values_limit: int = VALUES_LIMIT
    followed: Followed = ALL
    notes: Path | None = None
    keeps_evidence: bool = False
    question: str = ""
    force: bool | None = None

    def launch(
        self,
        method: Method = "fork",
        *,
        backend: str | None = None,
        timeout: float = TIMEOUT,
        on_output: OnOutput | None = None,
    ) -> None:
        """Run the probe on new ranks of this machine; arguments and errors as for `world.launch`."""
        world.prepare(method, also=(TASK.partition(":")[0],))
        world.launch(
            TASK,
            (self,),
            num_ranks=self.mesh.size,
            method=method,
            backend=backend,
            timeout=timeout,
            coords=self.mesh.labels,
            on_output=on_output,
        )
