"""From a target and a file of prompts to a drafter's folder, in one call.

The four stages keep their results in one work folder (`corpus/`, `features/`, `run/`) and each goes
on where a killed call stopped. An engine that answers prompts is handed in by the caller, because
serving and training do not know each other.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dflash_jax.config import TargetConfig
from dflash_jax.training.corpus import (
    CorpusOptions,
    Prompt,
    prompts_from_file,
    shard_paths,
    user_turn,
    write_corpus,
)
from dflash_jax.training.export import export_drafter, model_card
from dflash_jax.training.features import cache_features, read_features
from dflash_jax.training.options import TrainOptions, drafter_config
from dflash_jax.training.trainer import Trained, train
from dflash_jax.weights.load import load_target

log = logging.getLogger(__name__)


@runtime_checkable
class AnswerEngine(Protocol):
    """What answers prompts: a thin wrapper of an `LLM` without a drafter, at a high batch."""

    @property
    def tokenizer(self) -> Any:
        """Has `encode`, `decode`, `chat_ids` and `eos_token_ids`."""
        ...

    def answers(
        self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> Sequence[tuple[list[int], str]]:
        """Token ids (end id included) and finish reason of each prompt, in order."""
        ...


@dataclasses.dataclass(frozen=True)
class PromptOptions:
    """Where prompts come from besides the file.

    Attributes:
        made_up: how many prompts the target makes up (before repeated ones are dropped).
        seeds: beginnings of user turns that the target continues, taken in turn.
        min_tokens: shorter made-up prompts are dropped, and those that did not end.
        temperature: at which they are sampled.
    """

    made_up: int = 0
    seeds: tuple[str, ...] = ("",)
    min_tokens: int = 5
    temperature: float = 1.0
    seed: int = 0


def train_drafter(
    target_folder: Path,
    prompts_file: Path,
    out_folder: Path,
    options: TrainOptions,
    *,
    engine: AnswerEngine,
    work_folder: Path,
    prompts: PromptOptions | None = None,
    corpus: CorpusOptions | None = None,
) -> Trained:
    """Trains a drafter for a target and writes it to `out_folder` in the published layout.

    Args:
        prompts_file: JSONL, each line with `turns`.
        engine: answers prompts with this target.
        prompts, corpus: None: their defaults.
        work_folder: for corpus, features and checkpoints; may be removed afterwards.

    Raises:
        RequestError: no prompts in the file.
        ConfigError: options that do not fit the target, or a work folder begun with others.
        CheckpointError: a disk that is full, or files that are not what their index says.
        TrainingError: training that diverged.
    """
    prompts, corpus = prompts or PromptOptions(), corpus or CorpusOptions()
    config = drafter_config(TargetConfig.from_folder(target_folder), options)
    asked = list(prompts_from_file(prompts_file, engine.tokenizer))
    asked += make_up_prompts(engine, prompts, corpus.max_prompt_tokens)

    def answer(group: Sequence[Prompt]) -> Sequence[tuple[list[int], str]]:
        ids = [prompt.ids for prompt in group]
        tokens = corpus.max_answer_tokens
        return engine.answers(ids, max_tokens=tokens, temperature=0.0, seed=prompts.seed)

    counts = write_corpus(work_folder / "corpus", asked, answer, corpus)
    log.info("answers: %s", dict(counts))
    target = load_target(target_folder, dtype="float32")
    features = work_folder / "features"
    cache_features(
        target,
        work_folder / "corpus",
        features,
        config.target_layer_ids,
        keep_final=options.keep_final or options.distils,
    )
    trained = train(target, read_features(features), work_folder / "run", options)
    card = _card(trained, target_folder, work_folder, options)
    export_drafter(trained.drafter, out_folder, card)
    return trained


def make_up_prompts(engine: AnswerEngine, options: PromptOptions, max_tokens: int) -> list[Prompt]:
    """Prompts that the target writes itself, continuing an empty user turn or one of the seeds.

    Source: Magpie, 2406.08464.
    """
    if not options.made_up:
        return []
    turns = [user_turn(engine.tokenizer, seed) for seed in options.seeds]
    chosen = [turns[i % len(turns)] for i in range(options.made_up)]
    texts = engine.answers(
        [before for before, _ in chosen],
        max_tokens=max_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    ends = set(engine.tokenizer.eos_token_ids)
    made = []
    for (before, after), (ids, reason) in zip(chosen, texts, strict=True):
        text = [i for i in ids if i not in ends]
        if reason == "stop" and len(text) >= options.min_tokens:
            made.append(Prompt([*before, *text, *after], "made up"))
    return made


def _card(trained: Trained, target: Path, work: Path, options: TrainOptions) -> str:
    shards = shard_paths(work / "corpus")
    held = trained.held_out
    figures = (
        {}
        if held is None
        else {
            "held-out accepted run (teacher-forced, greedy)": f"{held.accepted:.3f}",
            "matches by slot": " ".join(f"{share:.3f}" for share in held.by_slot),
            "held-out anchors": held.anchors,
        }
    )
    return model_card(
        trained.drafter,
        target=target.name,
        target_licence="see the target's own card",
        data={"answers": "the target's own, greedy", "shards": len(shards)},
        recipe={key: value for key, value in dataclasses.asdict(options).items()},
        figures=figures,
    )
