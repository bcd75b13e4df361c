"""`train` from a file of prompts to a drafter that the demo can run."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import few_ids
from command_line import run
from dflash_jax.cli.train_job import run_options
from dflash_jax.config import DrafterConfig
from dflash_jax.models import DFlashDrafter
from dflash_jax.training.corpus import CorpusOptions
from dflash_jax.training.made_up import PromptOptions
from dflash_jax.training.options import TrainOptions
from dflash_jax.training.trainer import Trained
from tiny_text import MASK, write_text_drafter, write_text_target

OPTIONS = (
    "--mask-token-id", MASK, "--layers", 1, "--taps", 1, "--block-size", 4, "--steps", 3,
    "--documents", 2, "--anchors", 2, "--max-answer-tokens", 32, "--max-batch-size", 1,
    "--accept-every", 0,
)  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"turns": ["{word}"]}}\n' for word in ("hi", "and", "so", "why")))
    return file


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_target(tmp_path_factory.mktemp("train") / "target")


def test_a_trained_drafter_loads_and_leaves_the_text_as_it_is(
    target: Path, prompts: Path, tmp_path: Path
):
    drafter = tmp_path / "drafter"
    ran = run("train", target, prompts, drafter, *OPTIONS, "--json")
    assert ran.code == 0
    assert (ran.document["drafter"], ran.document["steps"]) == (str(drafter), 3)
    assert "info: " in ran.stderr
    words = ("generate", target, "hi", "-n", 12, "--max-seq-len", 128, "--json")
    plain, drafted = run(*words).document, run(*words, "-d", drafter).document
    one, other = plain["completions"][0], drafted["completions"][0]
    assert one["token_ids"] == other["token_ids"]
    assert other["stats"]["num_drafts"] > 0


@pytest.mark.oracle  # it needs the extra train, which the test extra does not bring
def test_a_run_on_two_devices_writes_events_and_another_goes_on_from_its_drafter(
    target: Path, prompts: Path, tmp_path: Path
):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

    def train(out: Path, *words: object) -> None:
        program = "import sys; from dflash_jax.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "train", target, prompts, out, *words]
        child = subprocess.run(
            [*map(str, command), "--devices", "2", "--tensorboard", "--json"],
            capture_output=True,
            text=True,
            env=os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        )
        assert child.returncode == 0, child.stderr

    first, second = tmp_path / "first", tmp_path / "second"
    train(first, *OPTIONS, "--steps", 10)
    (events,) = (tmp_path / "first.work").rglob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()
    train(second, "--from", first, "--steps", 2, "--documents", 2, "--anchors", 2,
          "--max-answer-tokens", 32, "--max-batch-size", 1, "--accept-every", 0)  # fmt: skip
    assert DrafterConfig.from_folder(first) == DrafterConfig.from_folder(second)
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.parametrize(
    "words, said",
    [
        (("--mask-token-id", 900), "mask_token_id 900 is outside the vocabulary of 261"),
        (("--layers", 9), "num_layers 9"),
        (("--block-size", 1), "block_size 1"),
        (("--made-up", -1), "made_up -1: at least 0"),
        (("--made-up-from", "Write"), "--made-up-from needs --made-up"),
        (("--greedy-share", 2), "greedy_share 2.0: must be between 0 and 1"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(
    words: tuple[object, ...], said: str, target: Path, prompts: Path, tmp_path: Path
):
    ran = run("train", target, prompts, tmp_path / "new", *OPTIONS, *words)
    assert (ran.code, ran.stdout) == (2, "")
    assert said in ran.stderr
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.work").exists()


def test_every_field_of_the_run_is_an_option(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """None is forgotten on the command line, and each arrives as it was given."""
    asked: list[tuple[TrainOptions, dict[str, Any]]] = []

    def noted(folder: Path, file: Path, out: Path, options: TrainOptions, **others: Any):
        asked.append((options, others))
        return Trained(None, None, None, options.steps, 0)  # type: ignore[arg-type]

    monkeypatch.setattr("dflash_jax.training.run.train_drafter", noted)
    words = "--mask-token-id 7 --layers 2 --taps 1 --block-size 5 --intermediate-size 40 "
    words += "--sliding-window 9 --init random --steps 50 --documents 12 --anchors 6 "
    words += "--features computed --keep-final --pack 2 --anchor-chunk 4 --accumulate 3 "
    words += "--compute-dtype bfloat16 --learning-rate 0.5 --warmup 0.1 --schedule wsd "
    words += "--decay-share 0.3 --optimizer muon --weight-decay 0.25 --clip 2 --loss distill "
    words += "--distill-weight 0.75 --overlap-weight 0.25 --gamma 3 --narrow-until 0.5 "
    words += "--narrow-width 3 --frequent 100 --extra 50 --full-head-from 0.8 "
    words += "--held-out 0.2 --evaluate-every 7 --save-every 8 "
    words += "--patience 9 --accept-every 10 --accept-prompts 11 --accept-tokens 12 --seed 13"
    beside = ("--layout", "speculators", "--draft-vocab", 99, "--tensorboard", "--json")
    made_up = ("--made-up", 14, "--made-up-from", "Write me", "--made-up-from", "")
    texts = "--max-answer-tokens 30 --whole-answers --answer-temperature 0.5 --greedy-share 0.25"
    words = f"{words} {texts} --min-answer-tokens 3 --shard-prompts 40"
    ran = run("train", target, prompts, tmp_path / "new", *words.split(), *beside, *made_up)
    assert ran.code == 0, ran.stderr
    ((options, others),) = asked
    assert dataclasses.asdict(options) == {
        "mask_token_id": 7,
        "num_layers": 2,
        "num_taps": 1,
        "block_size": 5,
        "intermediate_size": 40,
        "sliding_window": 9,
        "init": "random",
        "steps": 50,
        "documents_per_step": 12,
        "anchors_per_document": 6,
        "features": "computed",
        "keep_final": True,
        "pack": 2,
        "anchor_chunk": 4,
        "accumulate": 3,
        "compute_dtype": "bfloat16",
        "learning_rate": 0.5,
        "warmup": 0.1,
        "schedule": "wsd",
        "decay_share": 0.3,
        "optimizer": "muon",
        "weight_decay": 0.25,
        "clip": 2.0,
        "loss": "distill",
        "distill_weight": 0.75,
        "overlap_weight": 0.25,
        "gamma": 3.0,
        "narrow_until": 0.5,
        "narrow_width": 3,
        "frequent": 100,
        "extra": 50,
        "full_head_from": 0.8,
        "draft_vocab": 99,
        "held_out": 0.2,
        "evaluate_every": 7,
        "save_every": 8,
        "patience": 9,
        "accept_every": 10,
        "accept_prompts": 11,
        "accept_tokens": 12,
        "seed": 13,
    }
    assert (others["layout"], others["tensorboard"]) == ("speculators", True)
    assert others["prompts"] == PromptOptions(
        made_up=14, seeds=("Write me", ""), seed=13, shard_size=40
    )
    assert others["corpus"] == CorpusOptions(
        max_answer_tokens=30,
        min_answer_tokens=3,
        keep_cut=False,
        shard_size=40,
        answer_temperature=0.5,
        greedy_share=0.25,
        seed=13,
    )
    ran = run("train", target, prompts, tmp_path / "new", *OPTIONS, "--draft-vocab", 999)
    assert ran.code == 2 and "a draft vocabulary of 999 ids" in " ".join(ran.stderr.split())


def test_the_mask_id_is_asked_for_and_never_guessed(target: Path, prompts: Path, tmp_path: Path):
    ran = run("train", target, prompts, tmp_path / "new")
    assert ran.code == 2
    assert "--mask-token-id" in ran.stderr


def test_a_target_that_cannot_chat_is_refused_before_the_engine_starts(
    prompts: Path, tmp_path: Path
):
    target = write_text_target(tmp_path / "mute", template=None)
    ran = run("train", target, prompts, tmp_path / "new", *OPTIONS)
    assert (ran.code, ran.stdout) == (2, "")
    assert "the target has no chat template" in ran.stderr
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.work").exists()


def test_a_dry_run_says_memory_disk_and_time_and_loads_nothing(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dflash_jax.cli.train_job.start_llm", None)
    monkeypatch.setattr("dflash_jax.weights.load.load_target", None)
    ran = run("train", target, prompts, tmp_path / "new", *OPTIONS, "--dry-run", "--json")
    assert ran.code == 0 and not (tmp_path / "new.work").exists()
    memory, disk = ran.document["memory"], ran.document["disk"]
    weights = memory["drafter weights"]["nbytes"]
    assert memory["gradients"]["nbytes"] == weights
    assert memory["moments"]["nbytes"] == 2 * weights
    assert disk["checkpoints"]["nbytes"] == 4 * 3 * weights
    # 2 documents of 256 + 32 tokens, one tap, bfloat16; 4 prompts on disk.
    assert 2 * disk["features"]["nbytes"] == 4 * memory["features of a batch"]["nbytes"]
    assert ran.document["needed"] == sum(part["nbytes"] for part in memory.values())
    assert ran.document["seconds"] > 0 and "no step was run" in ran.document["seconds_basis"]
    shown = run("train", target, prompts, tmp_path / "new", *OPTIONS, "--dry-run")
    assert "target weights" in shown.stderr and "GFLOP" in shown.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (("--accumulate", 3), "cannot be divided into accumulate 3"),
        (("--devices", 2, "--documents", 3), "3 cannot be divided into accumulate 1 x 2 devices"),
        (("--schedule", "wsd", "--decay-share", 1.0, "--steps", 100), "leave no step of 100"),
    ],
)
def test_options_of_the_loop_that_do_not_fit_are_refused(
    words: tuple[object, ...], said: str, target: Path, prompts: Path, tmp_path: Path
):
    ran = run("train", target, prompts, tmp_path / "new", *OPTIONS, *words)
    assert (ran.code, ran.stdout) == (2, "")
    assert said in " ".join(ran.stderr.split())


def test_a_drafter_to_go_on_from_keeps_its_shape(target: Path, prompts: Path, tmp_path: Path):
    """Fault 129: no default and no option replaces what its config says."""
    first = tmp_path / "first"
    write_text_drafter(first)
    config = DrafterConfig.from_folder(first)
    said = {"layers": None, "block_size": None, "mask_token_id": None, "steps": 7}
    asked = run_options(said, config)
    assert asked == run_options(said | {"block_size": config.block_size}, config)
    assert (asked.num_layers, asked.num_taps) == (
        config.num_hidden_layers,
        len(config.target_layer_ids),
    )
    assert (asked.block_size, asked.mask_token_id, asked.steps) == (
        config.block_size,
        config.mask_token_id,
        7,
    )
    ran = run("train", target, prompts, tmp_path / "new", "--from", first, "--layers", 9)
    assert ran.code == 2
    assert f"num_layers 9 is {config.num_hidden_layers} there" in " ".join(ran.stderr.split())


def test_a_reduced_drafter_is_trained_over_all_ids(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun: list[DrafterConfig] = []

    def noted(*_: Any, begin_with: DFlashDrafter, **others: Any):
        begun.append(begin_with.config)
        return Trained(None, None, None, 1, 0)  # type: ignore[arg-type]

    monkeypatch.setattr("dflash_jax.training.run.train_drafter", noted)
    whole = tmp_path / "whole"
    write_text_drafter(whole)
    config = DrafterConfig.from_folder(whole)
    few = few_ids.write_zlab(
        tmp_path / "few",
        whole,
        range(0, 260, 2),
        vocab_size=config.vocab_size,
        dflash_config=json.loads((whole / "config.json").read_text())["dflash_config"],
    )
    assert DrafterConfig.from_folder(few).draft_vocab_size == 130
    ran = run("train", target, prompts, tmp_path / "new", "--from", few, "--json")
    assert ran.code == 0, ran.stderr
    assert begun == [config]
