"""Pickles read as data: a closed list of inert types, and nothing is imported, called or built for a file.

`pickle.Unpickler` with a narrow `find_class` runs no code either, but a few bytes make it allocate gigabytes (a memo
index), hash forever or overflow the stack (nested tuples as a key). This reader knows the opcodes that torch writes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardviz.dump.pause import collector_paused
from shardviz.errors import DumpError
from shardviz.layout.dtypes import is_dtype
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BYTES = 1 << 28
"""Bytes of a pickle: a checkpoint of a million chunks has fewer."""

MAX_MARKS = 1000
"""Levels of nesting."""

MEMORY_PER_BYTE = 60
"""Bytes of memory that a byte of a pickle may take: what torch writes takes up to 41, a nested tuple 72."""

MEMORY_OF_ALL = 1 << 20
"""Bytes of memory that any pickle may take besides."""

MAX_MEMORY = 1 << 32
"""Bytes of memory that no pickle may take more than: metadata of 800,000 chunks, by this count."""

_OBJECT, _CONTAINER, _ITEM, _ENTRY = 64, 80, 8, 100
"""Bytes of an object, of a list or dict, of an item in a tuple, and of an entry of a dict or of the memo, about."""

MAX_NAME = 200
"""Characters of the module and of the name of a type."""

_DCP = "torch.distributed.checkpoint."
_DEEPSPEED = (
    *("deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.utils.tensor_fragment.fragment_address"),
    *(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")),
    *("torch._tensor._rebuild_from_type_v2", "torch.Tensor", "torch.nn.parameter.Parameter"),
    *("argparse.Namespace", "_codecs.encode"),
)
"""Types of DeepSpeed's own files, and of what jobs put beside a model in them."""

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
        *(f"torch._utils.{name}" for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")),
        *("collections.OrderedDict", "pathlib.PosixPath", "pathlib.WindowsPath"),
        *_DEEPSPEED,
        *("pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
    }
)
"""The types that a checkpoint may name; element types besides. Each is a name here, and no more."""

_SCALARS = (str, int, float, bool, bytes, type(None))


class _RefusedError(Exception):
    """A pickle has what no checkpoint needs."""


@dataclass(frozen=True, slots=True)
class Global:
    """A type or function that a pickle names.

    Attributes:
        name: Its module and name: `torch.float32`.
    """

    name: str


@dataclass(slots=True, eq=False)
class Made:
    """What a pickle says is made of a type and some arguments; nothing is made.

    Attributes:
        kind: The type's name; `storage` for what stands outside the pickle.
        args: Its arguments.
        state: What is set on it afterwards, nothing where nothing is.
    """

    kind: str
    args: Any
    state: Any = None

    def field(self, name: str) -> Any:
        """Return one of the attributes that are set on it, None where it is not set."""
        return self.state.get(name) if type(self.state) is dict else None


def read_pickle(data: bytes, where: str) -> Any:
    """Read a pickle as numbers, strings, lists, dicts, tuples, `Global` and `Made`.

    Args:
        data: The pickle.
        where: What to call it in messages.

    Raises:
        DumpError: It is damaged, or names a type that is not in `KNOWN`.
    """
    if len(data) > MAX_BYTES:
        raise DumpError(f"{where} has {len(data):,} bytes, more than {MAX_BYTES:,}", "is it a checkpoint's metadata?")
    machine = _Machine(data)
    try:
        with collector_paused():
            return machine.run()
    except _RefusedError as error:
        raise DumpError(
            f"{where} is refused: byte {machine.at:,} has {printable(str(error))}",
            "nothing in it was run; write the checkpoint again with torch.distributed.checkpoint or safetensors",
        ) from error
    except (LookupError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise DumpError(f"{where} is damaged at byte {machine.at:,} of {len(data):,}", "copy it again") from error


class _Machine:
    """The state of reading one pickle: what is left to read, the stack, the marks and the memo."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.spent = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        while (opcode := data[self.at]) != _STOP:
            self.at += 1
            step = steps.get(opcode)
            if step is None:
                raise _RefusedError(f"opcode {opcode:#04x}, which checkpoints do not use")
            step(self)
        return self.stack.pop()

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise ValueError
        found = self.data[self.at : end]
        self.at = end
        return found

    def number(self, size: int) -> int:
        if size == 1:
            self.at += 1
            return self.data[self.at - 1]
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at, self.at + MAX_NAME)
        found = self.data[self.at : end].decode()
        self.at = end + 1
        return found

    def spend(self, size: int) -> None:
        """Refuse a pickle whose objects take much more memory than the bytes read so far."""
        self.spent += size
        if self.spent > min(MEMORY_PER_BYTE * self.at + MEMORY_OF_ALL, MAX_MEMORY):
            most = f"{MEMORY_PER_BYTE} times its bytes, or {MAX_MEMORY:,} bytes"
            raise _RefusedError(f"objects that take more memory than {most}")

    def since_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.marked.pop()
        return found


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _push_empty(kind: type) -> Callable[[_Machine], None]:
    def push(machine: _Machine) -> None:
        machine.spend(_CONTAINER)
        machine.stack.append(kind())

    return push


def _push_number(size: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.number(size))


def _int(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


def _long(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.number(1)), "little", signed=True))


def _float(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _text(size: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(size)).decode("utf-8", "surrogatepass"))


def _bytes(size: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(size)))


def _latin(size: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(size)).decode("latin-1"))


def _skip(size: int) -> Callable[[_Machine], None]:
    def skip(machine: _Machine) -> None:
        machine.take(size)

    return skip


def _mark(machine: _Machine) -> None:
    if len(machine.marked) == MAX_MARKS:
        raise _RefusedError(f"more than {MAX_MARKS:,} levels of nesting")
    machine.marked.append(machine.stack)
    machine.stack = []


def _pop(machine: _Machine) -> None:
    machine.stack.pop()


def _tuple(count: int) -> Callable[[_Machine], None]:
    def make(machine: _Machine) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise ValueError
        machine.spend(_OBJECT + count * _ITEM)
        stack[-count:] = [tuple(stack[-count:])]

    return make


def _marked_tuple(machine: _Machine) -> None:
    found = tuple(machine.since_mark())
    machine.spend(_OBJECT + len(found) * _ITEM)
    machine.stack.append(found)


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _exactly(machine.stack[-1], list).append(value)


def _appends(machine: _Machine) -> None:
    values = machine.since_mark()
    _exactly(machine.stack[-1], list).extend(values)


def _set_item(machine: _Machine) -> None:
    machine.spend(_ENTRY)
    value, key = machine.stack.pop(), machine.stack.pop()
    _exactly(machine.stack[-1], dict)[_key(key)] = value


def _set_items(machine: _Machine) -> None:
    items = machine.since_mark()
    if len(items) % 2:
        raise ValueError
    into = _exactly(machine.stack[-1], dict)
    machine.spend(len(items) // 2 * _ENTRY)
    for at in range(0, len(items), 2):
        key = items[at]
        into[key if type(key) is str else _key(key)] = items[at + 1]


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _key(key: Any) -> Any:
    """Return a dict's key, if hashing it takes no longer than reading it did."""
    if type(key) in _SCALARS or type(key) is Made:
        return key
    if type(key) is tuple and all(type(part) in _SCALARS for part in key):
        return key
    raise _RefusedError("a key that is neither a name nor a number")


def _put(size: int) -> Callable[[_Machine], None]:
    def put(machine: _Machine) -> None:
        machine.spend(_ENTRY)
        machine.memo[machine.number(size)] = machine.stack[-1]

    return put


def _memoize(machine: _Machine) -> None:
    machine.spend(_ENTRY)
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _get_short(machine: _Machine) -> None:
    machine.stack.append(machine.memo[machine.data[machine.at]])
    machine.at += 1


def _get_long(machine: _Machine) -> None:
    machine.stack.append(machine.memo[_LONG.unpack_from(machine.data, machine.at)[0]])
    machine.at += _LONG.size


def _small_number(machine: _Machine) -> None:
    machine.stack.append(machine.data[machine.at])
    machine.at += 1


def _named(machine: _Machine, name: str) -> None:
    if name not in KNOWN and not (name.startswith("torch.") and is_dtype(name.removeprefix("torch."))):
        raise _RefusedError(f"{name[: 2 * MAX_NAME]}, which is not among the types of a checkpoint")
    machine.spend(_OBJECT)
    machine.stack.append(Global(name))


def _global(machine: _Machine) -> None:
    module = machine.line()
    _named(machine, f"{module}.{machine.line()}")


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    _named(machine, f"{_exactly(module, str)}.{_exactly(name, str)}")


def _reduce(machine: _Machine) -> None:
    machine.spend(_OBJECT)
    args = _exactly(machine.stack.pop(), tuple)
    kind = _exactly(machine.stack.pop(), Global).name
    if kind == "torch.Size":
        if not all(type(size) is int for size in args[0]):
            raise TypeError
        machine.stack.append(tuple(args[0]))
    elif kind == "collections.OrderedDict" and not args:
        machine.stack.append({})
    else:
        machine.stack.append(Made(kind, args))


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    if type(machine.stack[-1]) is not dict:  # a state dict has a version as an attribute, which is not needed
        _exactly(machine.stack[-1], Made).state = state


def _outside(machine: _Machine) -> None:
    machine.spend(_OBJECT)
    machine.stack.append(Made("storage", _exactly(machine.stack.pop(), tuple)))


_LONG = struct.Struct("<I")
_STOP = ord(".")
_BY_OPCODE: dict[bytes, Callable[[_Machine], None]] = {
    **{b"\x80": _skip(1), b"\x95": _skip(8), b"(": _mark, b"0": _pop},
    **{b"N": _push(None), b"\x88": _push(True), b"\x89": _push(False), b")": _push(())},
    **{b"J": _int, b"K": _small_number, b"M": _push_number(2), b"\x8a": _long, b"G": _float},
    **{b"X": _text(4), b"\x8c": _text(1), b"\x8d": _text(8), b"U": _latin(1), b"T": _latin(4)},
    **{b"C": _bytes(1), b"B": _bytes(4)},
    **{
        b"]": _push_empty(list),
        b"a": _append,
        b"e": _appends,
        b"}": _push_empty(dict),
        b"s": _set_item,
        b"u": _set_items,
    },
    **{b"t": _marked_tuple, b"\x85": _tuple(1), b"\x86": _tuple(2), b"\x87": _tuple(3)},
    **{b"q": _put(1), b"r": _put(4), b"\x94": _memoize, b"h": _get_short, b"j": _get_long},
    **{b"c": _global, b"\x93": _stack_global, b"R": _reduce, b"\x81": _reduce, b"b": _build, b"Q": _outside},
}
_STEPS = {ord(opcode): step for opcode, step in _BY_OPCODE.items()}
