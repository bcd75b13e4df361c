"""`convert`: there and back bit for bit, for targets and drafters, refusals with their reason."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from command_line import run
from tiny_text import write_text_drafter, write_text_target

WRITERS = {"target": write_text_target, "drafter": write_text_drafter}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("convert")
    return {kind: write(parent / kind) for kind, write in WRITERS.items()}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_checkpoint_goes_to_orbax_and_comes_back_bit_for_bit(
    kind: str, folders: dict[str, Path], tmp_path: Path
):
    source, there, back = folders[kind], tmp_path / "there", tmp_path / "back"
    made = run("convert", source, there, "--to", "orbax", "--json").document
    assert (made["kind"], made["format"], made["destination"]) == (kind, "orbax", str(there))
    assert made["bytes"] == sum(p.stat().st_size for p in there.rglob("*") if p.is_file())
    assert not list(there.glob("*.safetensors"))
    shown = run("convert", there, back)
    assert (shown.code, shown.stdout) == (0, "")
    assert "safetensors" in shown.stderr
    wanted, found = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (back, source)]
    assert configs[0] == configs[1]


def test_a_converted_target_answers_like_its_source(folders: dict[str, Path], tmp_path: Path):
    run("convert", folders["target"], tmp_path / "orbax")
    one, other = (
        run("generate", folder, "hi", "-n", 8, "--max-seq-len", 128, "--json").document
        for folder in (folders["target"], tmp_path / "orbax")
    )
    assert one["completions"] == other["completions"]


def test_the_format_that_it_has_already_is_refused(folders: dict[str, Path], tmp_path: Path):
    ran = run("convert", folders["drafter"], tmp_path / "new", "--to", "safetensors")
    assert ran.code == 2
    assert "is safetensors already" in ran.stderr
    assert not (tmp_path / "new").exists()


def test_what_is_there_is_replaced_only_when_told(folders: dict[str, Path], tmp_path: Path):
    taken = tmp_path / "taken"
    shutil.copytree(folders["target"], taken)
    refused = run("convert", folders["drafter"], taken)
    assert refused.code == 2
    assert "is there already" in refused.stderr
    assert (taken / "model.safetensors").is_file()
    assert run("convert", folders["drafter"], taken, "--overwrite").code == 0
    assert not (taken / "model.safetensors").exists()


def test_a_folder_of_something_else_is_never_replaced(folders: dict[str, Path], tmp_path: Path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("dear")
    ran = run("convert", folders["drafter"], tmp_path / "letters", "--overwrite")
    assert ran.code == 2
    assert (tmp_path / "letters" / "a.txt").read_text() == "dear"
