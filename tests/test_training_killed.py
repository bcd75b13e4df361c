"""Answers by a real engine, killed while it generates: the resumed shards are byte for byte those
of a run that nobody killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax

import dflash_jax
from dflash_jax.cli.answers import Answers
from dflash_jax.training.corpus import (
    CorpusOptions,
    prompt_seed,
    prompt_temperature,
    shard_paths,
    write_corpus,
)
from dflash_jax.training.prompts import user_prompt
from tiny_text import write_text_target

OPTIONS = CorpusOptions(
    max_prompt_tokens=32,
    max_answer_tokens=16,
    min_answer_tokens=1,
    shard_size=3,
    answer_temperature=1.0,
    seed=5,
)
CHILD = """
import sys
sys.path[:0] = {paths}
import test_training_killed as test
test.generate(test.start(test.Path({target!r}), test.die), test.Path({folder!r}))
"""
groups_done: list[int] = []


def die(stage: str, done: int, total: int) -> None:
    """In the middle of the second shard: some of its answers have ended and some have not."""
    if stage == "generate" and groups_done and done < total:
        os.kill(os.getpid(), signal.SIGKILL)
    groups_done.extend([total] * (stage == "generate" and done == total))


def start(target: Path, progress=None) -> dflash_jax.LLM:
    return dflash_jax.LLM(
        target, max_seq_len=48, max_batch_size=2, prefix_reuse=False, progress=progress
    )


def generate(llm: dflash_jax.LLM, folder: Path) -> None:
    engine = Answers(llm.tokenizer, lambda: llm)

    def answer(group):
        return engine.answers(
            [prompt.ids for prompt in group],
            max_tokens=OPTIONS.max_answer_tokens,
            temperatures=[prompt_temperature(prompt, OPTIONS) for prompt in group],
            seeds=[prompt_seed(prompt, OPTIONS.seed) for prompt in group],
        )

    assert llm.tokenizer is not None
    prompts = [user_prompt(llm.tokenizer, f"say {i}", "test") for i in range(9)]
    write_corpus(folder, prompts, answer, OPTIONS)


def test_killed_answers_are_resumed_byte_for_byte(tmp_path, as_a_user):
    target, killed, whole = write_text_target(tmp_path / "t"), tmp_path / "k", tmp_path / "w"
    tests = Path(__file__).parent
    code = CHILD.format(
        paths=[str(tests), str(tests.parent)], target=str(target), folder=str(killed)
    )
    llm = start(target)
    generate(llm, whole)
    # The child takes the programs that this process compiled from the cache of the test run.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"] or "")}
    every = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | cache | every,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert [path.name for path in shard_paths(killed)] == ["corpus-00000.jsonl"]
    generate(llm, killed)
    names = sorted(path.name for path in whole.iterdir())
    assert names == [*(f"corpus-0000{i}.jsonl" for i in range(3)), "manifest.json"]
    for name in names:
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
