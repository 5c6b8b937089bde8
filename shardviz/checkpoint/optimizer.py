"""Optimizer state beside a model in one checkpoint: state of parameters that are not there, and the other way round.

torch names a state `PREFIX.state.PARAMETER.exp_avg`, Megatron `PREFIX.state.exp_avg.PARAMETER`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.checkpoint.formats.archive import read_object
from shardviz.errors import DumpError
from shardviz.explain.states import AbsentState, LostParamGroup, MisshapenState, OrphanState, PartialState
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardviz.checkpoint.records import Checkpoint, Saved
    from shardviz.explain.finding import Finding

MAX_NAMES = 3
IN_BUCKETS = (
    "they do not say which parameter an element is of; Megatron saves states by parameter with "
    "--dist-ckpt-optim-fully-reshardable"
)
KEYS = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "fp32",
    "fp32_param",
    "master_param",
    "param",
)
"""States that have the shape of their parameter."""

OF_OPTIMIZERS = (*KEYS, "step", "sum", "acc_delta", "exp_inf", "eta", "ax", "exp_avg_sq_row", "exp_avg_sq_col", "mu")

NUMBERS = ("step",)
"""States that are a number of each parameter, whatever its size."""

OPTIONAL = ("max_exp_avg_sq",)
"""States that a setting of the group brings."""

SURE = 3
"""Parameters that have a state which a single one lacks."""

_STATE = re.compile(r"(?P<before>(?:.*?\.)?)state\.(?P<name>.+)\.(?P<key>[a-z_][a-z0-9_]*)")
_OF_MEGATRON = re.compile(rf"(?P<before>(?:.*?\.)?)state\.(?P<key>{'|'.join(KEYS)})\.(?P<name>.+)")
_BUCKET = re.compile(r".*\bdp_group_idx_\d+\.(?:gbuf_idx_\d+\..*bucket_idx_\d+\.[a-z_]+|param_state(?:/.*)?)")
_GROUP = re.compile(r"(?P<before>(?:.*?\.)?)param_groups\.(?P<name>.+)\.(?P<key>[a-z_]+)")


@dataclass(frozen=True)
class _Optimizer:
    """One optimizer's part of a checkpoint.

    Attributes:
        before: What its names begin with.
        states: Its tensors, by parameter.
        grouped: The parameters that its groups name; empty if that is not known.
        unread: Groups that could not be read.
        plain: The names of states that are not tensors, by parameter.
    """

    before: str
    states: dict[str, list[tuple[str, Saved]]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)
    plain: dict[str, set[str]] = field(default_factory=dict)

    @cached_property
    def keys(self) -> Mapping[str, frozenset[str]]:
        """What each parameter with state has of it."""
        each = {name: [key for key, _ in states] for name, states in self.states.items()}
        return {name: frozenset(keys) | self.plain.get(name, set()) for name, keys in each.items()}


def check_optimizer(checkpoint: Checkpoint) -> Iterator[Finding | NotChecked]:
    """Yield states without a parameter or of another shape, and parameters that lack the state that others have."""
    optimizers = _optimizers(checkpoint)
    begins = tuple(filter(None, optimizers))
    names = [name for name in checkpoint.tensors if _split(name) is None and not is_bucket(name)]
    model = [name for name in names if not name.startswith(begins)]
    if buckets := [name for name in (*checkpoint.tensors, *checkpoint.objects) if is_bucket(name)]:
        yield NotChecked("", f"optimizer state in {counted(len(buckets), 'bucket')}: {IN_BUCKETS}", "run")
    for optimizer in optimizers.values():
        yield from _incomplete(optimizer)
        if any(name.isdigit() for name in optimizer.states):
            why = "which parameters its states belong to: it numbers them"
            yield NotChecked("", f"{printable(optimizer.before) or 'optimizer'}: {why}", "run")
            continue
        before = _model_of(optimizer, model)
        if before is None:
            why = "whether its states belong to parameters: no model of the checkpoint clearly has their names"
            yield NotChecked("", f"{printable(optimizer.before) or 'optimizer'}: {why}", "run")
            continue
        yield from _orphans(optimizer, before, checkpoint)
        yield from _ungrouped(optimizer)
        yield from _stateless(optimizer, before, model)


def _split(name: str) -> re.Match[str] | None:
    match = _OF_MEGATRON.fullmatch(name)
    if match and match["key"] == "param" and name.rpartition(".")[2] in OF_OPTIMIZERS:
        match = None  # the state of a parameter that is called so, by torch's names
    return match or _STATE.fullmatch(name)


def is_bucket(name: str) -> bool:
    """Whether a tensor or object has the states of many parameters one behind the other, as Megatron's ranks hold them.

    Example:
        >>> is_bucket("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32).bucket_idx_0.exp_avg")
        True
    """
    return _BUCKET.fullmatch(name) is not None


def state_of(name: str) -> tuple[str, str] | None:
    """Return the parameter and the key of an optimizer's state by its name in a checkpoint; None for other tensors.

    Example:
        >>> state_of("optim.state.layers.0.w1.exp_avg"), state_of("layers.0.w1")
        (('layers.0.w1', 'exp_avg'), None)
    """
    parts = _split(name)
    return (parts["name"], parts["key"]) if parts is not None and parts["key"] in OF_OPTIMIZERS else None


def is_setting(name: str) -> bool:
    """Whether an object's name is that of an optimizer's hyperparameter.

    Example:
        >>> is_setting("optim.param_groups.layers.0.w1.lr"), is_setting("step")
        (True, False)
    """
    return _GROUP.fullmatch(name) is not None


def _optimizers(checkpoint: Checkpoint) -> dict[str, _Optimizer]:
    optimizers: dict[str, _Optimizer] = {}
    for name, tensor in checkpoint.tensors.items():
        if (parts := _split(name)) is not None:
            optimizer = optimizers.setdefault(parts["before"], _Optimizer(parts["before"]))
            optimizer.states.setdefault(parts["name"], []).append((parts["key"], tensor))
    optimizers = {before: one for before, one in optimizers.items() if _is_optimizer(one)}
    for name, place in checkpoint.objects.items():
        if (parts := _STATE.fullmatch(name)) is not None and parts["before"] in optimizers:
            optimizers[parts["before"]].plain.setdefault(parts["name"], set()).add(parts["key"])
        parts = _GROUP.fullmatch(name)
        if parts is None or parts["before"] not in optimizers:
            continue
        if not parts["name"].isdigit():
            optimizers[parts["before"]].grouped.add(parts["name"])
        elif parts["key"] == "params":
            try:
                listed_ = read_object(checkpoint.folder / place.file, place.start, place.size, name)
            except (DumpError, OSError, KeyError):
                optimizers[parts["before"]].unread.append(name)
                continue
            optimizers[parts["before"]].grouped.update(one for one in listed_ if type(one) is str)
    return optimizers


def state_names(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the tensors of a checkpoint that are optimizer state."""
    every = _optimizers(checkpoint).values()
    named = (state.name for one in every for states in one.states.values() for _, state in states)
    return frozenset([*named, *filter(is_bucket, checkpoint.tensors)])


def _is_optimizer(optimizer: _Optimizer) -> bool:
    """Whether names are an optimizer's: a model may have a module called `state` too."""
    return any(key in OF_OPTIMIZERS for states in optimizer.states.values() for key, _ in states)


def _model_of(optimizer: _Optimizer, model: Collection[str]) -> str | None:
    """Return what stands before most of the parameters with state in the model; None if that is less than half of them.

    Of several models with the same names it is the one whose names begin most like the optimizer's.
    """
    counts: Counter[str] = Counter()
    for name in model:
        for dot in (0, *(match.end() for match in re.finditer(r"\.", name))):
            if name[dot:] in optimizer.states:
                counts[name[:dot]] += 1
    most = max(counts.values(), default=0)
    fits = [(_shared(before, optimizer.before), before) for before, count in counts.items() if count == most]
    if 2 * most < len(optimizer.states):
        return None
    best = [before for length, before in fits if length == max(fits)[0]]
    return best[0] if len(best) == 1 else None


def _shared(first: str, second: str) -> int:
    """Return how many levels two names begin with in common."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return next((level for level, (mine, theirs) in enumerate(pairs) if mine != theirs), len(first.split(".")))


def _orphans(optimizer: _Optimizer, before: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    for name, states in optimizer.states.items():
        parameter = checkpoint.tensors.get(before + name)
        if parameter is None and before + name not in checkpoint.objects:
            key, state = states[0]
            text = f"{printable(state.name)} is optimizer state ({key}, {list(state.shape)}) of a parameter that the "
            text += f"checkpoint does not have: {printable(before + name)}"
            yield OrphanState().finding(state.name, (), text)
        for key, state in states:
            if parameter is not None and key in KEYS and state.shape != parameter.shape:
                text = f"the state has shape {list(state.shape)}, its parameter {list(parameter.shape)}"
                yield MisshapenState().finding(state.name, (), text)


def _ungrouped(optimizer: _Optimizer) -> Iterator[Finding]:
    """Yield parameters with state that no group names: with a group its learning rate and the like are lost."""
    missing = [name for name in optimizer.states if name not in optimizer.grouped]
    if not optimizer.grouped or optimizer.unread or not missing:
        return
    some = listed(map(printable, missing), MAX_NAMES)
    has = "has" if len(missing) == 1 else "have"
    text = f"{counted(len(missing), 'parameter')} {has} optimizer state, and no group names them: {some}; "
    text += f"the groups name {len(optimizer.grouped):,} others"
    yield LostParamGroup().finding("", (), text)


def _incomplete(optimizer: _Optimizer) -> Iterator[Finding]:
    """Yield parameters that lack one of the states which most parameters with the same others have."""
    counts = Counter(optimizer.keys.values())
    for name, keys in optimizer.keys.items():
        for fuller in [one for one in counts if keys < one and len(one - keys) == 1 and counts[one] > counts[keys]]:
            key = next(iter(fuller - keys))
            if key in NUMBERS or (key not in OPTIONAL and counts[keys] == 1 and counts[fuller] >= SURE):
                text = f"the optimizer has {listed(sorted(keys), MAX_NAMES)} of {printable(name)} and no {key}"
                text += f"; {counts[fuller]:,} other parameters have one"
                yield PartialState().finding(optimizer.states[name][0][1].name, (), text, severity="warning")


def _stateless(optimizer: _Optimizer, before: str, model: Collection[str]) -> Iterator[Finding | NotChecked]:
    """Yield parameters that their optimizer names and has no state of; without its groups, whether they are frozen."""
    own = [name.removeprefix(before) for name in model if name.startswith(before)]
    missing = [name for name in own if name not in optimizer.states]
    for name in missing:
        if name in optimizer.grouped:
            others = f"{len(optimizer.states):,} others have some"
            text = f"the optimizer's groups name it, but it has no state; {others}"
            yield AbsentState().finding(before + name, (), text, severity="warning")
    if missing and not optimizer.grouped:
        some = listed(map(printable, missing), MAX_NAMES)
        why = f"whether {counted(len(missing), 'tensor')} without optimizer state are frozen, or buffers: {some}"
        yield NotChecked("", why, "run")
