"""Checkpoints damaged at random: refused in one line, or read; nothing hangs or takes memory."""

from __future__ import annotations

import random
import resource
import shutil
import time

import numpy as np
import pytest

from shardviz.checkpoint.live_job.compare import compare_with_job
from shardviz.checkpoint.live_job.job import job_of
from shardviz.checkpoint.open import open_checkpoint
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.errors import ShardvizError
from shardviz.picture.text.checkpoint import comparison_lines
from shardviz.picture.text.terminal import Terminal
from tests.checkpoint.hostile import KIB, SECONDS, damaged, refused
from tests.checkpoint.jobs import Held, job
from tests.dumps import replace_file
from tests.lanes import nightly

CASES = 100
NIGHTLY_CASES = 6000


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
            replace_file(folder / path.name, damaged(data, rng) if path == chosen else data)
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


def fuzz_beside(small, tmp_path, count, seed):
    """Damage a job's dump or the checkpoint beside it, and compare them."""
    rng = random.Random(seed)
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    held = {"w": Held(whole, "[4/tp, 6]", values=True), "b": Held(whole, "[4/fsdp, 6]", "[4/tp, 6]")}
    dump = job(tmp_path / "whole", "fsdp=2,tp=2", held)
    results = []
    for at in range(count):
        folder = tmp_path / f"job-{at % 2}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(dump, folder)
        chosen = rng.choice(sorted(folder.iterdir()))
        replace_file(chosen, damaged(chosen.read_bytes(), rng))
        begin, message = time.process_time(), ""
        try:
            sides = job_of(dump_of(read_files(folder, strict=False))), open_checkpoint(small / "dcp")
            comparison_lines(compare_with_job(*sides), Terminal())
        except ShardvizError as error:
            message = error.message
        assert time.process_time() - begin < SECONDS
        assert "\n" not in message
        results.append(message)
    return results


def test_damaged_dumps_beside_a_checkpoint_are_refused_in_one_line_or_compared(small, tmp_path):
    results = fuzz_beside(small, tmp_path, CASES // 2, seed=0)
    assert any(results)
    assert not all(results)


@nightly
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_damaged_dumps_beside_a_checkpoint(small, tmp_path, seed):
    assert any(fuzz_beside(small, tmp_path, NIGHTLY_CASES // 4, seed))
