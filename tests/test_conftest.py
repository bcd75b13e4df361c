"""Holds the rule of `conftest.py` that a test which did not run counts as failed on CI.

Each case is a real pytest run of a small project in a temporary folder, in a process of its own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

CASES = """
import pytest

def test_passes(): pass

def test_skips_inside(): pytest.skip("no reason")

@pytest.mark.skip(reason="no reason")
def test_skips_by_mark(): pass

@pytest.mark.xfail(reason="known")
def test_expects_a_failure(): assert False

@pytest.mark.xfail(reason="known")
def test_expects_a_failure_in_vain(): pass

@pytest.mark.gpu
def test_may_skip(): pytest.skip("no GPU")
"""


def _run_pytest(folder: Path, ci: str, test: str) -> str:
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n")
    (folder / "test_cases.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "."]
    environment = os.environ | {"CI": ci, "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    ).stdout


def test_on_ci_every_skip_and_xfail_fails_except_under_an_exempt_marker(tmp_path: Path):
    output = _run_pytest(tmp_path, "true", CASES)
    assert "3 failed, 1 passed, 1 skipped, 1 error in" in output.splitlines()[-1], output
    assert "CI allows no skip and no xfail here" in output


def test_off_ci_skips_and_xfails_keep_their_meaning(tmp_path: Path):
    output = _run_pytest(tmp_path, "", CASES)
    assert "1 passed, 3 skipped, 1 xfailed, 1 xpassed" in output.splitlines()[-1], output


def test_on_ci_a_file_that_skips_itself_is_an_error(tmp_path: Path):
    output = _run_pytest(tmp_path, "true", "import pytest\npytest.importorskip('no_such_module')\n")
    assert "1 error" in output.splitlines()[-1], output
    assert "skip inside the test" in output


def test_mixed_dtypes_and_mixed_ranks_are_errors_in_the_test_process():
    with pytest.raises(ValueError, match="dtype_promotion=strict"):
        jnp.add(jnp.ones(2, jnp.float32), jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="rank_promotion='raise'"):
        jnp.add(jnp.ones(2), jnp.ones((2, 2)))
