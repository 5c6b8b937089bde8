"""Check optimizer state in a checkpoint: orphans, missing states and impossible numbers.

torch names a state `PREFIX.state.PARAMETER.exp_avg`, Megatron `PREFIX.state.exp_avg.PARAMETER`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.checkpoint.formats.archive import read_object
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.states import (
    AbsentState,
    EmptyMoments,
    LostMoments,
    LostParamGroup,
    LostStepCounter,
    MisshapenState,
    MixedStepFiles,
    NegativeSquares,
    NotFiniteState,
    OrphanState,
    PartialState,
)
from shardviz.groups import the_only
from shardviz.relate.casts import cast, is_whole
from shardviz.text import counted, folded_names, listed, printable, starred

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.checkpoint.records import Checkpoint, StoredTensor
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
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_avg_sq_row", "exp_avg_sq_col")
"""States that are means of squares."""

MOMENTS = (*SQUARES, "exp_avg", "momentum_buffer")
SAMPLES = 1024
"""Numbers of a state that are looked at."""

FEWEST = 2
"""Steps in one file that must be others than everywhere else: a single one may be of a parameter that began later.

After so many steps squares are not zero: torch takes one without gradients to make states that it saves or loads into.
"""


@dataclass(frozen=True)
class _Optimizer:
    """One optimizer's part of a checkpoint.

    Attributes:
        before: What its names begin with.
        grouped: The parameters that its groups name; empty if that is not known.
        unread: Groups that could not be read.
        plain: The names of states that are not tensors, by parameter.
    """

    before: str
    states: dict[str, list[tuple[str, StoredTensor]]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)
    plain: dict[str, set[str]] = field(default_factory=dict)

    @cached_property
    def keys(self) -> Mapping[str, frozenset[str]]:
        """What each parameter with state has of it."""
        each = {name: [key for key, _ in states] for name, states in self.states.items()}
        return {name: frozenset(keys) | self.plain.get(name, set()) for name, keys in each.items()}


def check_optimizer(checkpoint: Checkpoint) -> Iterator[Finding | NotChecked]:
    """Yield states without a parameter or of a wrong shape, and parameters that lack states."""
    optimizers = _optimizers(checkpoint)
    begins = tuple(filter(None, optimizers))
    names = [name for name in checkpoint.tensors if _split(name) is None and not is_bucket(name)]
    model = [name for name in names if not name.startswith(begins)]
    if buckets := [name for name in (*checkpoint.tensors, *checkpoint.objects) if is_bucket(name)]:
        yield NotChecked("", f"optimizer state in {counted(len(buckets), 'bucket')}: {IN_BUCKETS}", "run")
    for optimizer in optimizers.values():
        yield from _incomplete(optimizer)
        is_numbered = any(name.isdigit() for name in optimizer.states)
        before = None if is_numbered else _model_of(optimizer, model)
        if before is not None:
            yield from _orphans(optimizer, before, checkpoint)
            yield from _ungrouped(optimizer)
            yield from _stateless(optimizer, before, model)
            continue
        why = "whether its states belong to parameters: no model of the checkpoint clearly has their names"
        if is_numbered:
            why = "which parameters its states belong to: the states are numbered"
        yield NotChecked("", f"{printable(optimizer.before) or 'optimizer'}: {why}", "run")


def _split(name: str) -> re.Match[str] | None:
    match = _OF_MEGATRON.fullmatch(name)
    if match and match["key"] == "param" and name.rpartition(".")[2] in OF_OPTIMIZERS:
        match = None  # the state of a parameter that is called so, by torch's names
    return match or _STATE.fullmatch(name)


def is_bucket(name: str) -> bool:
    """Whether an entry has the states of many parameters in a row, like Megatron's buckets.

    Example:
        >>> is_bucket("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32).bucket_idx_0.exp_avg")
        True
    """
    return _BUCKET.fullmatch(name) is not None


def state_of(name: str) -> tuple[str, str] | None:
    """Return the parameter and key of an optimizer state, such as `exp_avg`; else None.

    Example:
        >>> state_of("optim.state.layers.0.w1.exp_avg"), state_of("layers.0.w1")
        (('layers.0.w1', 'exp_avg'), None)
    """
    parts = _split(name)
    return (parts["name"], parts["key"]) if parts is not None and parts["key"] in OF_OPTIMIZERS else None


def moment_of(name: str) -> tuple[str, str] | None:
    """Return the parameter and key of a moment, also under names that a job made up.

    The parameter's name may have a prefix: `optim.` of `optim.up.weight.exp_avg`.

    Example:
        >>> moment_of("optim.up.weight.exp_avg"), moment_of("adam.exp_avg.up.weight"), moment_of("up.weight")
        (('optim.up.weight', 'exp_avg'), ('up.weight', 'exp_avg'), None)
    """
    if (state := state_of(name)) is not None:
        return state if state[1] in KEYS else None
    words = name.split(".")
    at = next((at for at, word in enumerate(words) if word in MOMENTS), None)
    if at is None or len(words) == 1:
        return None
    return ".".join(words[at + 1 :] or words[:at]), words[at]


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
    optimizers = {  # a model may have a module called `state` too
        before: optimizer
        for before, optimizer in optimizers.items()
        if any(key in OF_OPTIMIZERS for states in optimizer.states.values() for key, _ in states)
    }
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


def _model_of(optimizer: _Optimizer, model: Collection[str]) -> str | None:
    """Return the prefix of most parameters with state in the model; None if less than half.

    Of several models with the same names it is the one whose names begin most like the optimizer's.
    """
    counts: Counter[str] = Counter()
    for name in model:
        for dot in (0, *(match.end() for match in re.finditer(r"\.", name))):
            if name[dot:] in optimizer.states:
                counts[name[:dot]] += 1
    most = max(counts.values(), default=0)
    fits = [(_num_shared_levels(before, optimizer.before), before) for before, count in counts.items() if count == most]
    if 2 * most < len(optimizer.states):
        return None
    return the_only([before for length, before in fits if length == max(fits)[0]])


def _num_shared_levels(first: str, second: str) -> int:
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
    """Yield parameters with state but without a param group, whose learning rate is lost."""
    missing = [name for name in optimizer.states if name not in optimizer.grouped]
    if not optimizer.grouped or optimizer.unread or not missing:
        return
    some = listed(map(printable, missing))
    has = "has" if len(missing) == 1 else "have"
    text = f"{counted(len(missing), 'parameter')} {has} optimizer state, and no group names them: {some}; "
    text += f"the groups name {len(optimizer.grouped):,} others"
    yield LostParamGroup().finding("", (), text)


def _incomplete(optimizer: _Optimizer) -> Iterator[Finding]:
    """Yield parameters that lack a state that most similar parameters have."""
    counts = Counter(optimizer.keys.values())
    for name, keys in optimizer.keys.items():
        for fuller in [one for one in counts if keys < one and len(one - keys) == 1 and counts[one] > counts[keys]]:
            key = next(iter(fuller - keys))
            if key in NUMBERS or (key not in OPTIONAL and counts[keys] == 1 and counts[fuller] >= SURE):
                text = f"the optimizer has {listed(sorted(keys))} of {printable(name)} and no {key}"
                text += f"; {counts[fuller]:,} other parameters have one"
                yield PartialState().finding(optimizer.states[name][0][1].name, (), text, severity="warning")


def _stateless(optimizer: _Optimizer, before: str, model: Collection[str]) -> Iterator[Finding | NotChecked]:
    """Yield parameters without optimizer state; without groups, say that they may be frozen."""
    own_names = [name.removeprefix(before) for name in model if name.startswith(before)]
    missing = [name for name in own_names if name not in optimizer.states]
    for name in missing:
        if name in optimizer.grouped:
            others = f"{len(optimizer.states):,} others have some"
            text = f"the optimizer's groups name it, but it has no state; {others}"
            yield AbsentState().finding(before + name, (), text, severity="warning")
    if missing and not optimizer.grouped:
        some = listed(map(printable, missing))
        why = f"whether {counted(len(missing), 'tensor')} without optimizer state are frozen, or buffers: {some}"
        yield NotChecked("", why, "run")


@dataclass(slots=True)
class _ParameterState:
    """The step count and the second moment of one parameter's state.

    Attributes:
        step: Its number of steps, and the tensor that says so; None if none does.
        squares: Its squares, and whether any of the numbers that were looked at is not zero.
        has_mean: Whether any of the numbers of its mean that were looked at is not zero.
    """

    step: tuple[float, StoredTensor] | None = None
    squares: tuple[StoredTensor, bool] | None = None
    has_mean: bool = False


def check_states(checkpoint: Checkpoint) -> Iterator[Finding | NotChecked]:
    """Yield impossible moments, lost steps, and the file whose steps differ from all others."""
    by_parameter: dict[str, _ParameterState] = {}
    for name, tensor in checkpoint.tensors.items():
        parts = state_of(name)
        if parts is None or not tensor.size or not tensor.chunks:
            continue
        key = parts[1]
        # torch writes the key last, Megatron before the parameter
        whose = name.removesuffix(f".{key}") if name.endswith(f".{key}") else name.replace(f".{key}.", ".", 1)
        state = by_parameter.setdefault(whose, _ParameterState())
        is_step = key == "step" and tensor.size == 1 and tensor.files
        is_moment = key in MOMENTS and not is_whole(tensor.dtype)  # codes of 8 bits may be negative
        values = _first_numbers(tensor) if is_step or is_moment else None
        if values is None or not len(values):
            continue
        if is_step:
            state.step = float(values[0]), tensor
        else:
            yield from _wrong_numbers(name, key, values)
            if key in SQUARES:
                state.squares = tensor, bool(values.any())
            else:
                state.has_mean |= bool(values.any())
    yield from _steps([(one.step[1].files[0], one.step[0]) for one in by_parameter.values() if one.step])
    yield from _beside_steps(list(by_parameter.values()))


def _first_numbers(tensor: StoredTensor) -> NDArray[np.float64] | None:
    """Return the first numbers of a tensor's first chunk; None if they cannot be read."""
    try:
        bits: NDArray[Any] = tensor.chunk_bits(tensor.chunks[0])
    except (DumpError, OSError):
        return None  # reported where chunks are looked at
    numbers = cast(np.array(bits.ravel()[:SAMPLES]), tensor.dtype, "float64")
    return None if numbers is None else numbers.view(np.float64)


def _wrong_numbers(name: str, key: str, values: NDArray[np.float64]) -> Iterator[Finding]:
    of_all = f"of the {len(values):,} values that were read are"
    if count := int((~np.isfinite(values)).sum()):
        text = f"{count:,} {of_all} nan or infinite: every later step keeps them, and the weights become nan"
        yield NotFiniteState().finding(name, (), text)
    if count := int((values < 0).sum()) if key in SQUARES else 0:
        text = f"{count:,} {of_all} negative, but it is a mean of squares"
        yield NegativeSquares().finding(name, (), text)


def _beside_steps(parameters: list[_ParameterState]) -> Iterator[Finding | NotChecked]:
    """Yield squared moments kept without their steps, or still zero after several steps."""
    with_both = [(*one.step, *one.squares, one.has_mean) for one in parameters if one.step and one.squares]
    for step, counter, _, is_some, _ in with_both:
        if step == 0 and is_some:
            text = "the optimizer has taken 0 steps for this parameter, but its squares are not zero"
            yield LostStepCounter().finding(counter.name, (), text)
    trained = [(step, squares, is_some) for step, _, squares, is_some, _ in with_both if step >= FEWEST]
    zero = [squares.name for _, squares, is_some in trained if not is_some and _is_zero(squares)]
    steps = f"after up to {max((step for step, _, _ in trained), default=0):g} steps"
    if zero and len(zero) == len(trained) >= FEWEST:
        text = f"the squares of all {len(zero):,} parameters are zero {steps}"
        yield EmptyMoments().finding(zero[0], (), text, severity="warning")
        return
    empty = {squares.name for _, _, squares, _, has_mean in with_both if not has_mean}
    lost = _of_all_layers([name for name in zero if name in empty], [squares.name for _, squares, _ in trained])
    if lost:
        names = printable(folded_names(lost, MAX_NAMES))
        text = f"the moments of {len(lost):,} of {len(trained):,} parameters are zero {steps}, in every layer: {names}"
        yield LostMoments().finding(lost[0], (), text, severity="warning")
    if unclear := [name for name in zero if name not in lost]:
        names = printable(folded_names(unclear, MAX_NAMES))
        whose = counted(len(unclear), "parameter")
        why = f"whether the moments of {whose} were lost, or gradients were all zero: {names}, whose squares are zero"
        yield NotChecked("", why, "run")


def _of_all_layers(zero: Collection[str], names: Collection[str]) -> list[str]:
    """Return the zero ones of which every layer has one, and in every layer it is zero: no single layer is unused."""
    sizes = Counter(starred(name) for name in names)
    zeros = Counter(starred(name) for name in zero)
    kinds = {kind for kind, count in zeros.items() if count == sizes[kind] >= FEWEST}
    return [name for name in zero if starred(name) in kinds]


def _is_zero(tensor: StoredTensor) -> bool:
    """Whether all of a tensor is zero."""
    try:
        return not any(tensor.chunk_bits(chunk).any() for chunk in tensor.chunks)
    except (DumpError, OSError):
        return False


def _steps(steps: list[tuple[str, float]]) -> Iterator[Finding]:
    """Yield the one file whose steps differ from the step that all other files share."""
    by_file: dict[str, Counter[float]] = {}
    for file, value in steps:
        by_file.setdefault(file, Counter())[value] += 1
    values = {value for own in by_file.values() for value in own}
    if len(values) != 2 or len(by_file) < 2:
        return
    for value in values:
        files = [file for file, own in by_file.items() if value in own]
        if len(files) == 1 and len(by_file[files[0]]) == 1 and by_file[files[0]][value] >= FEWEST:
            (usual,) = values - {value}
            yield _of_another_save(files[0], value, usual, by_file)
            return


def _of_another_save(file: str, value: float, usual: float, by_file: Mapping[str, Counter[float]]) -> Finding:
    other_files = listed(printable(one) for one in by_file if one != file)
    has = f"the {by_file[file][value]:,} optimizer steps in {printable(file)} are {value:g}"
    text = f"{has}, and all of those in {counted(len(by_file) - 1, 'other file')} ({other_files}) are {usual:g}"
    return MixedStepFiles().finding("", (), text, severity="warning")
