"""`dflash-jax train`: a drafter for a target, from a file of prompts to a folder that loads.

The stages and what they keep are `training/run.py`; the engine that answers the prompts is
`answers.py`. A killed run goes on where it stopped when it is started again with the same options.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_jax.cli import corpus_options, options, output, train_job, train_options
from dflash_jax.cli.convert import Layout
from dflash_jax.cli.logs import notes_shown
from dflash_jax.cli.train_plan import show_plan

if TYPE_CHECKING:
    from dflash_jax.training.trainer import Trained


def train(
    target: options.TargetArgument,
    prompts: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help='JSONL, each line {"turns": ["user turn", ...]} or {"messages": [...]}.',
        ),
    ],
    drafter: Annotated[Path, typer.Argument(help="The folder to write the drafter to.")],
    mask_token_id: train_options.MaskTokenId = None,
    begin_with: train_options.FromOption = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", help="Corpus, features, checkpoints; default: DRAFTER.work."),
    ] = None,
    made_up: corpus_options.MadeUp = 0,
    made_up_from: corpus_options.MadeUpFrom = None,
    max_answer_tokens: corpus_options.MaxAnswerTokens = 256,
    min_answer_tokens: corpus_options.MinAnswerTokens = 10,
    max_prompt_tokens: corpus_options.MaxPromptTokens = 256,
    answer_temperature: corpus_options.AnswerTemperature = 0.0,
    greedy_share: corpus_options.GreedyShare = 0.0,
    whole_answers: corpus_options.WholeAnswers = False,
    shard_prompts: corpus_options.ShardPrompts = 1024,
    max_batch_size: options.MaxBatchSizeOption = None,
    layers: train_options.Layers = None,
    taps: train_options.Taps = None,
    block_size: train_options.BlockSize = None,
    intermediate_size: train_options.IntermediateSize = None,
    sliding_window: train_options.SlidingWindow = None,
    init: train_options.InitOption = None,
    steps: train_options.Steps = None,
    documents: train_options.Documents = None,
    anchors: train_options.Anchors = None,
    features: train_options.FeaturesOption = None,
    keep_final: train_options.KeepFinal = None,
    pack: train_options.Pack = None,
    anchor_chunk: train_options.AnchorChunk = None,
    accumulate: train_options.Accumulate = None,
    compute_dtype: train_options.ComputeDtypeOption = None,
    learning_rate: train_options.LearningRate = None,
    warmup: train_options.Warmup = None,
    schedule: train_options.ScheduleOption = None,
    decay_share: train_options.DecayShare = None,
    optimizer: train_options.OptimizerOption = None,
    weight_decay: train_options.WeightDecay = None,
    clip: train_options.Clip = None,
    loss: train_options.LossOption = None,
    distill_weight: train_options.DistillWeight = None,
    overlap_weight: train_options.OverlapWeight = None,
    gamma: train_options.Gamma = None,
    narrow_until: train_options.NarrowUntil = None,
    narrow_width: train_options.NarrowWidth = None,
    frequent: train_options.Frequent = None,
    extra: train_options.Extra = None,
    full_head_from: train_options.FullHeadFrom = None,
    held_out: train_options.HeldOutShare = None,
    evaluate_every: train_options.EvaluateEvery = None,
    save_every: train_options.SaveEvery = None,
    patience: train_options.Patience = None,
    accept_every: train_options.AcceptEvery = None,
    accept_prompts: train_options.AcceptPrompts = None,
    accept_tokens: train_options.AcceptTokens = None,
    seed: train_options.Seed = None,
    layout: train_options.LayoutOption = Layout.ZLAB,
    draft_vocab: train_options.DraftVocab = None,
    devices: train_options.DevicesOption = 1,
    tensorboard: train_options.TensorboardOption = False,
    dry_run: train_options.DryRunOption = False,
    json: options.JsonOption = False,
) -> None:
    """Train a drafter: the target answers prompts, the drafter learns its answers.

    The same command goes on where a killed one stopped; its work folder may be removed when it is
    done.
    """
    from dflash_jax.training.corpus import CorpusOptions
    from dflash_jax.training.made_up import PromptOptions

    if made_up_from and not made_up:
        raise typer.BadParameter("--made-up-from needs --made-up, the number of prompts")
    of_the_run = train_job.run_option_names()
    given = {name: value for name, value in locals().items() if name in of_the_run}
    corpus = CorpusOptions(
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_answer_tokens,
        min_answer_tokens=min_answer_tokens,
        keep_cut=not whole_answers,
        shard_size=shard_prompts,
        answer_temperature=answer_temperature,
        greedy_share=greedy_share,
        seed=seed or 0,
    )
    work = work or drafter.with_name(drafter.name + ".work")
    job = train_job.Job(
        target,
        prompts,
        drafter,
        work,
        begin_with,
        PromptOptions(
            made_up=made_up,
            seeds=tuple(made_up_from or ("",)),
            seed=seed or 0,
            shard_size=shard_prompts,
        ),
        corpus,
        max_batch_size,
        devices,
        tensorboard,
        layout.value,
    )
    begun = time.perf_counter()
    with notes_shown():
        target_config, drafter_config, asked = train_job.checked(job, given)
        if dry_run:
            document = train_job.planned(job, target_config, drafter_config, asked)
        else:
            document = _document(drafter, train_job.train(job, asked), time.perf_counter() - begun)
    if json:
        output.print_json(document)
    elif dry_run:
        show_plan(document, asked.steps)
    else:
        _show(document)


def _document(drafter: Path, trained: "Trained", seconds: float) -> dict[str, Any]:
    held, real = trained.held_out, trained.real
    return {
        "drafter": str(drafter),
        "steps": trained.steps,
        "best_step": trained.best_step,
        "held_out": None if held is None else held._asdict(),
        "real_rounds": None if real is None else real._asdict(),
        "seconds": seconds,
    }


def _show(document: dict[str, Any]) -> None:
    held, real = document["held_out"], document["real_rounds"]
    facts = {
        "drafter": document["drafter"],
        "steps": f"{document['steps']}, the best after {document['best_step']}",
        "seconds": f"{document['seconds']:.0f}",
    }
    if held is not None:
        facts["held-out accepted run"] = f"{held['accepted']:.2f} tokens, teacher-forced"
    if real is not None:
        facts["real rounds commit"] = (
            f"{real['accepted']:.2f} tokens, {real['without_loops']:.2f} without loops"
        )
    output.print_facts(facts)
