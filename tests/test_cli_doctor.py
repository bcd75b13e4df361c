"""`doctor`: the keys of its document, and each finding with the line that helps."""

import importlib.metadata
from pathlib import Path

import pytest

from command_line import run
from dflash_jax.cli import doctor


def test_json_has_its_keys_and_ends_with_0():
    ran = run("doctor", "--json")
    document = ran.document
    assert ran.code == 0
    assert set(document) >= {
        "versions", "jax", "host_memory", "nvidia", "demo", "extras", "warnings"
    }  # fmt: skip
    assert document["versions"]["jax"] == importlib.metadata.version("jax")
    assert document["jax"]["backend"] == "cpu"
    assert document["jax"]["devices"][0]["platform"] == "cpu"
    assert 0 < document["host_memory"]["available"] <= document["host_memory"]["total"]


def test_tables_go_to_stderr_and_say_whose_memory_it_is():
    ran = run("doctor")
    assert (ran.code, ran.stdout) == (0, "")
    assert "host memory" in ran.stderr and "it uses the host's memory" in ran.stderr


def test_an_nvidia_device_that_jax_does_not_use_is_a_warning_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    document = run("doctor", "--json").document
    assert document["nvidia"]["visible"]
    (found,) = [line for line in document["warnings"] if "NVIDIA" in line]
    assert found.endswith('pip install -e ".[cuda12]"')
    assert 'pip install -e ".[cuda12]"' in " ".join(run("doctor").stderr.split())


def test_a_program_that_lists_no_device_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "DRIVER_LIST", tmp_path / "none")
    document = run("doctor", "--json").document
    assert document["nvidia"] == {"visible": False, "seen_by": None}
    assert not [line for line in document["warnings"] if "NVIDIA" in line]


def test_the_demo_pair_is_looked_for_and_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DFLASH_JAX_CHECKPOINTS", str(tmp_path / "checkpoints"))
    document = run("doctor", "--json").document
    assert document["demo"]["target"] is None and document["demo"]["drafter"] is None
    assert not (tmp_path / "cache").exists()
    assert any(str(tmp_path / "checkpoints") in line for line in document["warnings"])


def test_what_an_extra_would_bring_is_named(monkeypatch: pytest.MonkeyPatch):
    lines = [
        "numpy>=2.0",
        'numpy>=2.0; extra == "serve"',
        'no-such-package>=1; extra == "serve"',
        "other-package; extra == 'train'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert doctor.missing_packages("serve") == ["no-such-package"]
    assert doctor.missing_packages("train") == ["other-package"]
    assert doctor.missing_packages("test") == []
    shown = " ".join(run("doctor").stderr.split())
    assert 'pip install -e ".[serve]" brings no-such-package' in shown


def test_jax_without_a_backend_is_reported_and_no_crash(monkeypatch: pytest.MonkeyPatch):
    import jax

    def broken():
        raise RuntimeError("no driver")

    monkeypatch.setattr(jax, "devices", broken)
    ran = run("doctor", "--json")
    assert ran.code == 0
    assert "JAX cannot start: no driver" in ran.document["warnings"]
