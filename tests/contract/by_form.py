"""`python -m tests.contract.by_form`: the room `forms`, of what torch.save can write besides plain tensors in a dict.

Parameters, subclasses, views, dtypes that have no storage of their own, keys of every kind, archives of every kind, and
pickles whose instructions do not fit each other. Each file is checked, and compared with one of plain tensors.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

from tests.contract import store
from tests.contract.judge import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOM = "forms"


def saved(value: Any, *, is_zip: bool = True) -> bytes:
    """Return the file that torch.save makes of a value."""
    made = io.BytesIO()
    torch.save(value, made, _use_new_zipfile_serialization=is_zip)
    return made.getvalue()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_attribute(one: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has an attribute of its own, which is saved with it."""
    one.is_mine = True  # type: ignore[attr-defined]
    return one


def values() -> Iterator[tuple[str, Any]]:
    """Yield what may be saved as a tensor, or in the place of one."""
    w = numbers(6, 8)
    yield "a plain tensor", w
    yield "a parameter", nn.Parameter(w)
    yield "a parameter that is frozen", nn.Parameter(w, requires_grad=False)
    yield "a parameter with an attribute", with_attribute(nn.Parameter(w))
    yield "a tensor with an attribute", with_attribute(w.clone())
    yield "an uninitialized parameter", nn.UninitializedParameter()
    yield "transposed", numbers(8, 6).T
    yield "rows of a larger one", numbers(12, 8)[3:9]
    yield "every other column", numbers(6, 16)[:, ::2]
    yield "expanded", numbers(1, 8).expand(6, 8)
    yield "of no rows", numbers(0, 8)
    yield "a scalar", numbers()
    yield "sparse", w.to_sparse()
    yield "quantized", torch.quantize_per_tensor(w, 0.1, 0, torch.qint8)
    yield "on the meta device", w.to("meta")
    yield "conjugated", torch.complex(w, w).conj()
    for dtype in ("bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64", "uint16", "float8_e4m3fn"):
        yield f"of {dtype}", w.to(getattr(torch, dtype))
    yield from {"None": None, "a number": 1.5, "a word": "w", "bytes": b"w", "a list": [w, w]}.items()
    yield "a tuple", (w, 2)
    yield "a size", torch.Size((6, 8))
    yield "a dtype", torch.float32
    yield "a device", torch.device("cpu")
    yield "an inner dict", {"inner": w, "deeper": {"still": w + 1}}
    yield "an empty dict", {}
    yield "a set", {1, 2}


def dicts() -> Iterator[tuple[str, Any]]:
    """Yield what may hold tensors."""
    w, b = numbers(6, 8), numbers(8, seed=1)
    yield "an ordered dict", OrderedDict(w=w, b=b)
    yield "a module's state", nn.Linear(8, 6, dtype=torch.float64).state_dict()
    yield "a list", [w, b]
    yield "a tensor alone", w
    yield "nothing", {}
    yield "numbers as keys", {0: w, 1: b}
    yield "tuples as keys", {("w", 0): w, ("b", 1): b}
    yield "nested tuples as keys", {(("w", 0), 1): w}
    yield "None as a key", {None: w}
    yield "names that print badly", {"w\n\x1b[1m": w, "": b}
    yield "a name twice", {"inner": {"w": w}, "inner.w": b}
    yield "two of one storage", {"w": w, "tied": w, "row": w[2]}
    state = {"step": torch.tensor(3.0), "exp_avg": w, "exp_avg_sq": w * w}
    yield "an optimizer", {"state": {0: state, 1: state}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    yield "a model and its optimizer", {"model": {"w": w}, "optimizer": {"state": {0: state}, "param_groups": []}}
    yield "a checkpoint of a trainer", {"state_dict": {"w": w}, "epoch": 3, "hparams": {"lr": 0.1}}


def archives() -> Iterator[tuple[str, bytes]]:
    """Yield files that are archives of another kind, or none."""
    w = {"w": numbers(6, 8), "b": numbers(8, seed=1)}
    plain = saved(w)
    yield "of torch before 1.6", saved(w, is_zip=False)
    yield "big-endian", _again(plain, byteorder=b"big")
    yield "without byteorder", _again(plain, byteorder=None)
    yield "compressed", _again(plain, method=zipfile.ZIP_DEFLATED)
    yield "without data.pkl", _again(plain, pickled=None)
    yield "of no members", _again(plain, is_empty=True)
    yield "a comment at its end", plain[:-2] + struct.pack("<H", 4) + b"more"
    yield "cut in the directory", plain[:-40]
    yield "of zeros", bytes(len(plain))
    yield "a wide member", _wide(plain)


def _again(
    plain: bytes,
    *,
    byteorder: bytes | None = b"little",
    pickled: bytes | None = b"",
    method: int = 0,
    is_empty: bool = False,
) -> bytes:
    """Return an archive with its members written again: one of them otherwise, or not at all."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(plain)) as old, zipfile.ZipFile(made, "w", method) as new:
        for name in () if is_empty else old.namelist():
            content: bytes | None = old.read(name)
            if name.endswith("byteorder"):
                content = byteorder
            if name.endswith("data.pkl"):
                content = pickled or (content if pickled is not None else None)
            if content is not None:
                new.writestr(zipfile.ZipInfo(name), content)
    return made.getvalue()


def _wide(plain: bytes) -> bytes:
    """Return an archive whose members have zip64 records of their sizes, in its directory too."""
    made = io.BytesIO()
    with (
        patch.object(zipfile, "ZIP64_LIMIT", 0),
        zipfile.ZipFile(io.BytesIO(plain)) as old,
        zipfile.ZipFile(made, "w") as new,
    ):
        for name in old.namelist():
            with new.open(zipfile.ZipInfo(name), "w", force_zip64=True) as file:
                file.write(old.read(name))
    return made.getvalue()


GLOBAL = b"ctorch\nSize\n"
PROGRAMS = {
    "a tuple of too few": b"\x80\x02K\x01\x86.",
    "a tuple of three of two": b"\x80\x02K\x01K\x02\x87.",
    "a key without a value": b"\x80\x02}(X\x01\x00\x00\x00wK\x01X\x01\x00\x00\x00bu.",
    "a size of words": b"\x80\x02}X\x01\x00\x00\x00w" + GLOBAL + b"(](X\x01\x00\x00\x00wetRs.",
    "a size of numbers": b"\x80\x02}X\x01\x00\x00\x00w" + GLOBAL + b"(](K\x06K\x08etRs.",
    "a size of nothing": b"\x80\x02" + GLOBAL + b"(tR.",
    "a list as a key": b"\x80\x02}(]K\x01u.",
    "a tuple with a list as a key": b"\x80\x02}((]tK\x01u.",
    "a tuple of numbers as a key": b"\x80\x02}(K\x01K\x02\x86K\x03u.",
    "appended to a number": b"\x80\x02K\x01K\x02a.",
    "set in a list": b"\x80\x02]K\x01K\x02s.",
    "a memo that was not put": b"\x80\x02h\x05.",
    "nothing on the stack": b"\x80\x02.",
    "popped of nothing": b"\x80\x020K\x01.",
    "no end": b"\x80\x02K\x01",
    "another type": b"\x80\x02cos\nsystem\n(tR.",
    "an ordered dict of pairs": b"\x80\x02ccollections\nOrderedDict\n((lK\x01tR.",
    "called with a list": b"\x80\x02" + GLOBAL + b"]R.",
    "a number is called": b"\x80\x02K\x01(tR.",
}
"""Pickles by hand, as instructions."""


def states(zero: Iterable[str], step: float = 12.0, mean: float = 0.0) -> dict[str, Any]:
    """Return a checkpoint of two layers, in which the moments of some weights are zero."""
    names = [f"{layer}.{part}.weight" for layer in range(2) for part in ("q", "k", "experts.0", "experts.1")]
    of_optimizer = {
        name: {
            "step": torch.tensor(step),
            "exp_avg": numbers(4, 4) * (mean if name in zero else 1.0),
            "exp_avg_sq": numbers(4, 4).square() * (name not in zero),
        }
        for name in names
    }
    weights = {name: numbers(4, 4, seed=seed) for seed, name in enumerate(names)}
    return {"model": weights, "optimizer": {"state": of_optimizer, "param_names": names}}


def moments() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield checkpoints with moments that are zero: lost, of an expert without tokens, or too small for the dtype."""
    yield "zero of one part of every layer", states(("0.q.weight", "1.q.weight"))
    yield "zero of one part of every layer and of an expert", states(("0.q.weight", "1.q.weight", "1.experts.1.weight"))
    yield "zero of one part of every layer, with means", states(("0.q.weight", "1.q.weight"), mean=1.0)
    yield "zero of one part of every layer, after one step", states(("0.q.weight", "1.q.weight"), step=1.0)
    yield "zero of an expert of every layer", states(("0.experts.1.weight", "1.experts.1.weight"))
    yield "zero of one layer", states([f"0.{part}.weight" for part in ("q", "k", "experts.0", "experts.1")])


def files() -> Iterator[tuple[str, bytes]]:
    """Yield each file, with its name."""
    for what, one in values():
        try:
            yield what, saved({"w": one, "b": numbers(8, seed=1)})
        except (RuntimeError, NotImplementedError, pickle.PicklingError):
            continue  # this version of torch cannot save it
    for what, one in dicts():
        yield f"in {what}", saved(one)
    yield from ((f"an archive {what}", content) for what, content in archives())
    yield from ((f"moments {what}", saved(one)) for what, one in moments())
    plain = saved({"w": numbers(6, 8)})
    yield from ((f"a pickle with {what}", _again(plain, pickled=program)) for what, program in PROGRAMS.items())


def main() -> None:
    """Make the room, and judge it."""
    room, plain = store.Room(ROOM), saved({"w": numbers(6, 8), "b": numbers(8, seed=1)})
    before = plain
    for what, content in files():
        room.add_content(what, ("check", "{0}.pt"), [{"": content}])
        if not what.startswith(("a pickle", "moments")):
            room.add_content(f"{what}, compared", ("diff", "{0}.pt", "{1}.pt"), [{"": content}, {"": plain}])
            if not what.startswith("an archive"):
                inputs = [{"": before}, {"": content}]
                room.add_content(f"{what}, compared with what is before it", ("diff", "{0}.pt", "{1}.pt"), inputs)
            before = content
    record(room)


if __name__ == "__main__":
    main()
