"""Every silent bug is found and rightly named, and its right twin stays quiet."""

import pytest

from tests.bugs.catalogue import BUGS, HEALTHY
from tests.bugs.running import judged, lines_of, report_of

pytestmark = pytest.mark.bugs


def text_of(report):
    return "\n".join(line for line in lines_of(report) if line) or "nothing was found"


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_silent_bug_is_found_and_rightly_named(bug, tmp_path):
    report = report_of(bug.wrong, bug.mesh, tmp_path, with_lines=bug.with_lines)
    verdict = judged(bug, report)
    assert verdict.is_silent, text_of(report)
    assert verdict.is_found, text_of(report)
    assert verdict.complaints == (), text_of(report)
    assert verdict.repeated == 0, text_of(report)


@pytest.mark.parametrize("case", [*BUGS, *HEALTHY], ids=[case.name for case in [*BUGS, *HEALTHY]])
def test_a_right_program_gives_no_finding_and_is_looked_at(case, tmp_path):
    report = report_of(case.right, case.mesh, tmp_path)
    assert report.findings == (), text_of(report)
    not_looked_at = [one.why for one in report.not_checked if not one.why.endswith("in the model's own dtypes")]
    assert not any(" raised " in why for why in not_looked_at), text_of(report)


def test_gradients_of_weights_that_are_padded_by_hand_are_compared(tmp_path):
    (bug,) = [bug for bug in BUGS if bug.name == "padding that a softmax over shards counts, to a multiple of 8"]
    report = report_of(bug.right, bug.mesh, tmp_path)
    assert report.not_checked == (), text_of(report)
    changed = bug.right.replace(
        "loss(model, batch):", "loss(model, batch):\n    model.embed.weight.register_hook(turned)"
    )
    hook = "def turned(gradient):\n    return gradient.flip(0) if len(gradient) < WORDS else gradient\n\n\ndef loss("
    (tmp_path / "wrong").mkdir()
    wrong = report_of(changed.replace("def loss(", hook), bug.mesh, tmp_path / "wrong")
    assert [finding.tensor for finding in wrong.findings] == ["embed.weight"], text_of(wrong)
