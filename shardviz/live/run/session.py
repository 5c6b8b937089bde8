"""One process's state of a watched job: hooks add to it, captures read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from shardviz.live.compat.modules import clean_name
from shardviz.live.run.options import Kind, Note, Options, leave
from shardviz.live.run.references.sources import (
    MOST,
    Opened,
    checkpoint_of,
    has_shards,
    loaded_whole,
    looks_stamped,
    note_stamped,
    of_dcp,
    of_pretrained,
    of_state_dict,
)
from shardviz.live.run.references.values import Unwritten, Values
from shardviz.reference.names import bare_name
from shardviz.stamping.target import is_stamped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardviz.live.run.references.sources import Source

MOST_LOOKED_AT = 4 * MOST
"""Files that are looked at when the job opens them."""


class Session:
    """The values that a process has seen of its job, and the dumps that were made of it.

    Attributes:
        values: The values that modules had before they were sharded.
        sources: What values may be compared with, the newest last.
        unwritten: What `to_empty` allocated.
        skipped: Parameters that a load with strict=False left as they were, with the key under which it was given their
            values: the same name with or without a prefix, or a wrapper's words.
        dumps: The dumps of this job: the same on all ranks, which make each together or not at all.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.values = Values(options)
        self.sources: list[Source] = [self.values]
        self.unwritten = Unwritten()
        self.skipped: dict[str, str] = {}
        self.dumps: list[Path] = []
        self._searches = 2
        self._files: set[str] = set()

    @property
    def is_looking(self) -> bool:
        """Whether values are compared with those the job loads, not with a given reference."""
        return not self.options.reference

    def leave(self, kind: Kind, text: str = "", rank: int | None = None) -> None:
        """Leave a note for the command; by default by the rank that this process has by now."""
        if rank is None:
            rank = distributed.get_rank() if distributed.is_initialized() else -1
        leave(self.options.session, Note(kind, rank, text))

    def remember(self, model: nn.Module) -> None:
        """Keep the values that a model has now, as far as it is not sharded."""
        if not self.options.reference:
            self.values.remember(model)

    def sharding(self, module: object) -> None:
        """Remember the values of a module that is about to be sharded."""
        if isinstance(module, nn.Module):
            self.values.remember(module)

    def sharding_tensor(self, tensor: Any) -> None:
        """Remember the values of a tensor's module, but not of a whole checkpoint's tensors."""
        if self._searches and not self.values.knows(tensor):
            owner = self.values.owner_of(tensor)
            if owner is None:
                self._searches -= 1
            else:
                self.values.remember(owner)

    def allocating(self, module: object) -> None:
        """Note a module's ties before it is allocated, when each of its parts gets its own memory."""
        if isinstance(module, nn.Module):
            self.values.remember_ties(module)

    def allocated(self, module: object) -> None:
        """Look at the memory that a module was given: it may never be written to."""
        if isinstance(module, nn.Module):
            self.unwritten.remember(module)

    def loaded_state_dict(self, model: nn.Module, state_dict: Mapping[str, Any]) -> None:
        """Keep the whole tensors that a sharded model has loaded."""
        self._add_source(of_state_dict(model, state_dict, self.options, len(self.sources)))

    def skipped_keys(self, model: nn.Module, state_dict: Mapping[str, Any], keys: Any) -> None:
        """Remember parameters that a load missed because their keys have a different prefix, or a wrapper's words."""
        shapes = (
            {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            if keys.unexpected_keys
            else {}
        )
        for name in shapes.keys() & set(keys.missing_keys):
            for key in keys.unexpected_keys:
                is_alike = tuple(getattr(state_dict[key], "shape", ())) == shapes[name]
                is_prefixed = key.endswith(f".{name}") or name.endswith(f".{key}")
                if is_alike and (is_prefixed or bare_name(key) == bare_name(name)):
                    self.skipped[clean_name(name)] = key

    def loaded_dcp(self, state_dict: object, folder: str) -> None:
        """Note a DCP folder as the source of loaded tensors, and of those copied from them."""
        self._note_stamped(folder)
        if isinstance(state_dict, dict):
            self._add_source(of_dcp(state_dict, folder))
            if has_shards(state_dict):  # whole tensors are seen when they are given to torch
                self._add_opened(Opened(Path(folder)))

    def loaded_pretrained(self, model: nn.Module, place: str, load: Callable[[], nn.Module]) -> None:
        """Compare with a local folder what was loaded from it."""
        if self.is_looking and (folder := of_pretrained(model, place)) is not None:
            self._add_source(loaded_whole(model, folder, load, self.options))
            self._add_source(folder)

    def opened_file(self, file: str, content: object = None) -> None:
        """Remember a checkpoint when the job opens one of its files: it may be the next model's."""
        self._note_stamped(file, content)
        # A job whose data is in such files opens them at every step: looking at each of them would slow it down.
        if not self.is_looking or file in self._files or len(self._files) == MOST_LOOKED_AT:
            return
        self._files.add(file)
        self._add_opened(Opened(checkpoint_of(file)[0]))

    def _note_stamped(self, place: str, content: object = None) -> None:
        """Note that the job has loaded a stamped copy, or a pickle of its values."""
        if self.options.is_stamped and (is_stamped(Path(place)) or looks_stamped(content, self.options.reference)):
            note_stamped(self.options.session)

    def _add_source(self, source: Source | None) -> None:
        if source is not None:
            self.sources.append(source)

    def _add_opened(self, file: Opened) -> None:
        opened = [source for source in self.sources if isinstance(source, Opened)]
        is_wanted = not self.options.reference and Path(self.options.session) not in file.path.parents
        if is_wanted and file not in opened:
            self.sources.append(file)
            if len(opened) == MOST:
                self.sources.remove(opened[0])
