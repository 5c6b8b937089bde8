"""What was sharded and loaded in this process, and when a model is due to be captured."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import distributed, nn

from shardviz.dump.write import TRACE_FOLDER
from shardviz.live.claims import deepspeed, megatron, registry
from shardviz.live.claims.registry import name_of
from shardviz.live.compat.pipelines import stages_of
from shardviz.live.run.hooks.arming import arm, disarm
from shardviz.live.run.hooks.observing import nested, quietly
from shardviz.live.run.meeting import refuse_save, watch_steps
from shardviz.live.run.options import Note, Options, leave
from shardviz.live.run.references.sources import has_stamped
from shardviz.live.run.references.values import contains, is_first_here, num_modules, rank_here
from shardviz.live.run.session import Session
from shardviz.live.run.taking import Stage, take
from shardviz.live.step.steppers import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardviz.live.run.tracing import Follower

MAX_DUMPS = 8
"""Models that are captured of one job: one that makes new ones at every step must not fill a disk."""


class Observer:
    """Sees a process's calls and captures each sharded model once, when it is first called."""

    def __init__(self, options: Options) -> None:
        self.session = Session(options)
        self._sharded: WeakSet[nn.Module] = WeakSet()
        self._captured: WeakSet[nn.Module] = WeakSet()
        self._settled: WeakSet[nn.Module] = WeakSet()
        self._num_taken = 0
        self._is_noted = False
        self._is_noted_at_exit = False
        self._rank = -1
        self._follower: Follower | None = None
        watch_steps(self)

    # What hooks call

    def joined(self) -> None:
        """Watch the first calls of modules from here on: a model may have been sharded by hand."""
        self._rank = rank_here()
        self.session.leave("joined")
        if self._rank == 0:  # the others need not wait until it comes to its own model
            is_first_here(self.session.options.session)
        arm(self.visit)
        if not self._is_noted_at_exit:
            self._is_noted_at_exit = True
            atexit.register(self._note_finish)

    def _note_finish(self) -> None:
        """Note that the script finished; what then happens to the process is not its doing."""
        if not hasattr(sys, "last_value"):  # Python's main program has printed an error otherwise
            self.session.leave("finished", rank=self._rank)

    def optimizing(self, optimizer: Any) -> None:
        """Follow a step of the model that an optimizer steps. Called under `--trace` only."""
        if self._follower is None:
            from shardviz.live.run.step_files import write_step
            from shardviz.live.run.tracing import Follower

            folder, command = Path(self.session.options.session) / TRACE_FOLDER, self.session.options.command
            self._follower = Follower(self.session.options, lambda step, why: write_step(step, folder, command, why))
        self._follower.optimizing(optimizer)

    def leaving(self, group: Any) -> None:
        """End a followed step that no optimizer took if the job destroys all of its process groups."""
        if self._follower is not None and (group is None or group is distributed.group.WORLD):
            self._follower.leaving()

    def clipped(self, norm: Any, limit: Any) -> None:
        """Note in a followed step that gradients were clipped. Called under `--trace` only."""
        if self._follower is not None:
            self._follower.clipped(norm, limit)

    def library_begins(self, stepper: object) -> None:
        """Note that a library begins a step of inner optimizers' steps. Called under `--trace` only."""
        if self._follower is not None:
            self._follower.library_begins(stepper)

    def library_ends(self, norm: Any, limit: Any) -> None:
        """Note that it ended, and by which norm gradients were clipped. Called under `--trace` only."""
        if self._follower is not None:
            self._follower.library_ends(norm, limit)

    def sharded(self, module: object) -> None:
        """Note that a module was sharded: it is captured when it, or what contains it, is called."""
        if isinstance(module, nn.Module):
            self._sharded.add(module)
            for submodule in module.modules():
                self._captured.discard(submodule)
            self.sharded_tensor()

    def sharded_tensor(self) -> None:
        """Note that something was sharded: look at every module again."""
        if not self._is_noted:
            self.session.leave("sharded")
        self._is_noted = True
        self._settled.clear()
        arm(self.visit)

    def loaded_state_dict(self, model: object, state_dict: object) -> None:
        """Keep the whole tensors that a sharded model has loaded."""
        # What is loaded after the capture, at every step perhaps, is compared with nothing and must not fill a disk.
        if not self.session.is_looking or not isinstance(model, nn.Module) or not isinstance(state_dict, dict):
            return
        if any(map(self._is_new, model.modules())):
            self.session.loaded_state_dict(model, state_dict)

    def loaded_pretrained(self, model: object, place: str, load: Callable[[], nn.Module]) -> None:
        """Compare a loaded model with its local folder, and look at it: it may be sharded."""
        if isinstance(model, nn.Module):
            self.session.loaded_pretrained(model, place, load)
            if distributed.is_initialized():
                self._settled.clear()
                arm(self.visit)

    def saving(self, what: str) -> None:
        """End a job with stamped values before it saves, after capturing what is left."""
        if not has_stamped(self.session.options.session):
            return
        if distributed.is_initialized():
            quietly("a save", self._take_all)
        refuse_save(self.session, what)

    def _take_all(self) -> None:
        for module in sorted(self._pending(), key=num_modules, reverse=True):
            if module not in self._captured and not _is_on_meta(module):
                self._take(module)

    # Steps of schedules and optimizers

    def scheduled(self, schedule: Any) -> None:
        """Capture the stages of a pipeline before its first step."""
        self.staged(stages_of(schedule))

    def scheduled_by_megatron(self, model: nn.Module | list[nn.Module]) -> None:
        """Capture Megatron-core's stages before its schedule runs: each waits for the one before it."""
        group = megatron.group("get_pipeline_model_parallel_group")
        self.staged([(chunk, group) for chunk in (model if isinstance(model, list) else [model])])

    def scheduled_by_deepspeed(self, model: nn.Module) -> None:
        """Capture a stage of DeepSpeed's pipeline before its schedule runs: it waits for the one before it."""
        if (grid := deepspeed.grid_of(model)) is not None:
            self.staged([(model, grid.get_pipe_parallel_group())])

    def staged(self, stages: Iterable[tuple[nn.Module, Any]]) -> None:
        """Capture this rank's stages of a pipeline, each with the group of the ranks that have the others."""
        for number, (module, group) in enumerate(stages):
            if module not in self._captured and not _is_on_meta(module):
                self._take(module, Stage(number, group))

    def stepping(self, optimizer: Any) -> None:
        """Capture sharded models that were never called: those it changes, and weight averages."""
        stepped_ids = {id(parameter) for parameter in parameters_of(optimizer)}
        for module in sorted(self._pending(), key=num_modules, reverse=True):
            parameters = list(module.parameters())
            # One that has values, and that no optimizer changes, is a moving average.
            is_frozen = not _is_on_meta(module) and not any(parameter.requires_grad for parameter in parameters)
            is_due = is_frozen or any(id(parameter) in stepped_ids for parameter in parameters)
            if module not in self._captured and is_due:
                self._take(module)

    # Calls of modules

    def visit(self, module: nn.Module) -> None:
        """Capture a sharded model before its first run. Called with every module that is called."""
        if module in self._settled or not distributed.is_initialized():
            return
        with nested() as is_outermost:
            if is_outermost:
                self._look(module)

    def _look(self, module: nn.Module) -> None:
        if not any(self._is_new(part) for part in module.modules()):
            self._settle(module)
        else:
            root = max((module, *self._models_around(module)), key=num_modules)
            if not _is_on_meta(root):
                self._take(root)

    def _take(self, root: nn.Module, stage: Stage | None = None) -> None:
        if self._num_taken < MAX_DUMPS:
            failed = f"{name_of(root)}: the capture failed, as was reported when it did"
            note = quietly("the capture", lambda: take(self.session, root, stage=stage))
            note = note or Note("not-captured", rank_here(), failed)
        else:
            note = Note("not-captured", rank_here(), f"the job has more than {MAX_DUMPS} sharded models")
        if self._num_taken <= MAX_DUMPS:
            leave(self.session.options.session, note)
        self._num_taken += 1
        self._captured.update(root.modules())
        self._settle(root)

    def _settle(self, module: nn.Module) -> None:
        self._settled.update(module.modules())
        if self._num_taken and not any(True for _ in self._pending()):
            disarm(self.visit)

    def _models_around(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the sharded modules that contain one."""
        for sharded in list(self._sharded):
            if contains(sharded, module):
                yield sharded

    def _pending(self) -> Iterator[nn.Module]:
        return (module for module in list(self._sharded) if module not in self._captured)

    def _is_new(self, submodule: nn.Module) -> bool:
        if submodule in self._captured:
            return False
        if submodule in self._sharded:
            return True
        return any(
            registry.marks(tensor)
            for tensor in (*submodule.parameters(recurse=False), *nn.Module.buffers(submodule, recurse=False))
        )


def _is_on_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())
