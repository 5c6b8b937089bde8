"""Archives of tensors that are not what torch wrote: bombs, and directories and members that lie."""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.open import open_checkpoint
from tests.checkpoint.hostile import archive, kinds, with_archive
from tests.lanes import at_night, recorded


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


@pytest.mark.parametrize("case", [*[*ARCHIVES][:4], *at_night([*ARCHIVES][4:], recorded)])
def test_hostile_archives_are_findings(small, tmp_path, case):
    folder = with_archive(small, tmp_path, ARCHIVES[case](plain(small)))
    assert kinds(folder) == ["incomplete"]
