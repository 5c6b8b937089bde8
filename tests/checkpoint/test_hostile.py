"""Damaged and hostile checkpoints: refused in one line, or read; nothing runs, hangs, or takes memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import struct
import time
import zipfile
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.formats.pickled import read_pickle
from shardviz.checkpoint.open import open_checkpoint
from shardviz.errors import DumpError, ShardvizError
from shardviz.picture.html.stored import stored_html
from shardviz.picture.model.stored import numbered, stored
from shardviz.picture.svg.stored import stored_svg
from shardviz.picture.text.checkpoint import checkpoint_report_lines, tensor_lines, tensors_lines
from shardviz.picture.text.terminal import Terminal
from shardviz.reference.files import open_reference
from shardviz.tui.model.stored import StoredDocument, first_plane, parts_at
from tests.lanes import nightly

CASES = 300
NIGHTLY_CASES = 6000
SECONDS = 2.0
"""One damaged checkpoint takes milliseconds: this is a hang."""
MANY = 200_000
"""Chunks of a tensor that are many."""
WAITED = 30.0
"""The same by the clock, on a machine that others use as well."""
KIB = 200 * 1024
"""Memory that all of them together may add to the process."""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A DCP folder, and a Hugging Face folder with an index, of a few tensors."""
    root = tmp_path_factory.mktemp("small")
    model = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.arange(3).bfloat16()}
    states = {"w": {"exp_avg": torch.ones(4, 6), "step": torch.tensor(1.0)}}
    parts = {"model": model, "optim": {"state": states, "param_groups": [{"params": ["w"], "lr": 0.1}]}}
    dcp.save(parts, checkpoint_id=root / "dcp", no_dist=True)
    (root / "hf").mkdir()
    for name in "ab":
        save_file({name: np.arange(12.0).reshape(3, 4)}, root / "hf" / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in "ab"}}
    (root / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def look(folder):
    """Do all that is done with a checkpoint."""
    found = open_checkpoint(folder)
    draw(found, check_checkpoint(found))
    for name in found.tensors:
        with suppress(DumpError):
            found.read(name)
    with suppress(ShardvizError):
        compare_checkpoints(found, found)


def draw(found, report):
    """Do all that `show` and `view` do with a checkpoint: text, SVG, HTML, and what the TUI has of it."""
    document = StoredDocument(found).checked(report)
    texts = [*tensors_lines(found), *checkpoint_report_lines(found, report, Terminal())]
    page = stored_html(found, report)
    assert page.startswith("<!doctype html>")
    assert "\x1b" not in page
    assert "<script" not in page
    for at, entry in enumerate(document.entries):
        texts += tensor_lines(entry.tensor)
        plane = first_plane(entry.tensor)
        with suppress(DumpError):
            one = document.stored(at)
            assert stored_svg(one).isprintable() or "\n" in stored_svg(one)
            assert plane is None or parts_at(one, plane.at) is not None
    assert not any("\x1b" in text.plain for text in texts)


def refused(folder):
    """Return the one line with which a checkpoint is refused; empty where it is read."""
    begin, waited, message = time.process_time(), time.monotonic(), ""
    try:
        look(folder)
    except ShardvizError as error:
        message = error.message
    assert time.process_time() - begin < SECONDS
    assert time.monotonic() - waited < WAITED
    assert "\n" not in message
    assert len(message) < 2000
    return message


def damaged(data, rng):
    """Return bytes with a few of them changed, cut, repeated or put in."""
    data = bytearray(data)
    kind = rng.randrange(5)
    at = rng.randrange(len(data))
    if kind == 0:
        return bytes(data[:at])
    if kind == 1:
        end = min(len(data), at + rng.randrange(1, 64))
        return bytes(data[:at] + data[end:])
    if kind == 2:
        return bytes(data[:at] + rng.randbytes(rng.randrange(1, 16)) + data[at:])
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at = rng.randrange(len(data))
        data[at] = data[at] ^ (1 << rng.randrange(8)) if kind == 3 else rng.choice((0, 0xFF, 0x7F, rng.randrange(256)))
    return bytes(data)


def fuzz(small, tmp_path, count, seed):
    files = sorted(path for path in small.rglob("*") if path.is_file())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = random.Random(seed)
    results = []
    for _ in range(count):
        chosen = rng.choice(files)
        folder = tmp_path / chosen.parent.name
        folder.mkdir(exist_ok=True)
        for path in chosen.parent.iterdir():
            data = path.read_bytes()
            (folder / path.name).write_bytes(damaged(data, rng) if path == chosen else data)
        results.append(refused(folder))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < KIB
    return results


def test_damaged_checkpoints_are_refused_in_one_line_or_read(small, tmp_path):
    results = fuzz(small, tmp_path, CASES, seed=0)
    assert CASES / 10 < sum(map(bool, results)) < CASES  # both happen
    assert all(str(tmp_path) in message for message in results if message)  # it names the file


@nightly
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_damaged_checkpoints(small, tmp_path, seed):
    assert any(fuzz(small, tmp_path, NIGHTLY_CASES // 4, seed))


# Pickles

MARKER = "executed"


class Run:
    """Runs a command where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


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


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("where", ["metadata", "tensor"])
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


# Archives


def archive(members, method=zipfile.ZIP_STORED):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return data.getvalue()


def edited(small, tmp_path, change):
    """Copy the DCP folder and change its metadata."""
    folder = tmp_path / "edited"
    folder.mkdir(exist_ok=True)
    for path in (small / "dcp").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def with_archive(small, tmp_path, data):
    """Put an archive in the place of a tensor's."""

    def change(metadata):
        info = metadata.storage_data[MetadataIndex("model.w", [0, 0])]
        info.relative_path, info.offset, info.length = "hostile.distcp", 0, len(data)

    folder = edited(small, tmp_path, change)
    (folder / "hostile.distcp").write_bytes(data)
    return folder


def kinds(folder):
    assert not refused(folder)
    return [one.kind for one in check_checkpoint(open_checkpoint(folder)).findings]


def plain(small):
    """Return the archive of `model.w`, as torch wrote it."""
    metadata = pickle.loads((small / "dcp" / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex("model.w", [0, 0])]
    return (small / "dcp" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]


def test_an_archive_in_its_place_is_read(small, tmp_path):
    assert kinds(with_archive(small, tmp_path, plain(small))) == []


def test_a_bomb_is_not_decompressed(small, tmp_path):
    bomb = archive({"a/data.pkl": b"N." * 50_000_000}, zipfile.ZIP_DEFLATED)
    folder = with_archive(small, tmp_path, bomb)
    (finding,) = check_checkpoint(open_checkpoint(folder)).findings
    assert "data.pkl is compressed" in finding.sentence


def patched(data, mark, at, value):
    """Write a number behind the last occurrence of a mark."""
    data = bytearray(data)
    start = data.rindex(mark) + at
    data[start : start + len(value)] = value
    return bytes(data)


ENTRY, END = b"PK\x01\x02", b"PK\x05\x06"
ARCHIVES = {
    "a directory of gigabytes": lambda data: patched(data, END, 12, b"\xfe\xff\xff\xff"),
    "a directory behind the end": lambda data: patched(data, END, 16, b"\xfe\xff\xff\xff"),
    "more members than it has": lambda data: patched(data, END, 8, b"\xfe\xff\xfe\xff"),
    "zip64 without a locator": lambda data: patched(data, END, 12, b"\xff" * 8).replace(b"PK\x06\x07", b"PK\x06\x08"),
    "a member behind the end": lambda data: patched(data, ENTRY, 42, b"\xf0\xff\xff\xff"),
    "a member that is larger": lambda data: patched(data, ENTRY, 20, b"\xf0\xff\xff\x7f" * 2),
    "no directory": lambda data: data[:-30],
    "no pickle": lambda data: archive({"a/data/0": bytes(96)}),
    "no storage": lambda data: archive({"a/data.pkl": zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")}),
    "an empty file": lambda data: b"",
    "other bytes": lambda data: b"x" * 5000,
    "big-endian": lambda data: data.replace(b"little", b"bigend"),
    "a storage that is too small": lambda data: archive(
        {
            "a/data.pkl": zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl"),
            "a/data/0": bytes(95),
        }
    ),
    "a pickle of megabytes": lambda data: archive({"a/data.pkl": b"N" * (3 << 20) + b"."}),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_hostile_archives_are_findings(small, tmp_path, case):
    folder = with_archive(small, tmp_path, ARCHIVES[case](plain(small)))
    assert kinds(folder) == ["incomplete"]


# Metadata


def place(**values):
    def change(metadata):
        info = metadata.storage_data[MetadataIndex("model.w", [0, 0])]
        for name, value in values.items():
            setattr(info, name, value)

    return change


def tensor(**values):
    def change(metadata):
        for name, value in values.items():
            setattr(metadata.state_dict_metadata["model.w"], name, value)

    return change


def chunk(**values):
    def change(metadata):
        for name, value in values.items():
            setattr(metadata.state_dict_metadata["model.w"].chunks[0], name, value)

    return change


@pytest.mark.parametrize("path", ["../dcp/x", "/etc/passwd", "", "a/../../b", "a\0b", "C:\\x", "..", 7, None])
def test_no_path_leads_out_of_the_folder(small, tmp_path, path):
    assert "names a file outside its folder" in refused(edited(small, tmp_path, place(relative_path=path)))


REFUSED = {
    "a negative place": place(offset=-1),
    "a place that is text": place(offset="0"),
    "a place beyond belief": place(offset=1 << 80),
    "no shape": tensor(size=None),
    "a shape of text": tensor(size=("4", "6")),
    "a negative shape": tensor(size=(-4, 6)),
    "a shape beyond belief": tensor(size=(1 << 62, 6)),
    "a shape of true": tensor(size=(True, 6)),
    "too many dims": tensor(size=(1,) * 100),
    "no chunks": tensor(chunks=None),
    "chunks that are none": tensor(chunks=[1, 2]),
    "a chunk of other dims": chunk(sizes=(4,)),
    "a chunk at a negative place": chunk(offsets=(-1, 0)),
    "no type": tensor(properties=None),
    "a tensor that is none": lambda metadata: metadata.state_dict_metadata.update(w=3),
    "a name that is none": lambda metadata: metadata.state_dict_metadata.update({3: None}),
    "no tensors": lambda metadata: setattr(metadata, "state_dict_metadata", None),
    "places without names": lambda metadata: metadata.storage_data.update({3: None}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_makes_no_sense_is_refused(small, tmp_path, case):
    message = refused(edited(small, tmp_path, REFUSED[case]))
    assert ".metadata" in message


HUGE = (1 << 50, 1 << 50)


@pytest.mark.parametrize(
    "change",
    [
        tensor(size=HUGE),
        chunk(sizes=HUGE),
        place(length=1 << 50),
        place(offset=1 << 50),
        lambda metadata: (tensor(size=HUGE)(metadata), chunk(sizes=HUGE)(metadata)),
    ],
)
def test_huge_sizes_are_findings_and_take_no_memory(small, tmp_path, change):
    assert kinds(edited(small, tmp_path, change))


def test_twenty_thousand_chunks_are_counted_in_a_moment(small, tmp_path):
    def change(metadata):
        one = metadata.state_dict_metadata["model.w"]
        one.size = torch.Size((400_000, 6))
        one.chunks = [type(one.chunks[0])(torch.Size((4 * at, 0)), torch.Size((4, 6))) for at in range(20_000)]

    folder = edited(small, tmp_path, change)
    assert "missing" in [one.kind for one in check_checkpoint(open_checkpoint(folder)).findings]


def test_a_reference_with_a_gap_is_refused_before_it_is_used(small, tmp_path):
    folder = edited(small, tmp_path, chunk(sizes=torch.Size((3, 6))))
    with pytest.raises(DumpError, match=r"does not have all of model\.w"):
        open_reference(folder)
    assert open_reference(small / "dcp").find("model.w") is not None


@pytest.mark.parametrize(
    "name",
    ["\x1b[31mup\x1b[0m", "<script>alert(1)</script>", "[bold]up[/bold]", "up\ndown", "\u202eup", "", "a" * 100_000],
)
def test_names_with_escapes_and_markup_are_drawn_as_text(small, tmp_path, name):
    def change(metadata):
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop("model.w")
        info = metadata.storage_data.pop(MetadataIndex("model.w", [0, 0]))
        metadata.storage_data[MetadataIndex(name, [0, 0])] = info

    kinds(edited(small, tmp_path, change))
    with suppress(ShardvizError):
        look(edited(small, tmp_path, place(relative_path="<b>\x1b[1m")))


def test_two_hundred_thousand_chunks_are_listed_and_their_map_is_refused(small, tmp_path):
    def change(metadata):
        one = metadata.state_dict_metadata["model.w"]
        one.size = torch.Size((MANY, 6))
        piece = type(one.chunks[0])
        one.chunks = [piece(torch.Size((at, 0)), torch.Size((1, 6))) for at in range(MANY)]

    folder = edited(small, tmp_path, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = open_checkpoint(folder)
    with pytest.raises(DumpError, match="200,000 chunks, more than 16,384 are not drawn"):
        stored(found.tensors["model.w"], numbered(found))
    assert len(tensor_lines(found.tensors["model.w"])) < 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 * KIB


def test_loops_of_links_are_not_followed(small, tmp_path):
    os.symlink("loop.safetensors", tmp_path / "loop.safetensors")
    assert refused(tmp_path) or not open_checkpoint(tmp_path).tensors
    folder = edited(small, tmp_path, place(relative_path="round.distcp"))
    os.symlink("round.distcp", folder / "round.distcp")
    assert "incomplete" in kinds(folder)
    (tmp_path / "self").mkdir()
    os.symlink(tmp_path / "self", tmp_path / "self" / "self")
    os.symlink("..", tmp_path / "self" / ".metadata")
    assert refused(tmp_path / "self")


def test_a_pipe_is_not_waited_for(small, tmp_path):
    folder = edited(small, tmp_path, place(relative_path="pipe"))
    os.mkfifo(folder / "pipe")
    assert "incomplete" in kinds(folder)
    (tmp_path / "hf").mkdir()
    os.mkfifo(tmp_path / "hf" / "model.safetensors")
    assert "has no .safetensors file" in refused(tmp_path / "hf") or not open_checkpoint(tmp_path / "hf").tensors
    os.mkfifo(tmp_path / ".metadata")
    assert ".metadata is missing" in refused(tmp_path)


@pytest.mark.parametrize(
    "notes",
    [
        {"DCP_SHARDING_INFO": "no json"},
        {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [-1, 0]}})},
        {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0]}})},
        {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [1 << 60, 0]}})},
        {"DCP_SHARDING_INFO": "[" * 100_000},
    ],
)
def test_sharding_that_makes_no_sense_is_refused(tmp_path, notes):
    save_file({"w": np.zeros((2, 3))}, tmp_path / "m.safetensors", notes)
    assert "m.safetensors is damaged" in refused(tmp_path)
