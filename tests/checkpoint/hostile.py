"""What is done with a checkpoint that may be damaged or hostile, and how a good one is made so."""

from __future__ import annotations

import io
import os
import pickle
import time
import zipfile
from contextlib import suppress

from torch.distributed.checkpoint.metadata import MetadataIndex

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.open import open_checkpoint
from shardviz.errors import DumpError, ShardvizError
from shardviz.picture.html.stored import stored_html
from shardviz.picture.svg.stored import stored_svg
from shardviz.picture.text.checkpoint import checkpoint_report_lines, tensor_lines, tensors_lines
from shardviz.picture.text.terminal import Terminal
from shardviz.tui.model.selection import Selection, of_entry
from shardviz.tui.model.stored import StoredDocument, parts_at

SECONDS = 2.0
"""One damaged checkpoint takes milliseconds: this is a hang."""
WAITED = 30.0
"""The same by the clock, on a machine that others use as well."""
KIB = 200 * 1024
"""Memory that all of them together may add to the process."""


def look(folder):
    """Do all that is done with a checkpoint."""
    found = open_checkpoint(folder)
    draw(found, check_checkpoint(found))
    for name in found.tensors:
        with suppress(DumpError):
            _ = found.tensors[name].bits
    with suppress(ShardvizError):
        compare_checkpoints(found, found)


def draw(found, report):
    """Do all that `show` and `view` do with a checkpoint: text, SVG, HTML, and what the TUI has of it."""
    document = StoredDocument(found, report)
    texts = [*tensors_lines(found), *checkpoint_report_lines(found, report, Terminal())]
    page = stored_html(found, report)
    assert page.startswith("<!doctype html>")
    assert "\x1b" not in page
    assert page.count("<script") == 1  # the page's own
    for at, entry in enumerate(document.entries):
        texts += tensor_lines(entry.tensor)
        plane = of_entry(document, Selection(), at).plane
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


class Run:
    """Runs a command where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)
