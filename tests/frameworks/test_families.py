"""Families of transformers under their own tensor-parallel plans: saved, loaded on ranks, saved again, compared.

Runs if transformers is installed; checkpoints have random weights.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install -e '.[frameworks]'"
)
ROOT = Path(__file__).parents[2]
HOUR = 3600.0
FEWEST = 180
"""Configurations with a plan, their own or a nested one's; 188 in transformers 5.23."""


def taken_there_and_back(folder):
    """Return what is not as it was, by family; in a process of its own, which ranks are forked from."""
    out = folder / "families.json"
    command = [sys.executable, "-m", "tests.frameworks.families", "-o", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HOUR, check=False)
    assert done.returncode == 0, done.stderr
    return {one["name"]: one for one in json.loads(out.read_text())}


def wrong(lines):
    """Leave out ties that are saved twice: every element is where it was."""
    from tests.frameworks.families.known import TIED

    return [line for line in lines if not TIED.match(line)]


def assert_named(lines, patterns):
    """Every line is one that is known, and everything known is found."""
    texts = [line.partition(": ")[2] for line in wrong(lines)]
    assert not [text for text in texts if not any(re.match(pattern, text) for pattern in patterns)]
    assert not [pattern for pattern in patterns if not any(re.match(pattern, text) for text in texts)]
    assert {line[0] for line in wrong(lines)} == {"2", "4"}


def test_every_family_comes_back_as_it_was_or_its_bug_is_named(tmp_path):
    from tests.frameworks.families.known import NOT_BUILT, PERMUTED, REFUSED

    found = taken_there_and_back(tmp_path)
    assert len(found) > FEWEST
    clean = {name for name, one in found.items() if not wrong(one["lines"])}
    assert found.keys() - clean == {*NOT_BUILT, *REFUSED, *PERMUTED}
    assert all(found[name]["compared"] for name in clean)
    for name, reason in NOT_BUILT.items():
        (line,) = found[name]["lines"]
        assert re.search(f"not built: .*{reason}", line)
    for name, reason in REFUSED.items():
        assert all(re.search(reason, line) for line in found[name]["lines"])
    for name, patterns in PERMUTED.items():
        assert_named(found[name]["lines"], patterns)
