"""From a target and a file of prompts to a drafter's folder, in one call.

The stages keep their results in one work folder (`prompts/` that the target made up, `corpus/`,
`features/`, `run/`) and each goes on where a killed call stopped. An engine that answers prompts is
handed in by the caller, because serving and training do not know each other.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from dflash_jax.config import TargetConfig
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.progress import Progress
from dflash_jax.training.answering import AnswerEngine, chat_tokenizer
from dflash_jax.training.checks import checked_run
from dflash_jax.training.corpus import (
    CorpusOptions,
    prompt_seed,
    prompt_temperature,
    shard_paths,
    write_corpus,
)
from dflash_jax.training.documents import Document
from dflash_jax.training.export import export_drafter, model_card
from dflash_jax.training.features import cache_features, corpus_documents, read_features
from dflash_jax.training.feed import answer_counts
from dflash_jax.training.made_up import PromptOptions, make_up_prompts
from dflash_jax.training.options import TrainOptions
from dflash_jax.training.prompts import Prompt, next_turn, prompts_from_file
from dflash_jax.training.provenance import target_identity
from dflash_jax.training.step import devices_of
from dflash_jax.training.trainer import Trained, train
from dflash_jax.weights.layouts import Layout, in_layout, read_tables
from dflash_jax.weights.load import load_target
from dflash_jax.weights.vocabulary import draft_ids

log = logging.getLogger(__name__)


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
    begin_with: DFlashDrafter | None = None,
    layout: Layout = "zlab",
    target_name: str = "",
    mesh: Mesh | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
) -> Trained:
    """Trains a drafter for a target and writes it to `out_folder` in a published layout.

    Args:
        prompts_file: JSONL, each line with `turns` or `messages` (`prompts.py`).
        engine: answers prompts with this target.
        prompts, corpus: None: their defaults.
        work_folder: for corpus, features and checkpoints; may be removed afterwards.
        layout: of the folder; "speculators" copies the target's embedding and head into it.
        target_name: how the folder names the target; empty: as its folder is called.
        begin_with, mesh, tensorboard, progress: as `train` has them.

    Raises:
        RequestError: no prompts in the file, a line that is none, or all of them too long.
        ConfigError: options that do not fit the target, a target without a chat template, or a
            work folder begun with other prompts, options or target.
        CheckpointError: a disk that is full, or files that are not what their index says.
        TrainingError: training that diverged.
    """
    prompts, corpus = prompts or PromptOptions(), corpus or CorpusOptions()
    target_config = TargetConfig.from_folder(target_folder)
    config, options = checked_run(
        target_config,
        options,
        begin_with=None if begin_with is None else begin_with.config,
        devices=devices_of(mesh),
    )
    made_from = {"target": target_identity(target_folder)}
    asked = list(prompts_from_file(prompts_file, chat_tokenizer(engine)))
    longest = corpus.max_prompt_tokens
    asked += make_up_prompts(engine, prompts, longest, work_folder / "prompts", made_from)
    counts = write_corpus(
        work_folder / "corpus",
        asked,
        lambda group: _answers(engine, group, corpus),
        corpus,
        follow=lambda prompt, ids: next_turn(engine.tokenizer, prompt, ids),
        made_from=made_from,
    )
    engine.close()
    log.info("answers: %s", dict(counts))
    target = load_target(target_folder, dtype="float32")
    documents = _documents(target, work_folder, config.target_layer_ids, options, progress)
    trained = train(
        target,
        documents,
        work_folder / "run",
        options,
        begin_with=begin_with,
        mesh=mesh,
        tensorboard=tensorboard,
        progress=progress,
    )
    recipe = dataclasses.asdict(options)
    if trained.drafter.config.draft_vocab_size is not None:
        recipe["draft vocabulary"] = _vocabulary(trained.drafter, documents)
    named = target_name or target_folder.name
    tables = read_tables(target_folder, named) if layout == "speculators" else None
    made = in_layout(trained.drafter, layout, tables)
    card = _card(trained._replace(drafter=made), named, work_folder, recipe, corpus)
    export_drafter(made, out_folder, card, layout=layout, tables=tables)
    return trained


def _vocabulary(drafter: DFlashDrafter, documents: Sequence[Document]) -> str:
    """What a reduced draft vocabulary is, for the card."""
    counts = answer_counts(documents, drafter.config.vocab_size)
    ids = draft_ids(np.asarray(drafter.d2t[...]))
    share = counts[ids].sum() / max(counts.sum(), 1)
    return f"{len(ids)} ids, {share:.2%} of the answers' tokens, in training and in the figures"


def _documents(
    target: Target,
    work: Path,
    layer_ids: Sequence[int],
    options: TrainOptions,
    progress: Progress | None,
) -> list[Document]:
    """The corpus with cached features, or without where each step computes its own."""
    if options.features == "computed":
        return corpus_documents(work / "corpus")
    features = work / "features"
    keep_final = options.keeps_final
    cache_features(
        target, work / "corpus", features, layer_ids, keep_final=keep_final, progress=progress
    )
    return read_features(features)


def _answers(
    engine: AnswerEngine, group: Sequence[Prompt], options: CorpusOptions
) -> Sequence[tuple[list[int], str]]:
    return engine.answers(
        [prompt.ids for prompt in group],
        max_tokens=options.max_answer_tokens,
        temperatures=[prompt_temperature(prompt, options) for prompt in group],
        seeds=[prompt_seed(prompt, options.seed) for prompt in group],
    )


def _card(
    trained: Trained, target: str, work: Path, recipe: dict[str, object], corpus: CorpusOptions
) -> str:
    how = "greedy"
    if corpus.answer_temperature and corpus.greedy_share < 1:
        how = f"at temperature {corpus.answer_temperature:g}"
        how += f", {corpus.greedy_share:.0%} greedy" if corpus.greedy_share else ""
    shards = shard_paths(work / "corpus")
    held, real = trained.held_out, trained.real
    figures: dict[str, object] = (
        {}
        if held is None
        else {
            "held-out accepted run (teacher-forced, greedy)": f"{held.accepted:.3f}",
            "matches by slot": " ".join(f"{share:.3f}" for share in held.by_slot),
            "held-out anchors": held.anchors,
        }
    )
    if real is not None:
        figures["acceptance length by real rounds, held-out prompts"] = f"{real.accepted:.3f}"
        figures["without the looping part of answers"] = f"{real.without_loops:.3f}"
    return model_card(
        trained.drafter,
        target=target,
        target_licence="see the target's own card",
        data={"answers": f"the target's own, {how}", "shards": len(shards)},
        recipe=recipe,
        figures=figures,
    )
