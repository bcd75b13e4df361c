"""The two layouts of a drafter: written, read by the safetensors library, and back, bit for bit."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax as dj
import few_ids
import tiny
from command_line import run
from dflash_jax.config import DrafterConfig
from dflash_jax.errors import CheckpointError
from dflash_jax.training.export import export_drafter, model_card
from dflash_jax.weights.convert import convert
from dflash_jax.weights.layouts import read_tables, tables_of
from dflash_jax.weights.match import parameters
from few_ids import EVEN

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    whole = tiny.write_drafter(folder / "whole")
    return {
        "target": tiny.write_target(folder / "target"),
        "whole": whole,
        "few": few_ids.write_zlab(folder / "few", whole, EVEN),
        "own": few_ids.write_speculators(folder / "own", whole, EVEN),
    }


def assert_same_drafter(one: Path, other: Path) -> None:
    """Equal configs, names, dtypes and bytes."""
    assert DrafterConfig.from_folder(one) == DrafterConfig.from_folder(other)
    wanted, found = load_file(one / FILE), load_file(other / FILE)
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("source", ["whole", "few"])
def test_z_lab_to_speculators_and_back_by_the_command_line(folders, tmp_path, source: str):
    """What is copied from the target is seen in between, and dropped on the way back."""
    there, back = tmp_path / "there", tmp_path / "back"
    target = folders["target"]
    made = run("convert", folders[source], there, "--layout", "speculators", "--target", target,
               "--json").document  # fmt: skip
    assert (made["kind"], made["format"]) == ("drafter", "safetensors")
    tensors, tables = load_file(there / FILE), load_file(target / FILE)
    ids = EVEN if source == "few" else list(range(tiny.VOCAB))
    embedding = tables["model.embed_tokens.weight"][: tiny.VOCAB]
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], embedding)
    np.testing.assert_array_equal(tensors["lm_head.weight"], tables["lm_head.weight"][ids])
    raw = json.loads((there / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [1, 3] and raw["draft_vocab_size"] == len(ids)
    verifier = {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    assert raw["speculators_config"]["verifier"] == verifier
    assert ("t2d" in tensors, "d2t" in tensors) == (source == "few",) * 2
    if source == "few":
        assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
        assert np.flatnonzero(tensors["t2d"]).tolist() == EVEN
        assert (tensors["d2t"] + np.arange(len(EVEN))).tolist() == EVEN
    assert run("convert", there, back, "--layout", "zlab", "--target", target).code == 0
    assert_same_drafter(folders[source], back)


def test_speculators_through_orbax_and_z_lab_and_back(folders, tmp_path):
    """A head of its own stays: without a target nothing is dropped, and with one it is refused."""
    orbax = convert(folders["own"], tmp_path / "orbax", "drafter")
    assert (orbax / "params").is_dir()
    zlab = convert(orbax, tmp_path / "zlab", "drafter", layout="zlab")
    assert DrafterConfig.from_folder(zlab) == DrafterConfig.from_folder(folders["own"])
    again = convert(zlab, tmp_path / "orbax again", "drafter", to="orbax", layout="speculators")
    assert_same_drafter(folders["own"], convert(again, tmp_path / "back", "drafter"))
    values = [parameters(dj.load_drafter(folder)) for folder in (folders["own"], again)]
    for path, value in values[0].items():
        np.testing.assert_array_equal(value, values[1][path])
    with pytest.raises(CheckpointError, match="own embed_tokens.weight differs from the target's"):
        convert(folders["own"], tmp_path / "x", "drafter", layout="zlab", target=folders["target"])


def test_what_a_layout_lacks_or_has_already_is_refused(folders, tmp_path):
    def refused(source: str, layout: str, *more: object) -> str:
        ran = run("convert", folders[source], tmp_path / "new", "--layout", layout, *more)
        assert ran.code == 2 and not (tmp_path / "new").exists()
        return " ".join(ran.stderr.split())

    assert "borrows from its target: give the target" in refused("whole", "speculators")
    assert "is zlab in safetensors already" in refused("whole", "zlab")
    assert "is a target" in refused("target", "zlab")
    other = tiny.write_target(tmp_path / "narrow", hidden_size=48)
    message = refused("few", "speculators", "--target", other)
    assert "tables are 128 x 48 and the drafter needs 97 x 32" in message


@pytest.mark.parametrize("source", ["whole", "few"])
@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_an_export_in_either_layout_loads_with_equal_parameters(folders, tmp_path, source, layout):
    drafter = dj.load_drafter(folders[source])
    target = dj.load_target(folders["target"])
    tables = tables_of(target, "owner/model") if layout == "speculators" else None
    export_drafter(drafter, tmp_path / "d", "card", layout=layout, tables=tables)
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    assert ("speculators_model_type" in raw) == (layout == "speculators")
    again = parameters(dj.load_drafter(tmp_path / "d", dtype="float32"))
    for path, value in parameters(drafter).items():
        exact = path == ("d2t",)
        rounded = np.asarray(value if exact else value.astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(again[path], rounded)
    stored = {str(t.dtype) for t in load_file(tmp_path / "d" / FILE).values()}
    buffers = {"zlab": {"int64"}, "speculators": {"int64", "bool"}}[layout]
    assert stored == {"bfloat16"} | (buffers if source == "few" else set())


def test_an_export_that_lacks_its_tables_leaves_nothing(folders, tmp_path):
    drafter = dj.load_drafter(folders["whole"])
    with pytest.raises(CheckpointError, match="give the target"):
        export_drafter(drafter, tmp_path / "d", "card", layout="speculators")
    assert list(tmp_path.iterdir()) == []


def test_tables_of_an_orbax_target_are_those_of_its_files(folders, tmp_path):
    converted = convert(folders["target"], tmp_path / "orbax", "target")
    one, other = (read_tables(folder, "t") for folder in (folders["target"], converted))
    np.testing.assert_array_equal(one.embedding, other.embedding)
    np.testing.assert_array_equal(one.head, other.head)
    assert one.verifier == other.verifier


def test_the_card_says_what_is_borrowed_and_how_many_ids_are_proposed(folders):
    facts = dict.fromkeys(("data", "recipe", "figures"), {})
    few, own = (
        model_card(dj.load_drafter(folders[n]), target="T", target_licence="MIT", **facts)
        for n in ("few", "own")
    )
    assert "whose embedding and head it borrows; it proposes 49 of the target's ids" in few
    assert "borrows" not in own and "it proposes 49 of the target's ids" in own
