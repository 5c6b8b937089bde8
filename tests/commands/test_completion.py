"""Shell completion: scripts that a shell runs, and what they offer."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache

import pytest

from shardviz.cli import VERBS, main

COMPLETE = """
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shardviz; echo "${COMPREPLY[*]}"
"""


@cache
def script(shell: str) -> str:
    """Return the script for a shell, which takes a third of a second: every verb's options are made for it."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["completion", shell]) == 0
    return printed.getvalue()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["sh"], "show"),
        (["show", "--form"], "--format"),
        (["show", "--format", "h"], "html"),
        (["probe", "tp_f"], "tp_fsdp"),
        (["probe", "tp_fsdp", "--launch", ""], "fork spawn"),
        (["completion", "f"], "fish"),
        (["check", "some/fi"], ""),
        (["show", ""], ""),
        (["probe", "tp", "--mesh", ""], ""),
        (["check", "dump", "--color", "n"], "never"),
        (["help", "sh"], "show"),
    ],
)
def test_bash_offers(typed: list[str], offered: str) -> None:
    code = script("bash") + COMPLETE
    done = subprocess.run(["bash", "-c", code, "bash", "shardviz", *typed], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == offered
    assert done.stderr == ""


def test_zsh_completes_by_the_script_for_bash() -> None:
    assert script("zsh") == f"autoload -Uz bashcompinit && bashcompinit\n{script('bash')}"


def test_fish_knows_every_command() -> None:
    text = script("fish")
    for verb in VERBS:
        assert f"-n __fish_use_subcommand -f -a {verb} -d " in text
        assert f"'__fish_seen_subcommand_from {verb}' -s h -l help" in text


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_a_shell_that_is_installed_reads_its_script(shell: str) -> None:
    path = shutil.which(shell)
    text = script(shell)
    if path is None:
        assert text.isascii(), "without the shell, that nothing but ASCII is in it is all that is checked"
        return
    done = subprocess.run([path, "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_completion_does_not_import_torch() -> None:
    code = "import sys; from shardviz.cli import main; main(['completion', 'bash']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
