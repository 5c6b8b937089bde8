"""`python -m tests.contract compare [--live] [WORD ...]` and `python -m tests.contract write [ROOM ...]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardviz.explain.pages import CATALOGUE
from tests.contract import besides_verdicts, store
from tests.contract.judge import PROCESSES, judge_room, judge_rooms
from tests.contract.store import DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.contract.judge import Rows

ROOMS = {
    "bugs": ("--lane", "nightly", "tests/bugs/test_bugs.py"),
    "places": ("--lane", "nightly", "tests/bugs/places/test_places.py"),
    "probes": ("tests/live/test_cookbook.py", "tests/live/test_bugs.py", "tests/bugs/test_verdicts.py"),
    "captures": (
        *("tests/live/test_capture.py", "tests/live/test_filled.py", "tests/live/test_sequence.py"),
        *("tests/live/test_by_reference.py", "tests/live/test_by_map.py", "tests/live/test_written_anew.py"),
        *("tests/live/test_unknown_models.py", "tests/live/test_steps_judged_together.py", "tests/live/claims"),
    ),
    "steps": (
        *("tests/live/step", "tests/live/test_batch_axes.py", "tests/live/test_contradictions.py"),
        *("tests/live/test_healthy_at_random.py", "tests/live/test_optimizers.py"),
        *("tests/live/test_reference_values.py", "tests/live/test_unsharded_update.py"),
    ),
    "lines": ("tests/live/lines/test_lines.py",),
    "dumps": ("tests/check", "tests/picture"),
    "rules": ("tests/check/step", "tests/check/test_masks.py", "tests/check/test_masters.py"),
    "checkpoints": ("tests/checkpoint", "tests/reference"),
    "jobs": (
        *("--lane", "nightly", "tests/live/run/traced/test_traced.py", "tests/live/run/traced/test_lines.py"),
        *("tests/live/run/test_stamped.py", "tests/live/run/test_stages.py"),
        *("tests/live/run/test_unwritten.py", "tests/live/run/test_ties.py"),
        *("tests/live/run/traced/test_resumed.py", "tests/live/run/traced/test_written_buffers.py"),
        *("tests/live/run/traced/test_rows_of_steps.py", "tests/live/run/traced/test_settings.py"),
        *("tests/live/run/traced/test_batch_norms.py", "tests/live/run/traced/test_sequence_of_whole.py"),
        *(
            "tests/live/run/traced/test_left_out.py",
            "tests/live/run/traced/test_later_steps.py",
            "tests/live/run/traced/test_by_hand.py",
        ),
        *("tests/live/run/traced/test_module_settings.py", "tests/live/run/traced/test_steps_in_backward.py"),
        *("tests/live/run/traced/test_stepped_copies.py", "tests/live/run/traced/test_inputs_and_buffers.py"),
        *("tests/live/run/traced/test_rows_and_stages.py", "tests/live/run/traced/test_micro_batches.py"),
    ),
}
"""Each room with the tests that its cases come from."""

UNPROVEN = store.HERE / "unproven.txt"
"""The causes that no recorded case has, and no test of `ASSERTED`, a line each."""

ASSERTED = store.HERE / "asserted.txt"
"""The causes that only failed assertions have, each with a test that is told it (`asserted`)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; return 0 if nothing differs, 1 if something does, 2 if a file of the contract is damaged."""
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    write = verbs.add_parser("write", help="run the tests that make the cases, and record them with their verdicts")
    write.add_argument("rooms", nargs="*", metavar="ROOM", choices=[*store.rooms(), []], help=", ".join(ROOMS))
    write.add_argument("--verdicts", action="store_true", help="judge the recorded cases again, and record only that")
    compare = verbs.add_parser("compare", help="judge every recorded case again, and print what differs")
    compare.add_argument("words", nargs="*", metavar="WORD", help="only cases that have one of these in their names")
    compare.add_argument("--room", action="append", metavar="ROOM", choices=store.rooms(), help="only this room")
    compare.add_argument(
        "--live",
        action="store_true",
        help="run the tests that make the cases again: an hour; what is recorded stays as it is",
    )
    args = parser.parse_args(arguments)
    if args.verb == "write" and not args.verdicts and not ROOMS.keys() >= set(args.rooms):
        parser.error("no test makes this room: varied and hunted are written by vary.py, others only with --verdicts")
    try:
        if args.verb == "write":
            return _write(args.rooms or (store.rooms() if args.verdicts else list(ROOMS)), verdicts=args.verdicts)
        rooms = args.room or store.rooms()
        return _compare(rooms, args.words, live=args.live, is_whole=not (args.room or args.words))
    except DamagedError as error:
        print(f"contract: {error}\n  Hint: git checkout tests/contract, or write the room again", file=sys.stderr)
        return 2


def _write(rooms: Sequence[str], *, verdicts: bool) -> int:
    for room in rooms:
        if verdicts:
            store.write_verdicts(room, judge_room(store.load(room)))
        elif code := _record(room):
            return code
    UNPROVEN.write_text("".join(f"{line}\n" for line in _unproven(causes_of_cases())))
    return 0


def _unproven(named: set[str]) -> list[str]:
    """Return the causes without a recorded case or a test, each with the sentence that users would lose without it."""
    absent = sorted((name, cause) for name, cause in CATALOGUE.items() if name not in named | asserted().keys())
    return [f"{name}: {(cause.__doc__ or '').partition(chr(10))[0]}" for name, cause in absent]


def asserted() -> dict[str, str]:
    """Return the test of each cause that only failed assertions have, without tests that are gone."""
    tests = (line.split(": ") for line in ASSERTED.read_text().splitlines())
    return {cause: test for cause, test in tests if not store.is_kept(test)}


def _name(line: str) -> str:
    """Return the cause of a line of the unproven: its sentence is the catalogue's to change."""
    return line.partition(":")[0]


def _record(room: str, into: str = "") -> int:
    plugin = ("-p", "tests.contract.recording", "--contract", room, "--contract-into", into, "-n", "0", "-q")
    return subprocess.run([sys.executable, "-m", "pytest", *plugin, *ROOMS[room]], check=False).returncode


def _compare(rooms: Sequence[str], words: Sequence[str], *, live: bool, is_whole: bool) -> int:
    started = time.monotonic()
    known = {room: store.read_verdicts(room) for room in rooms}
    loaded, answers = [] if live else _loaded(rooms), list[str]()
    if live:
        again = _live(rooms)
    else:
        besides_verdicts.prepare(loaded)
        again, answers = judge_rooms(loaded, words, asking=besides_verdicts.asked)
    rows = [row for room in known for row in _differences(known[room], again[room], words)] + answers
    num_cases = sum(len(verdicts) for verdicts in again.values())
    named = _causes(again)
    if is_whole:
        now = {_name(line): line for line in _unproven(named)}
        listed = {_name(line): line for line in UNPROVEN.read_text().splitlines()}
        rows += [f"unproven: - {listed[name]}" for name in listed.keys() - now.keys()]
        rows += [f"unproven: + {now[name]}" for name in now.keys() - listed.keys()]
        if loaded:
            by_tests = {room: known[room] for room in ROOMS}
            rows += besides_verdicts.wrong_files(loaded, by_tests)
        print(f"{len(now)} of {len(CATALOGUE)} causes have neither a recorded case nor a test: {UNPROVEN.name}")
    for row in rows:
        print(row)
    seconds = time.monotonic() - started
    print(f"{num_cases} cases in {seconds:.0f} s: {len(rows)} differences; {len(named)} causes named")
    return 1 if rows else 0


def _loaded(rooms: Sequence[str]) -> list[store.Room]:
    """Return rooms; two archives are unpacked at a time."""
    with ThreadPoolExecutor(PROCESSES) as threads:
        return list(threads.map(store.load, rooms))


def _live(rooms: Sequence[str]) -> dict[str, dict[str, Rows]]:
    """Return the verdicts on what the tests of some rooms make now; rooms that no tests make are judged again."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="shardviz-contract-") as made:
        for room in rooms:
            if room not in ROOMS:
                found[room] = judge_room(store.load(room))
                continue
            if code := _record(room, made):
                raise SystemExit(code)
            found[room] = store.read_verdicts(room, Path(made))
    return found


def _differences(known: Mapping[str, Rows], again: Mapping[str, Rows], words: Sequence[str]) -> Iterator[str]:
    """Yield a line for every row of a verdict that came, went or changed."""
    for name in sorted(known.keys() | again.keys()):
        if words and not any(word in name for word in words):
            continue
        before, after = (_lines(verdicts.get(name, [])) for verdicts in (known, again))
        gone, new = [row for row in before if row not in after], [row for row in after if row not in before]
        if gone or new:
            yield name
        yield from (f"    - {row}" for row in gone)
        yield from (f"    + {row}" for row in new)


def _lines(rows: Rows) -> list[str]:
    return [", ".join(f"{key} {json.dumps(value)}" for key, value in sorted(row.items())) for row in rows]


def causes_of_cases() -> set[str]:
    """Return the names of the causes that recorded cases have."""
    return _causes({room: store.read_verdicts(room) for room in store.rooms()})


def _causes(found: Mapping[str, Mapping[str, Rows]]) -> set[str]:
    """Return the names of the causes that are in a verdict."""
    rows: Iterator[dict[str, Any]] = (row for verdicts in found.values() for case in verdicts.values() for row in case)
    return {row["cause_id"] for row in rows if row.get("cause_id")}


if __name__ == "__main__":
    raise SystemExit(main())
