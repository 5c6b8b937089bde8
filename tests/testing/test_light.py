"""Those who have shardviz installed and no test on ranks pay next to nothing."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "rich", "msgspec", "textual", "multiprocessing.forkserver", "shardviz.live")


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("module", ["shardviz.testing", "shardviz.testing.plugin.hooks"])
def test_it_imports_nothing_heavy(module):
    assert fresh(f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])") == "\n"


def test_a_session_without_such_a_test_imports_nothing_heavy(tmp_path):
    (tmp_path / "test_plain.py").write_text("def test_nothing(): ...\n")
    code = (
        "import sys, pytest; assert pytest.main(['-q', '-p', 'no:cacheprovider', 'test_plain.py']) == 0; "
        f"print('heavy:', *[name for name in {HEAVY} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    environ = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "shardviz.testing.plugin.hooks"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True, text=True)
    assert done.stdout.endswith("heavy:\n")
