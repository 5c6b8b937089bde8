"""How much of a machine a process may use: all of it, or what a container leaves it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shardviz import machine
from shardviz.machine import cores, free_memory

if TYPE_CHECKING:
    from pathlib import Path

V1 = "9:name=systemd:/\n4:memory:/docker/ab\n2:cpuacct,cpu:/docker/ab\n1:cpuset:/\n"
V2 = "0::/job/ab\n"


class Made:
    """A machine with 8 cores and 1,000 KiB of memory that is available."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
        for name in ("MEMORY", "OWN_GROUPS", "GROUPS"):
            monkeypatch.setattr(machine, name, folder / name)
        self.write("MEMORY", "MemTotal: 4000 kB\nMemAvailable:    1000 kB\n")

    def write(self, path: str, text: str) -> None:
        """Write a file of the system."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(tmp_path, monkeypatch)


def test_only_cores_that_this_process_may_use_count(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5, 7})
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1


def test_a_machine_without_control_groups_is_used_whole(made: Made) -> None:
    assert (cores(), free_memory()) == (8, 1000 << 10)
    (made.folder / "MEMORY").unlink()  # as on macOS
    assert (cores(), free_memory()) == (8, None)


@pytest.mark.parametrize(("quota", "found"), [("150000", 2), ("200000", 2), ("50000", 1), ("1600000", 8)])
@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_of_processor_time_is_so_many_cores(version: int, quota: str, found: int, made: Made) -> None:
    if version == 2:
        made.write("OWN_GROUPS", V2)
        made.write("GROUPS/job/ab/cpu.max", f"{quota} 100000\n")
    else:
        made.write("OWN_GROUPS", V1)
        made.write("GROUPS/cpu/docker/ab/cpu.cfs_quota_us", f"{quota}\n")
        made.write("GROUPS/cpu/docker/ab/cpu.cfs_period_us", "100000\n")
    assert cores() == found


@pytest.mark.parametrize(
    ("version", "folder", "limit", "used", "stat"),
    [
        (V2, "job/ab", "memory.max", "memory.current", "inactive_file"),
        (V2, "job", "memory.max", "memory.current", "inactive_file"),  # of the group around it
        (V2, "", "memory.max", "memory.current", "inactive_file"),  # the folder that a container sees
        ("0::/../ab", "", "memory.max", "memory.current", "inactive_file"),
        (V1, "memory/docker/ab", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        (V1, "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_what_a_group_may_still_take_is_free(
    version: str, folder: str, limit: str, used: str, stat: str, made: Made
) -> None:
    made.write("OWN_GROUPS", version)
    made.write(f"GROUPS/{folder}/{limit}", "500000\n")
    assert free_memory() == 1000 << 10
    made.write(f"GROUPS/{folder}/{used}", "300000\n")
    assert free_memory() == 200000
    made.write(f"GROUPS/{folder}/memory.stat", f"active_file 7\n{stat} 100000\n")
    assert free_memory() == 300000
    made.write(f"GROUPS/{folder}/{used}", "900000\n")
    assert free_memory() == 0
    made.write(f"GROUPS/{folder}/{limit}", "9223372036854771712\n")  # none, in version 1
    assert free_memory() == 1000 << 10


@pytest.mark.parametrize("strange", ["", "max\n", "-1\n", "max 100000\n", "0 0\n", "a b c\n", "\x00"])
def test_groups_without_a_limit_or_with_strange_files_limit_nothing(strange: str, made: Made) -> None:
    for groups in (V1, V2, strange, "::::\n:\n", "0::"):
        made.write("OWN_GROUPS", groups)
        for folder in ("", "job/ab/", "cpu/docker/ab/", "memory/docker/ab/"):
            for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.max", "memory.limit_in_bytes"):
                made.write(f"GROUPS/{folder}{name}", strange)
            made.write(f"GROUPS/{folder}memory.stat", strange)
        assert (cores(), free_memory()) == (8, 1000 << 10)
