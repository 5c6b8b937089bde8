"""Calls inside a module on all ranks, each paired with the unsharded model's.

A call is known by the lines of the user's code that lead to it, its function, and how often they did before. A line
that one side runs more often, such as a loop over a rank's own experts, has no pairs. What only the sharded module runs
is followed by what reads it: the tensor that the unsharded model gives to the next call that both make.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.dump.records.trace import STEP, FrameRecord, LineRecord, LinesRecord, ValueRecord
from shardviz.groups import in_groups, the_only, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Mesh

Value = tuple[tuple[int, int], ...]
"""A tensor of the sharded module: its number on each rank, by rank."""

Key = tuple[int, tuple[tuple[str, int], ...], str]
"""Call of the module, lines and function."""

CONVERSIONS = ("_FromTorchTensor", "_ToTorchTensor", "Redistribute")
"""What DTensors are made by, and turned into plain tensors: what they are of stays the same."""
TURNS = ("T", "t", "mT")
"""What a product that is written by hand makes of a layer's weight."""


ENTRIES = ("loss", "step")
"""Functions of a probe by which both sides may reach the same line: the unsharded model has no step of its own."""

ADDITIONS = ("add", "add_", "radd", "iadd")
"""Functions whose result's gradient is, as it is, that of each tensor that they take."""

JOINS = ("cat", "concat", "concatenate", "stack")
"""Functions that put tensors side by side."""

SELECTS = ("getitem", "select", "narrow", "index_select", "unbind", "split", "chunk")
"""Functions that take parts: of one tensor, each of them gives another."""


@dataclass(eq=False)
class Call:
    """One call, on all ranks that recorded the module.

    Attributes:
        order: Its place in the order of the first rank.
        records: What each rank wrote of it.
        whole: The unsharded model's call; None if it has none.
        is_around: Whether it is made around the model.
    """

    order: int
    records: Mapping[int, LineRecord]
    whole: LineRecord | None = None
    is_around: bool = False

    @property
    def first(self) -> LineRecord:
        """The first rank's record."""
        return next(iter(self.records.values()))

    @property
    def function(self) -> str:
        """What it calls."""
        return self.first.function

    @property
    def line(self) -> FrameRecord:
        """The line of the module's own code that it comes from."""
        return self.first.frames[self.first.innermost]

    @property
    def inner_line(self) -> FrameRecord:
        """The line that makes it, which may stand in a function that the line of the module's own code calls."""
        return self.first.frames[-1]

    @property
    def place(self) -> str:
        """The line of the module's own code as `moe.py:83`."""
        return self.line.place

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """What it is given."""
        return _across({rank: record.inputs for rank, record in self.records.items()})

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """What it returns or writes into."""
        return _across({rank: record.outputs for rank, record in self.records.items()})

    def sent(self, value: Value) -> Value | None:
        """Return what it sends back to a tensor that other calls read as well; None if that was not kept apart."""
        by_rank = ((rank, dict(self.records[rank].sent).get(number)) for rank, number in value if rank in self.records)
        sent = tuple((rank, number) for rank, number in by_rank if number is not None)
        return sent if len(sent) == len(value) else None

    @property
    def counts_by_rank(self) -> bool:
        """Whether its numbers depend on the rank: what it returns is then the rank's own by intention."""
        return len({record.numbers for record in self.records.values()}) > 1


def _across(numbers: Mapping[int, Sequence[int]]) -> tuple[Value, ...]:
    count = the_only({len(own) for own in numbers.values()}) or 0
    return tuple(tuple((rank, own[at]) for rank, own in sorted(numbers.items())) for at in range(count))


@dataclass
class Lines:
    """The calls inside of one module on both sides.

    Attributes:
        sharded: What each rank recorded.
        unsharded: What rank 0 recorded of the unsharded model.
        asked_module: The module that was asked for: the same, or one of torch's own in it.
        wanted: The unsharded model's tensor that a tensor is compared with.
        without_bias: Tensors that the unsharded model does not have: a result and the bias to be taken from it.
        carried: What loops that run more often have left of their variables, with how often they ran.
        composed: What functions of the unsharded model's compute on the way, with what they are given.
    """

    module: str
    sharded: Mapping[int, LinesRecord]
    unsharded: LinesRecord
    asked_module: str
    wanted: dict[Value, int] = field(default_factory=dict)
    without_bias: dict[int, tuple[int, int]] = field(default_factory=dict)
    carried: dict[Value, int] = field(default_factory=dict)
    composed: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(dump: Dump, *, around: bool = False, module: str | None = None) -> Lines | None:
        """Read what the ranks of a dump wrote; None if no module was looked into, or a rank's file is missing.

        Args:
            around: Whether to read the step around the model instead of a module.
            module: Of which module, if ranks looked into several; None for the last.
        """
        sharded: dict[int, LinesRecord] = {}
        whole: LinesRecord | None = None
        for rank, record in dump.files.ranks.items():
            wanted = (lines for lines in record.lines if (lines.module == STEP) == around)
            for lines in (lines for lines in wanted if module in (None, lines.module)):
                if lines.is_unsharded:
                    whole = lines
                elif lines.lines and not lines.why:
                    sharded[rank] = lines
        if whole is None or not sharded or len(dump.files.ranks) < dump.files.run.num_ranks:
            return None
        paired = Lines(whole.module, sharded, whole, whole.asked or whole.module)
        paired.pair()
        return paired

    @property
    def is_step(self) -> bool:
        """Whether these are the lines of the step around the model."""
        return self.module == STEP

    def mesh_in(self, dump: Dump) -> Mesh:
        """Return the part of a dump's mesh whose ranks have the stage of a pipeline that has the module; else all."""
        stages = {rank: set(record.stages) for rank, record in dump.files.ranks.items()}
        here = {stage for rank in self.sharded for stage in stages[rank]}
        others = [own for rank, own in stages.items() if rank not in self.sharded]
        is_stage = all(own and not own & here for own in others)
        return dump.files.mesh.within(tuple(self.sharded)) if is_stage else dump.files.mesh

    @cached_property
    def is_cut(self) -> bool:
        """Whether ranks read different weights: a later stage of a pipeline is given what an earlier one makes."""
        wholes = {value.origin for value in self.unsharded.values if value.origin.startswith("weight ")}
        return any(not wholes <= {value.origin for value in lines.values} for lines in self.sharded.values())

    @cached_property
    def results(self) -> Mapping[str, tuple[Value, int]]:
        """What the step around the model leaves on all ranks, with the unsharded model's tensor, by name."""
        wholes = dict(self.unsharded.results)
        by_rank = {rank: dict(lines.results) for rank, lines in self.sharded.items()}
        names = [name for name in wholes if all(name in results for results in by_rank.values())]
        return {name: (tuple((rank, by_rank[rank][name]) for rank in sorted(by_rank)), wholes[name]) for name in names}

    @cached_property
    def calls(self) -> list[Call]:
        """The calls that all ranks make, in the first rank's order, paired if that is certain."""
        keyed = {rank: dict(self._keyed(lines.lines)) for rank, lines in self.sharded.items()}
        whole = dict(self._keyed(self.unsharded.lines))
        counts = [Counter(key for key, _ in own) for own in (*keyed.values(), whole)]
        first = next(iter(keyed.values()))
        calls: list[Call] = []
        for key in first:
            if all(key in own for own in keyed.values()):
                alike = len({count[key[0]] for count in counts}) == 1
                records = {rank: own[key] for rank, own in keyed.items()}
                calls.append(Call(len(calls), records, whole.get(key) if alike else None, self.is_step))
        return calls

    @cached_property
    def records(self) -> Mapping[tuple[int, int], ValueRecord]:
        """Every sharded tensor, by rank and number."""
        return {(rank, value.number): value for rank, lines in self.sharded.items() for value in lines.values}

    @cached_property
    def wholes(self) -> Mapping[int, ValueRecord]:
        """Every tensor of the unsharded model."""
        wholes = {value.number: value for value in self.unsharded.values}
        return wholes | {number: wholes[made] for number, (made, _) in self.without_bias.items()}

    @cached_property
    def producers(self) -> Mapping[tuple[int, int], Call]:
        """The call that makes a tensor, by rank and number."""
        maker_of: dict[tuple[int, int], Call] = {}
        for call in self.calls:
            inputs = {pair for value in call.inputs for pair in value}
            for pair in (pair for value in call.outputs for pair in value if pair not in inputs):
                maker_of.setdefault(pair, call)
        return maker_of

    @cached_property
    def consumers(self) -> Mapping[tuple[int, int], list[Call]]:
        """The calls that read a tensor, by rank and number."""
        calls_by_tensor = in_groups(
            (pair, call)
            for call in self.calls
            for pair in dict.fromkeys(pair for value in call.inputs for pair in value)
        )
        return calls_by_tensor

    def producer(self, value: Value) -> Call | None:
        """Return the call that makes a tensor on every rank; None if it comes from outside."""
        return the_only({self.producers.get(pair) for pair in value})

    def makers(self, value: Value) -> Iterator[Call]:
        """Yield the calls that a tensor is made of, the nearest first."""
        producer = self.producer(value)
        return walk([producer] if producer is not None else (), self.before)

    def before(self, call: Call) -> list[Call]:
        """Return the calls that make what a call is given."""
        return [maker for given in call.inputs if (maker := self.producer(given)) is not None]

    def after(self, call: Call) -> list[Call]:
        """Return the calls that read what a call makes."""
        return [reader for made in call.outputs for reader in self.readers(made)]

    def source(self, value: Value, leads_on: Callable[[Call, Value], bool]) -> Value:
        """Return the tensor that another comes from: back from each call to the first of its inputs that leads on."""
        while (maker := self.producer(value)) is not None:
            given = next((given for given in maker.inputs if leads_on(maker, given)), None)
            if given is None:
                break
            value = given
        return value

    def is_of_positions(self, value: Value) -> bool:
        """Whether a tensor is made without what the module holds or is given: of numbers that its lines count."""
        sources = {source for call in self.makers(value) for source in call.inputs}
        return not any(self.producer(source) is None for source in sources)

    def order(self, value: Value) -> int:
        """Return when a tensor was made; -1 if it comes from outside."""
        call = self.producer(value)
        return -1 if call is None else call.order

    def line_of(self, value: Value) -> FrameRecord | None:
        """Return the line that makes a tensor; None if it comes from outside."""
        call = self.producer(value)
        return None if call is None else call.line

    def readers(self, value: Value) -> list[Call]:
        """Return the calls that read a tensor, in order."""
        return self.consumers.get(value[0], [])

    def following(self, call: Call) -> Iterator[Call]:
        """Yield the calls that depend on what a call makes, in order."""
        derived = set(call.outputs)
        for later in self.calls[call.order + 1 :]:
            if derived & {*later.inputs}:
                derived |= {*later.outputs}
                yield later

    def derived(self, call: Call) -> set[Value]:
        """Return all that comes of a call."""
        return {value for made in (call, *self.following(call)) for value in made.outputs}

    def origin(self, value: Value) -> str:
        """Return where a tensor comes from, if not from a call."""
        return self.records[value[0]].origin

    def weight_name(self, value: Value) -> str:
        """Return the name of a weight in the model; empty if a tensor is none."""
        kind, _, name = self.origin(value).partition(" ")
        return ".".join(filter(None, (self.module, name))) if kind in ("weight", "buffer") else ""

    def weights_read(self, calls: Iterable[Call]) -> tuple[str, ...]:
        """Return the names of the weights that some calls read, or views and casts of them."""
        given = (given for call in calls for given in call.inputs)
        names = (self.weight_name(self.source(one, lambda maker, _: len(maker.inputs) == 1)) for one in given)
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def asked_calls(self) -> list[Call]:
        """The calls that read weights of the module that was asked for, if that is one of torch's own in this one."""
        begin = f"weight {self.asked_module.removeprefix(f'{self.module}.')}."
        reading = (call for call in self.calls if any(self.origin(given).startswith(begin) for given in call.inputs))
        return [] if self.asked_module == self.module else list(reading)

    def is_input(self, value: Value) -> bool:
        """Whether the module is given a tensor, or it comes from different calls on different ranks."""
        return self.origin(value).startswith("input") or not self.origin(value)

    @cached_property
    def values(self) -> list[Value]:
        """Every tensor, in the order in which it is first met."""
        return list(dict.fromkeys(value for call in self.calls for value in (*call.inputs, *call.outputs)))

    def of_wanted(self, wanted: int) -> list[Value]:
        """Return the tensors that are compared with one of the unsharded model's, in order."""
        return [value for value in self.values if self.wanted.get(value) == wanted]

    @cached_property
    def returned(self) -> list[tuple[Value, int]]:
        """What the module returns, with the unsharded model's tensor."""
        pairs = [self.results["loss"]] if "loss" in self.results else []
        for call, whole in enumerate(self.unsharded.returned):
            by_rank = {rank: lines.returned[call] for rank, lines in self.sharded.items() if call < len(lines.returned)}
            values = _across(by_rank) if len(by_rank) == len(self.sharded) else ()
            pairs += zip(values, whole, strict=False) if len(values) == len(whole) else ()
        return pairs

    def pair(self) -> None:
        """Find the unsharded model's tensor for as many tensors as possible, the most certain first."""
        paired = [call for call in self.calls if call.whole is not None]
        for call in paired:
            if call.whole is not None and len(call.outputs) == len(call.whole.outputs):
                self._all(zip(call.outputs, call.whole.outputs, strict=True))
        self._all(self.results.values())
        named: dict[str, int] = {}
        for whole in self.unsharded.values:
            named.setdefault(whole.origin, whole.number)
        for value in self.values:
            origin = self.origin(value)
            if origin in named and origin not in ("", "elsewhere"):
                self.wanted.setdefault(value, named[origin])
        self._all(self.returned)
        for call in paired:
            if call.whole is not None and len(call.inputs) == len(call.whole.inputs):
                self._all(zip(call.inputs, call.whole.inputs, strict=True))

        self._by_loops()
        self._by_memory()
        self._by_what_they_read()
        self._by_what_they_make()

    @cached_property
    def rounds(self) -> Mapping[Key, tuple[Sequence[Call], Sequence[LineRecord]]]:
        """The calls of each line and function, as often as a loop runs them, with the unsharded model's."""
        of_whole = in_groups((self.key_of(line), line) for line in self.unsharded.lines)
        of_ranks = in_groups((self.key_of(call.first), call) for call in self.calls)
        return {key: (calls, of_whole.get(key, [])) for key, calls in of_ranks.items()}

    def is_of_blocks(self, call: Call) -> bool:
        """Whether a loop of ranks runs a call in more rounds than the unsharded model: each is of another block."""
        calls, of_whole = self.rounds[self.key_of(call.first)]
        return 0 < len(of_whole) < len(calls)

    def _by_loops(self) -> None:
        """Pair what a loop has left of its variables with the unsharded model's, if that has fewer rounds.

        A loop over the blocks of all ranks has one round in the unsharded model; one over a rank's tokens has fewer.
        A variable is what a round reads of the round before, and the first round of what comes before the loop. What a
        collective makes of it goes from rank to rank, and is none.
        """
        for calls, of_whole in self.rounds.values():
            for at in range(min(len(call.inputs) for call in calls)) if 0 < len(of_whole) < len(calls) else ():
                maker, makes = self._carries(calls, at)
                whole = self.rounds[self.key_of(maker.first)][1] if maker is not None else []
                if maker is not None and whole and len(whole[-1].outputs) == len(maker.outputs):
                    self.wanted.setdefault(maker.outputs[makes], whole[-1].outputs[makes])
                    self.carried[maker.outputs[makes]] = len(calls)

    def _carries(self, calls: Sequence[Call], at: int) -> tuple[Call | None, int]:
        """Return the last call that makes a variable of which every round reads what the one before has left."""
        makers = [self.producer(call.inputs[at]) for call in calls]
        first, carried = makers[1], calls[1].inputs[at]
        if first is None or first.first.is_collective or first.first.ranks or carried not in first.outputs:
            return None, 0
        making, makes = self.rounds[self.key_of(first.first)][0], first.outputs.index(carried)
        if len(making) != len(calls) or makers[0] in making or len({len(made.outputs) for made in making}) > 1:
            return None, 0
        is_carried = all(call.inputs[at] == made.outputs[makes] for call, made in zip(calls[1:], making, strict=False))
        return (making[-1], makes) if is_carried else (None, 0)

    def _by_memory(self) -> None:
        """Pair what a step makes of gradients in place with the unsharded model's gradients."""
        gradients = {name: pair for name, pair in self.results.items() if name.startswith("gradient ")}
        wholes = {self.memory(value): whole for value, whole in gradients.values()}
        for value in self.values if wholes else ():
            if (whole := wholes.get(self.memory(value))) is not None:
                self.wanted.setdefault(value, whole)

    def memory(self, value: Value) -> tuple[int, ...]:
        """Return in which memory a tensor stands on every rank."""
        return tuple(self.records[pair].memory for pair in value)

    def _by_what_they_read(self) -> None:
        """Pair calls on different lines by function and inputs, as of a class that replaces another."""
        frames = {call.first.frames for call in self.calls}
        there = {line.frames for line in self.unsharded.lines}
        unpaired = [line for line in self.unsharded.lines if line.frames not in frames]
        for call in self.calls:
            if call.function in CONVERSIONS and call.inputs and call.inputs[0] in self.wanted:
                self._all((value, self.wanted[call.inputs[0]]) for value in call.outputs)
                continue
            if call.first.frames in there or call.first.is_collective:
                continue
            expected_inputs = [self.wanted.get(value) for value in call.inputs]
            if self._pair_without_bias(call, expected_inputs, unpaired):
                continue
            for at, whole in enumerate(unpaired):
                sides = list(zip(expected_inputs, whole.inputs, strict=False))
                is_alike = whole.function == call.function and len(expected_inputs) == len(whole.inputs)
                matches = [number == other for number, other in sides if number is not None]
                if is_alike and matches and all(matches) and len(whole.outputs) == len(call.outputs):
                    if call.function in SELECTS and not self._are_as_many(whole):
                        break
                    call.whole = whole
                    self._all(zip(call.outputs, whole.outputs, strict=True))
                    self._all(zip(call.inputs, whole.inputs, strict=True))
                    del unpaired[: at + 1]
                    break

    def _pair_without_bias(self, call: Call, given: Sequence[int | None], left: Sequence[LineRecord]) -> bool:
        """Pair a product with the unsharded model's that adds a bias, which ranks add after the sum of their terms."""
        is_linear = call.function == "linear" and len(given) == 2
        turned = self.producer(call.inputs[1]) if call.function == "matmul" and len(given) == 2 else None
        if not is_linear and (turned is None or turned.function not in TURNS):
            return False
        weight = call.inputs[1] if turned is None else turned.inputs[0]
        known = self.wanted.get(weight)
        for whole in (line for line in left if line.function == "linear" and len(line.inputs) == 3):
            if whole.inputs[1] == known or (known is None and turned and whole.inputs[0] == given[0] is not None):
                number = -1 - len(self.without_bias)
                self.without_bias[number] = whole.outputs[0], whole.inputs[2]
                self._all([(call.outputs[0], number), (call.inputs[0], whole.inputs[0]), (weight, whole.inputs[1])])
                return True
        return False

    def _by_what_they_make(self) -> None:
        """Pair calls on different lines by function and by what they make, the last first."""
        makers = {number: line for line in reversed(self.unsharded.lines) for number in line.outputs}
        taken = {id(call.whole) for call in self.calls if call.whole is not None}
        for call in reversed(self.calls):
            whole = makers.get(self.wanted.get(call.outputs[0], -1)) if len(call.outputs) == 1 else None
            is_free = whole is not None and id(whole) not in taken and call.whole is None
            if whole is None or not is_free or whole.function != call.function or whole.function in SELECTS:
                continue
            given = [self.wanted.get(value) for value in call.inputs]
            known = [number == other for number, other in zip(given, whole.inputs, strict=False) if number is not None]
            if len(given) == len(whole.inputs) and all(known) and (known or len(given) == 1):
                call.whole = whole
                taken.add(id(whole))
                self._all(zip(call.inputs, whole.inputs, strict=True))

    def _are_as_many(self, whole: LineRecord) -> bool:
        """Whether both sides take parts of a tensor as often: of a split one ranks take fewer, and other parts."""
        function, number = whole.function, whole.inputs[0]
        calls = [one for one in self.calls if one.function == function and one.inputs]
        there = [line for line in self.unsharded.lines if line.function == function and line.inputs[:1] == (number,)]
        return len([one for one in calls if self.wanted.get(one.inputs[0]) == number]) == len(there)

    def _all(self, pairs: Iterable[tuple[Value, int]]) -> None:
        for value, whole in pairs:
            self.wanted.setdefault(value, whole)

    def _keyed(self, lines: Sequence[LineRecord]) -> Iterator[tuple[tuple[Key, int], LineRecord]]:
        """Yield each line with its key, and how often that came before."""
        counts: Counter[Key] = Counter()
        for line in lines:
            key = self.key_of(line)
            yield (key, counts[key]), line
            counts[key] += 1

    def key_of(self, line: LineRecord) -> Key:
        """Return by what a call is known."""
        frames = line.frames
        while self.is_step and len(frames) > 1 and frames[0].function in ENTRIES:
            frames = frames[1:]
        return line.call, tuple((frame.file, frame.line) for frame in frames), line.function
