"""Pickles in metadata and archives that were made to run code, to hang or to take memory: nothing of them runs."""

from __future__ import annotations

import pickle
import struct

import pytest
import torch

from shardviz.checkpoint.formats.pickle_reader import UnknownTypeError, read_pickle
from tests.checkpoint.hostile import Run, archive, kinds, refused, with_archive
from tests.lanes import recorded

MARKER = "executed"


def short(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


def named(module, name):
    return short(module) + short(name) + b"\x93"


SIZE = 1 << 40

HOSTILE = {
    "a call of a builtin": named("builtins", "eval") + short("1/0") + b"\x85R.",
    "a method behind a known type": named("torch", "Size.__class__") + b")R.",
    "a private function of torch": named("torch._utils", "_rebuild_tensor") + b")R.",
    "an element type that is none": named("torch", "load") + b")R.",
    "an attribute of what is no type": named("builtins", "getattr") + short("os") + short("system") + b"\x86R.",
    "an attribute of a type that is none": named("builtins", "getattr") + named("os", "path") + short("x") + b"\x86R.",
    "an element type that is called": named("torch", "float32") + b")R.",
    "INST": b"(S'x'\nios\nsystem\n.",
    "OBJ": b"(" + named("os", "system") + b"o.",
    "EXT1": b"\x82\x01.",
    "GLOBAL without an end": b"cos" + b"x" * 5000,
    "GLOBAL": b"cos\nsystem\n(S'x'\ntR.",
    "a string of a terabyte": b"\x8d" + struct.pack("<Q", SIZE) + b"x",
    "bytes of a terabyte": b"\x96" + struct.pack("<Q", SIZE) + b"x",
    "a memo of gigabytes": b"Nr" + struct.pack("<I", 0xFFFFFFF0) + b"j" + struct.pack("<I", 0xFFFFFFF0) + b".",
    "a key that takes forever to hash": b"}" + b")" + b"\x94h\x00\x86" * 1 + b"2\x86" * 60 + b"Ns.",
    "a key of many tuples": b"})" + b"".join(b"q%ch%c\x86" % (at, at) for at in range(100)) + b"Ns.",
    "deep tuples as a key": b"})" + b"\x85" * 100_000 + b"Ns.",
    "deep lists": b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep marks": b"(" * 100_000 + b".",
    "many empty lists": b"]" * 5_000_000 + b".",
    "tuples in tuples": b")" + b"\x85" * 2_000_000 + b".",
    "a memo entry for every byte": b"]" + b"\x94" * 2_000_000 + b".",
    "no end": b"N" * 1000,
    "nothing": b"",
    "an empty stack": b"R.",
    "items of nothing": b"(NNu.",
    "an append to a tuple": b")Na.",
    "state of a list": b"]}b.",
    "an endless number": b"\x8a\xff" + b"\xff" * 300 + b".",
    "a text of lone halves": b"\x8c\x03\xed\xa0\x80.",
    "a text that is none": b"\x8c\x02\xff\xff.",
    "not a dict": b"N.",
    "a dict": b"}.",
    "protocol 0": pickle.dumps({"a": 1}, 0),
}


@pytest.mark.parametrize(
    ("where", "case"),
    [
        pytest.param(where, case, id=f"{where}-{case}", marks=recorded if number and where == "tensor" else ())
        for number, case in enumerate(HOSTILE)
        for where in ("metadata", "tensor")
    ],
)
def test_hostile_pickles_are_refused(small, tmp_path, case, where):
    data = b"\x80\x04" + HOSTILE[case]
    if where == "metadata":
        (tmp_path / ".metadata").write_bytes(data)
        assert str(tmp_path) in refused(tmp_path)
    else:
        folder = with_archive(small, tmp_path, archive({"a/data.pkl": data, "a/data/0": bytes(96)}))
        assert "incomplete" in kinds(folder)


def test_nothing_of_a_pickle_runs(small, tmp_path):
    marker = tmp_path / MARKER
    for protocol in range(2, 6):
        data = pickle.dumps({"state_dict_metadata": Run(marker)}, protocol)
        (tmp_path / ".metadata").write_bytes(data)
        message = refused(tmp_path)
        assert "posix.system, which is not among the types of a checkpoint" in message
        folder = with_archive(small, tmp_path, archive({"a/data.pkl": data, "a/data/0": bytes(96)}))
        assert "incomplete" in kinds(folder)
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()  # it would have


def test_a_member_of_an_enum_is_read_as_any_python_pickles_it():
    kind = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"
    content = (
        b"\x80\x04" + named("builtins", "getattr") + named(*kind.rsplit(".", 1)) + short("TORCH_STRIDED") + b"\x86R."
    )
    member = read_pickle(content, "it")
    assert (member.kind, member.args) == (kind, ("TORCH_STRIDED",))


def test_every_known_type_is_inert():
    class Trap:
        def __reduce__(self):
            return torch.device, ("meta",)

    assert read_pickle(pickle.dumps(Trap(), 2), "it").kind == "torch.device"


def test_self_containing_objects_are_harmless(tmp_path):
    loop = []
    loop.append(loop)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(loop))
    assert "state_dict_metadata is not a dict" in refused(tmp_path)


SHARD, QUANTIZED = named("torch.distributed.tensor", "DTensor"), named("mine", "Int8")


@pytest.mark.parametrize(("own", "later", "is_shard"), [(QUANTIZED, SHARD, False), (SHARD, QUANTIZED, True)])
def test_a_refused_tensor_is_named_by_its_own_type(own, later, is_shard):
    subclass, between = named("torch._utils", "_rebuild_wrapper_subclass"), b"X" + struct.pack("<I", 600) + b"x" * 600
    with pytest.raises(UnknownTypeError) as caught:
        read_pickle(b"\x80\x04" + subclass + own + between + later + b".", "one.pt")
    assert ("one rank's parts of tensors" in caught.value.message) is is_shard
    assert ("quantized" not in caught.value.hint) is is_shard
