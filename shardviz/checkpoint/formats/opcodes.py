"""What each opcode of a pickle does to the machine that reads it: data is made, and nothing else.

Only the opcodes that torch writes are here. What takes memory is counted before it is made.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.formats.known_types import KNOWN
from shardviz.checkpoint.formats.machine import MAX_NAME, Global, Machine, Made, RefusedError
from shardviz.layout.dtypes import is_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MARKS = 1000
"""Levels of nesting."""

_OBJECT, _CONTAINER, _ITEM, _ENTRY = 64, 80, 8, 100
"""Bytes of an object, of a list or dict, of an item in a tuple, and of an entry of a dict or of the memo, about."""

_SCALARS = (str, int, float, bool, bytes, type(None))


def _push(value: Any) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(value)


def _push_empty(kind: type) -> Callable[[Machine], None]:
    def push(machine: Machine) -> None:
        machine.spend(_CONTAINER)
        machine.stack.append(kind())

    return push


def _push_number(size: int) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.number(size))


def _int(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


def _long(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.number(1)), "little", signed=True))


def _float(machine: Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _text(size: int) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(size)).decode("utf-8", "surrogatepass"))


def _bytes(size: int) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(size)))


def _latin(size: int) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(size)).decode("latin-1"))


def _skip(size: int) -> Callable[[Machine], None]:
    def skip(machine: Machine) -> None:
        machine.take(size)

    return skip


def _mark(machine: Machine) -> None:
    if len(machine.marked) == MAX_MARKS:
        raise RefusedError(f"more than {MAX_MARKS:,} levels of nesting")
    machine.marked.append(machine.stack)
    machine.stack = []


def _pop(machine: Machine) -> None:
    machine.stack.pop()


def _tuple(count: int) -> Callable[[Machine], None]:
    def make(machine: Machine) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise ValueError
        machine.spend(_OBJECT + count * _ITEM)
        stack[-count:] = [tuple(stack[-count:])]

    return make


def _marked_tuple(machine: Machine) -> None:
    found = tuple(machine.since_mark())
    machine.spend(_OBJECT + len(found) * _ITEM)
    machine.stack.append(found)


def _append(machine: Machine) -> None:
    value = machine.stack.pop()
    _exactly(machine.stack[-1], list).append(value)


def _appends(machine: Machine) -> None:
    values = machine.since_mark()
    _exactly(machine.stack[-1], list).extend(values)


def _set_item(machine: Machine) -> None:
    machine.spend(_ENTRY)
    value, key = machine.stack.pop(), machine.stack.pop()
    _exactly(machine.stack[-1], dict)[_key(key)] = value


def _set_items(machine: Machine) -> None:
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
    raise RefusedError("a key that is neither a name nor a number")


def _put(size: int) -> Callable[[Machine], None]:
    def put(machine: Machine) -> None:
        machine.spend(_ENTRY)
        machine.memo[machine.number(size)] = machine.stack[-1]

    return put


def _memoize(machine: Machine) -> None:
    machine.spend(_ENTRY)
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _get_short(machine: Machine) -> None:
    machine.stack.append(machine.memo[machine.data[machine.at]])
    machine.at += 1


def _get_long(machine: Machine) -> None:
    machine.stack.append(machine.memo[_LONG.unpack_from(machine.data, machine.at)[0]])
    machine.at += _LONG.size


def _small_number(machine: Machine) -> None:
    machine.stack.append(machine.data[machine.at])
    machine.at += 1


def _named(machine: Machine, name: str) -> None:
    if name not in KNOWN and not (name.startswith("torch.") and is_dtype(name.removeprefix("torch."))):
        raise RefusedError(f"{name[: 2 * MAX_NAME]}, which is not among the types of a checkpoint")
    machine.spend(_OBJECT)
    machine.stack.append(Global(name))


def _global(machine: Machine) -> None:
    module = machine.line()
    _named(machine, f"{module}.{machine.line()}")


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    _named(machine, f"{_exactly(module, str)}.{_exactly(name, str)}")


def _reduce(machine: Machine) -> None:
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


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    if type(machine.stack[-1]) is not dict:  # a state dict has a version as an attribute, which is not needed
        _exactly(machine.stack[-1], Made).state = state


def _outside(machine: Machine) -> None:
    machine.spend(_OBJECT)
    machine.stack.append(Made("storage", _exactly(machine.stack.pop(), tuple)))


_LONG = struct.Struct("<I")
_BY_OPCODE: dict[bytes, Callable[[Machine], None]] = {
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
STEPS = {ord(opcode): step for opcode, step in _BY_OPCODE.items()}
