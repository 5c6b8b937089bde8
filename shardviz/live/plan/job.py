"""What is planned: a probe on a mesh that nobody has, and its module and model, which are the same for all meshes."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardviz.errors import ProbeError, ShardvizError
from shardviz.live.capture.intended import check_intended
from shardviz.live.noting import is_library
from shardviz.live.plan.building import early_model, unsharded, without_groups
from shardviz.live.plan.forks import is_own, one_line
from shardviz.live.plan.optimizers import Optimizer, dtype_of
from shardviz.live.plan.reads import variables_read
from shardviz.live.probe import load_probe
from shardviz.live.world.torchrun import environment_of, variables

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import nn

    from shardviz.layout.mesh import Mesh
    from shardviz.probe_files import Probe

    Again = Callable[[], tuple[ModuleType, tuple[str, ...]]]

ONLY_ONCE = "the probe cannot be imported twice, so all ranks have what rank 0 reads while it is imported: {}"


@dataclass(frozen=True)
class PlanJob:
    """What is planned.

    Attributes:
        probe: The probe.
        mesh: The mesh.
        node: GPUs of a node; 0 if it is not given.
        optimizer: The optimizer whose state counts.
        batch: Shape and element type of the batch; None for the probe's own.
        with_step: Whether a step is planned.
        double: Whether the model is planned in float64, as a probe runs.
        command: The command line, for the record.
    """

    probe: Probe
    mesh: Mesh
    node: int = 0
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch: tuple[tuple[int, ...], str] | None = None
    with_step: bool = True
    double: bool = False
    command: tuple[str, ...] = ()

    @property
    def per_node(self) -> int:
        """Ranks of a node; all of them if nobody said how many."""
        return self.node or self.mesh.size


@dataclass(frozen=True)
class Loaded:
    """A probe, with its model: the same for plans on all meshes.

    Attributes:
        module: The probe's module.
        early: The model on the meta device, built before there were ranks; None if it may not be the same on all.
        again: Imports the module again, on a rank, and says what is not true of it; None if it is the same on all.
    """

    module: ModuleType
    early: nn.Module | None = None
    again: Again | None = None

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different layers."""
        return tuple(getattr(self.module, "STAGE_AXES", ()))


def load(job: PlanJob) -> Loaded:
    """Import a job's probe as its first rank does, and build its model.

    Raises:
        ShardvizError: The probe cannot be imported, or torch lacks an element type that was asked for.
    """
    for name in (job.optimizer.dtype, job.batch[1] if job.batch else ""):
        if name:
            dtype_of(name)
    modules, size = set(sys.modules), job.mesh.size
    with contextlib.redirect_stdout(sys.stderr):  # what a probe prints is not data
        with environment_of(0, size, job.per_node), variables_read() as read, without_groups():
            module = _imported(job.probe)
        check_intended(getattr(module, "expect", {}))
        of_ranks = [variables(rank, size, job.per_node) for rank in (0, min(1, size - 1), size - 1)]
        if any(len({one[name] for one in of_ranks}) > 1 for name in read):
            return Loaded(module, again=_again(job, module, set(sys.modules) - modules))
        return Loaded(module, early_model(lambda: unsharded(module, job.probe.build, double=job.double)))


def _again(job: PlanJob, module: ModuleType, names: set[str]) -> Again:
    """Return how a rank imports a probe again, with those of its modules that are the user's own."""
    files = {name: getattr(sys.modules[name], "__file__", None) or "<" for name in names}
    own = [name for name, file in files.items() if is_own(file) and not is_library(file)]
    modules = {name: sys.modules[name] for name in own}

    def once() -> ModuleType:
        for name in own:
            sys.modules.pop(name, None)
        return _imported(job.probe)

    def again() -> tuple[ModuleType, tuple[str, ...]]:
        try:
            return once(), ()
        except ProbeError as error:
            with environment_of(0, job.mesh.size, job.per_node):
                try:
                    once()
                except ProbeError:
                    sys.modules.update(modules)
                    return module, (ONLY_ONCE.format(error.message),)
            raise  # only this rank cannot import it

    return again


def _imported(probe: Probe) -> ModuleType:
    """Import a probe."""
    try:
        return load_probe(probe.path, probe.build, probe.module)
    except ShardvizError:
        raise
    except (Exception, SystemExit) as error:
        raised = f"importing {probe.name} raised {one_line(error)}"
        raise ProbeError(raised, f"python {probe.path} shows where") from error
