"""Pickles read as data with a closed list of types; nothing is imported or called.

`pickle.Unpickler` with a narrow `find_class` runs no code either, but a few bytes make it allocate gigabytes (a memo
index), hash forever or overflow the stack (nested tuples as a key). This machine knows the opcodes that torch writes,
and counts the memory that they take.
"""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shardviz.errors import DumpError
from shardviz.layout.dtypes import is_dtype
from shardviz.machine import collector_paused
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Step: TypeAlias = "Callable[[PickleMachine, Any], None]"
    Reader: TypeAlias = "Callable[[io.BytesIO], Any] | None"

MEMORY_PER_BYTE = 60
"""Bytes of memory that a byte of a pickle may take: what torch writes takes up to 41, a nested tuple 72."""

MEMORY_OF_ALL = 1 << 20
"""Bytes of memory that any pickle may take besides."""

MAX_MEMORY = 1 << 32
"""Bytes of memory that no pickle may take more than: metadata of 800,000 chunks, by this count."""

STOP = b"."
"""The opcode that ends a pickle."""

_DCP = "torch.distributed.checkpoint."
_DEEPSPEED = (
    *("deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.utils.tensor_fragment.fragment_address"),
    *(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")),
    *("torch._tensor._rebuild_from_type_v2", "torch.Tensor", "torch.nn.parameter.Parameter"),
    *("argparse.Namespace", "_codecs.encode"),
)
"""Types of DeepSpeed's own files, and of what jobs put beside a model in them."""

MEMBER = "builtins.getattr"
"""By which Python 3.11.0 to 3.11.3 pickle the member of an enum: its class and its name."""

_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat")
KNOWN = frozenset(
    {
        *(f"{_DCP}metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *(f"{_DCP}metadata.{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk")),
        f"{_DCP}metadata._MEM_FORMAT_ENCODING",
        *(f"{_DCP}filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *(f"{_DCP}planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        *("torch.Size", "torch.device", "torch.serialization._get_layout", "torch.storage.UntypedStorage"),
        *(f"torch.{name}Storage" for name in _STORAGES),
        *(f"torch._utils.{name}" for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", *_PARAMETERS)),
        *("collections.OrderedDict", "pathlib.PosixPath", "pathlib.WindowsPath"),
        *_DEEPSPEED,
        *("pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
        MEMBER,
    }
)
"""The types that a checkpoint may name; element types besides. Each is a name here, and no more."""

MAX_MARKS = 1000
"""Levels of nesting."""

MAX_NAME = 400
"""Characters of a type's name that are shown."""

_OBJECT, _CONTAINER, _ITEM, _ENTRY = 64, 80, 8, 100
"""Bytes of an object, of a list or dict, of an item in a tuple, and of an entry of a dict or of the memo, about."""

_SCALARS = (str, int, float, bool, bytes, type(None))
MAX_BYTES = 1 << 28
"""Bytes of a pickle: a checkpoint of a million chunks has fewer."""

MODULE = "torch.nn.modules."
SUBCLASS = "torch._utils._rebuild_wrapper_subclass"
"""How torch pickles a tensor of a type of its own, such as a quantized one of torchao: by code, which is not run."""

SHARDS = (b"torch.distributed.tensor", b"torch.distributed._tensor", b"torch.distributed._shard.sharded_tensor")
"""Modules of tensors that are split over ranks."""

NEAR = 256
"""Bytes behind a tensor subclass in which its own type is named, before those of the tensors that follow."""


class RefusedError(Exception):
    """A pickle contains something that no checkpoint needs."""


@dataclass(frozen=True, slots=True)
class Global:
    """A type or function that a pickle names.

    Attributes:
        name: Its module and name: `torch.float32`.
    """

    name: str


@dataclass(slots=True, eq=False)
class PickledObject:
    """A type and its arguments as a pickle names them; the object is never built.

    Attributes:
        kind: The type's name; `storage` for what stands outside the pickle.
        state: What is set on it afterwards, nothing if nothing is.
    """

    kind: str
    args: Any
    state: Any = None

    def field(self, name: str) -> Any:
        """Return one of the attributes that are set on it, None if it is not set."""
        return self.state.get(name) if type(self.state) is dict else None


class PickleMachine:
    """The state of reading one pickle: input, stack, marks and memo."""

    def __init__(self, content: bytes) -> None:
        self._stream = io.BytesIO(content)
        self.spent = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    @property
    def at(self) -> int:
        """How many bytes were read."""
        return self._stream.tell()

    def run(self, steps: Mapping[bytes, tuple[Step, Reader]]) -> Any:
        """Follow the opcodes to the end, and return what is on top of the stack.

        Args:
            steps: For each opcode what it does, and what reads its argument.
        """
        stream = self._stream
        while (opcode := stream.read(1)) != STOP:
            if opcode not in steps:
                raise RefusedError(f"opcode {opcode!r}, which checkpoints do not use") if opcode else ValueError
            step, read = steps[opcode]
            step(self, read(stream) if read else None)
        return self.stack.pop()

    def spend(self, size: int) -> None:
        """Refuse a pickle whose objects take much more memory than the bytes read so far."""
        self.spent += size
        if self.spent > min(MEMORY_PER_BYTE * self.at + MEMORY_OF_ALL, MAX_MEMORY):
            most = f"{MEMORY_PER_BYTE} times its bytes, or {MAX_MEMORY:,} bytes"
            raise RefusedError(f"objects that take more memory than {most}")

    def since_mark(self) -> list[Any]:
        """Return what was put on the stack since the last mark."""
        items, self.stack = self.stack, self.marked.pop()
        return items


def _push(value: Any) -> Step:
    return lambda machine, arg: machine.stack.append(value)


def _push_empty(kind: type) -> Step:
    def push(machine: PickleMachine, arg: Any) -> None:
        machine.spend(_CONTAINER)
        machine.stack.append(kind())

    return push


def _push_arg(machine: PickleMachine, arg: Any) -> None:
    machine.stack.append(arg)


def _nothing(machine: PickleMachine, arg: Any) -> None:
    """Skip a protocol's number, or a frame's length."""


def _mark(machine: PickleMachine, arg: Any) -> None:
    if len(machine.marked) == MAX_MARKS:
        raise RefusedError(f"more than {MAX_MARKS:,} levels of nesting")
    machine.marked.append(machine.stack)
    machine.stack = []


def _pop(machine: PickleMachine, arg: Any) -> None:
    machine.stack.pop()


def _tuple(count: int) -> Step:
    def make(machine: PickleMachine, arg: Any) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise ValueError
        machine.spend(_OBJECT + count * _ITEM)
        stack[-count:] = [tuple(stack[-count:])]

    return make


def _marked_tuple(machine: PickleMachine, arg: Any) -> None:
    items = tuple(machine.since_mark())
    machine.spend(_OBJECT + len(items) * _ITEM)
    machine.stack.append(items)


def _append(machine: PickleMachine, arg: Any) -> None:
    value = machine.stack.pop()
    _exactly(machine.stack[-1], list).append(value)


def _appends(machine: PickleMachine, arg: Any) -> None:
    values = machine.since_mark()
    _exactly(machine.stack[-1], list).extend(values)


def _set_item(machine: PickleMachine, arg: Any) -> None:
    machine.spend(_ENTRY)
    value, key = machine.stack.pop(), machine.stack.pop()
    _exactly(machine.stack[-1], dict)[_key(key)] = value


def _set_items(machine: PickleMachine, arg: Any) -> None:
    items = machine.since_mark()
    if len(items) % 2:
        raise ValueError
    into = _exactly(machine.stack[-1], dict)
    machine.spend(len(items) // 2 * _ENTRY)
    for at in range(0, len(items), 2):
        into[_key(items[at])] = items[at + 1]


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _key(key: Any) -> Any:
    """Return a dict's key, if hashing it takes no longer than reading it did."""
    if type(key) in _SCALARS or type(key) is PickledObject:
        return key
    if type(key) is tuple and all(type(part) in _SCALARS for part in key):
        return key
    raise RefusedError("a key that is neither a name nor a number")


def _put(machine: PickleMachine, arg: Any) -> None:
    machine.spend(_ENTRY)
    machine.memo[arg] = machine.stack[-1]


def _memoize(machine: PickleMachine, arg: Any) -> None:
    machine.spend(_ENTRY)
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _get(machine: PickleMachine, arg: Any) -> None:
    machine.stack.append(machine.memo[arg])


def _push_global(machine: PickleMachine, name: str) -> None:
    if name not in KNOWN and not (name.startswith("torch.") and is_dtype(name.removeprefix("torch."))):
        raise RefusedError(f"{name[:MAX_NAME]}, which is not among the types of a checkpoint")
    machine.spend(_OBJECT)
    machine.stack.append(Global(name))


def _global(machine: PickleMachine, arg: Any) -> None:
    _push_global(machine, arg.replace(" ", ".", 1))


def _stack_global(machine: PickleMachine, arg: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    _push_global(machine, f"{_exactly(module, str)}.{_exactly(name, str)}")


def _reduce(machine: PickleMachine, arg: Any) -> None:
    machine.spend(_OBJECT)
    args = _exactly(machine.stack.pop(), tuple)
    kind = _exactly(machine.stack.pop(), Global).name
    if kind == "torch.Size":
        if not all(type(size) is int for size in args[0]):
            raise TypeError
        machine.stack.append(tuple(args[0]))
    elif kind == "collections.OrderedDict" and not args:
        machine.stack.append({})
    elif kind == MEMBER:
        enum, member = args
        machine.stack.append(PickledObject(_exactly(enum, Global).name, (_exactly(member, str),)))
    else:
        machine.stack.append(PickledObject(kind, args))


def _build(machine: PickleMachine, arg: Any) -> None:
    state = machine.stack.pop()
    if type(machine.stack[-1]) is not dict:  # a state dict has a version as an attribute, which is not needed
        _exactly(machine.stack[-1], PickledObject).state = state


def _outside(machine: PickleMachine, arg: Any) -> None:
    machine.spend(_OBJECT)
    machine.stack.append(PickledObject("storage", _exactly(machine.stack.pop(), tuple)))


_BY_CODE: dict[str, Step] = {
    **dict.fromkeys("\x80\x95", _nothing),
    **dict.fromkeys("JKM\x8aGX\x8c\x8dUTCB", _push_arg),  # numbers, texts and bytes
    **{"N": _push(None), "\x88": _push(True), "\x89": _push(False), ")": _push(())},
    **{"(": _mark, "0": _pop, "]": _push_empty(list), "}": _push_empty(dict)},
    **{"a": _append, "e": _appends, "s": _set_item, "u": _set_items},
    **{"t": _marked_tuple, "\x85": _tuple(1), "\x86": _tuple(2), "\x87": _tuple(3)},
    **{"q": _put, "r": _put, "\x94": _memoize, "h": _get, "j": _get},
    **{"c": _global, "\x93": _stack_global, "R": _reduce, "\x81": _reduce, "b": _build, "Q": _outside},
}
STEPS: dict[bytes, tuple[Step, Reader]] = {
    opcode.code.encode("latin-1"): (_BY_CODE[opcode.code], opcode.arg.reader if opcode.arg else None)
    for opcode in pickletools.opcodes
    if opcode.code in _BY_CODE
}


class UnknownTypeError(DumpError):
    """A pickle names a type that isn't known from checkpoints."""

    @property
    def is_subclass(self) -> bool:
        """Whether it is a tensor subclass, as quantized weights are."""
        return SUBCLASS in self.message


def _what_is(content: bytes, at: int, error: RefusedError) -> tuple[str, str]:
    """Say what an unknown type of a pickle is, if that is clear, and what to do."""
    if str(error).startswith(MODULE):
        return ": a whole model, which is code", "save model.state_dict(), not the model itself"
    if SUBCLASS not in str(error):
        return "", "write the checkpoint again with torch.distributed.checkpoint or safetensors"
    if any(module in content[at : at + NEAR] for module in SHARDS):
        fix = "save with torch.distributed.checkpoint, or pass full_state_dict=True to get_model_state_dict"
        return ": one rank's parts of tensors, as DTensor and ShardedTensor", fix
    return "", "save quantized weights as safetensors; torchao has flatten_tensor_state_dict for it"


def read_pickle(content: bytes, where: str) -> Any:
    """Read a pickle as numbers, strings, lists, dicts, tuples, `Global` and `PickledObject`.

    Args:
        where: What to call it in messages.

    Raises:
        UnknownTypeError: It names a type that is not in `KNOWN`.
        DumpError: It is damaged.
    """
    if len(content) > MAX_BYTES:
        raise DumpError(
            f"{where} has {len(content):,} bytes, more than {MAX_BYTES:,}", "is it a checkpoint's metadata?"
        )
    machine = PickleMachine(content)
    try:
        with collector_paused():
            return machine.run(STEPS)
    except RefusedError as error:
        what, fix = _what_is(content, machine.at, error)
        raise UnknownTypeError(
            f"{where} is refused: byte {machine.at:,} has {printable(str(error))}{what}",
            f"nothing in it was run; {fix}",
        ) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DumpError(f"{where} is damaged at byte {machine.at:,} of {len(content):,}", "copy it again") from error


def dict_of(value: Any, path: Path, what: str, *, optional: bool = False) -> dict[Any, Any]:
    """Return a pickle's value as a dict; empty if it is optional and absent.

    Raises:
        DumpError: It is something else.
    """
    if value is None and optional:
        return {}
    if type(value) is not dict:
        raise DumpError(f"{path}: {what} is not a dict, but {type(value).__name__}", "copy it again")
    return value
