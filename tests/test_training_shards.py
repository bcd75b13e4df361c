"""Tests of `training/shards.py`: what the manifest holds, and that half a shard is none."""

import hashlib
import importlib.metadata
import json
import resource
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import dflash_jax
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.serving.openapi import openapi_document
from dflash_jax.training.shards import MANIFEST, Shards

LINES = [{"a": 1}, {"a": 2}]


@dataclass(frozen=True)
class Before:
    """Options of an older program."""

    n: int = 1


@dataclass(frozen=True)
class Options(Before):
    """The same, one more."""

    seeds: tuple[str, ...] = ("a", "b")


@pytest.fixture
def no_room():
    """Writes fail beyond 400 bytes a file: a real error of the system, as of a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_the_manifest_names_hashes_versions_and_origin(tmp_path):
    shards = Shards(tmp_path, "x", Options(n=3), {"target": "t"})
    shards.write(0, LINES, Counter(stop=2, loop=1))
    shards.write(1, [], Counter(stop=1))
    record = json.loads((tmp_path / MANIFEST).read_text())
    assert record["made_from"] == {"options": {"n": 3, "seeds": ["a", "b"]}, "target": "t"}
    content = b'{"a": 1}\n{"a": 2}\n'
    assert (tmp_path / "x-00000.jsonl").read_bytes() == content
    assert record["shards"]["x-00000.jsonl"] == {
        "sha256": hashlib.sha256(content).hexdigest(),
        "lines": 2,
        "counts": {"loop": 1, "stop": 2},
        "versions": {name: importlib.metadata.version(name) for name in ("dflash-jax", "jax")},
    }
    assert Shards(tmp_path, "x", Options(n=3), {"target": "t"}).counts == {"stop": 3, "loop": 1}


def test_a_checkout_that_is_not_installed_knows_its_version(tmp_path, monkeypatch):
    """A run from one failed at its first shard, after the answers were made."""
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "dflash-jax":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    Shards(tmp_path, "x", Options(), {}).write(0, LINES, Counter())
    document = openapi_document(max_body_bytes=1)
    assert document["info"]["version"] == dflash_jax.__version__
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["version"] == dflash_jax.__version__


def test_a_file_that_the_manifest_does_not_know_is_no_shard(tmp_path):
    shards = Shards(tmp_path, "x", Options(), {})
    shards.path(0).write_text("from before a kill\n")
    assert not shards.is_whole(0)
    shards.write(0, LINES, Counter())
    assert Shards(tmp_path, "x", Options(), {}).is_whole(0)
    shards.path(0).unlink()
    assert not shards.is_whole(0)


def test_a_changed_shard_is_refused_with_both_hashes(tmp_path):
    shards = Shards(tmp_path, "x", Options(), {})
    shards.write(0, LINES, Counter())
    shards.path(0).write_text("{}\n")
    found = hashlib.sha256(b"{}\n").hexdigest()
    with pytest.raises(CheckpointError, match=f"is {found}, manifest.json says [0-9a-f]{{64}}"):
        shards.is_whole(0)


def test_a_full_disk_leaves_no_shard_and_says_what_is_needed(tmp_path, request):
    shards = Shards(tmp_path, "x", Options(), {})
    big = [{"a": "b" * 1000}]
    request.getfixturevalue("no_room")
    with pytest.raises(CheckpointError, match=r"x-00000\.jsonl could not .*needs 0\.001 MB; free"):
        shards.write(0, big, Counter())
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]
    assert not shards.is_whole(0) and shards.counts == {}


def test_a_shard_whose_manifest_found_no_room_is_made_again(tmp_path, request):
    shards = Shards(tmp_path, "x", Options(), {"long": "y" * 200})
    request.getfixturevalue("no_room")
    with pytest.raises(CheckpointError, match=r"manifest\.json could not be written"):
        shards.write(0, LINES, Counter(stop=2))
    again = Shards(tmp_path, "x", Options(), {"long": "y" * 200})
    assert again.path(0).is_file() and not again.is_whole(0)


def test_another_origin_is_refused_only_when_something_would_be_lost(tmp_path):
    Shards(tmp_path, "x", Options(n=1), {"same": 0, "target": "s"})
    shards = Shards(tmp_path, "x", Options(n=2), {"same": 0, "target": "t"})
    shards.write(0, LINES, Counter())
    said = r"\(options\.n was 2 and is 3; target was 't' and is 'u'\): use the same"
    with pytest.raises(ConfigError, match=said):
        Shards(tmp_path, "x", Options(n=3), {"same": 0, "target": "u"})


def test_an_option_that_a_record_does_not_name_yet_had_its_default(tmp_path):
    Shards(tmp_path, "x", Before(n=2), {}).write(0, LINES, Counter())
    assert Shards(tmp_path, "x", Options(n=2), {}).is_whole(0)
    with pytest.raises(ConfigError, match=r"\(options\.seeds was \['a', 'b'\] and is \['c'\]\)"):
        Shards(tmp_path, "x", Options(n=2, seeds=("c",)), {})
    (tmp_path / MANIFEST).unlink()
    Shards(tmp_path, "x", Options(n=2, seeds=("c",)), {}).write(0, LINES, Counter())
    with pytest.raises(ConfigError, match=r"options\.seeds was \['c'\] and is None"):
        Shards(tmp_path, "x", Before(n=2), {})


def test_a_manifest_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / MANIFEST).write_text('{"options": {}}')
    with pytest.raises(CheckpointError, match="no manifest of this version"):
        Shards(tmp_path, "x", Options(), {})
