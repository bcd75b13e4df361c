"""`dflash-jax train`: a drafter for a target, from a file of prompts to a folder that loads.

The stages and what they keep are `training/run.py`; the engine that answers the prompts is
`answers.py`. A killed run goes on where it stopped when it is started again with the same options.
"""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dflash_jax.cli import options, output, train_options
from dflash_jax.cli.logs import notes_shown
from dflash_jax.cli.progress import Bars
from dflash_jax.cli.start import fetch_demo, start_llm
from dflash_jax.cli.train_plan import plan_document, prompt_lines, show_plan
from dflash_jax.errors import ConfigError

if TYPE_CHECKING:
    from dflash_jax import LLM
    from dflash_jax.config import DrafterConfig, TargetConfig
    from dflash_jax.training.corpus import CorpusOptions
    from dflash_jax.training.options import TrainOptions
    from dflash_jax.training.trainer import Trained


class Job(NamedTuple):
    """What is to be trained from what, besides the run's own record."""

    target: str
    prompts: Path
    drafter: Path
    work: Path
    begin_with: Path | None
    made_up: int
    corpus: "CorpusOptions"
    max_batch_size: int | None
    devices: int
    tensorboard: bool


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
    made_up: Annotated[
        int, typer.Option("--made-up", help="Prompts that the target makes up besides.")
    ] = 0,
    max_answer_tokens: Annotated[
        int, typer.Option("--max-answer-tokens", help="Answers are cut there.")
    ] = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", help="Longer prompts are left out, and counted.")
    ] = 256,
    answer_temperature: Annotated[
        float, typer.Option("--answer-temperature", help="Of the target's answers; 0 = greedy.")
    ] = 0.0,
    whole_answers: Annotated[
        bool, typer.Option("--whole-answers", help="Leave out answers cut by length or as a loop.")
    ] = False,
    max_batch_size: options.MaxBatchSizeOption = None,
    layers: train_options.Layers = None,
    taps: train_options.Taps = None,
    block_size: train_options.BlockSize = None,
    intermediate_size: train_options.IntermediateSize = None,
    steps: train_options.Steps = None,
    documents: train_options.Documents = None,
    anchors: train_options.Anchors = None,
    accumulate: train_options.Accumulate = None,
    compute_dtype: train_options.ComputeDtypeOption = None,
    learning_rate: train_options.LearningRate = None,
    warmup: train_options.Warmup = None,
    schedule: train_options.ScheduleOption = None,
    decay_share: train_options.DecayShare = None,
    optimizer: train_options.OptimizerOption = None,
    loss: train_options.LossOption = None,
    distill_weight: train_options.DistillWeight = None,
    held_out: train_options.HeldOutShare = None,
    evaluate_every: train_options.EvaluateEvery = None,
    save_every: train_options.SaveEvery = None,
    patience: train_options.Patience = None,
    accept_every: train_options.AcceptEvery = None,
    accept_prompts: train_options.AcceptPrompts = None,
    accept_tokens: train_options.AcceptTokens = None,
    seed: train_options.Seed = None,
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

    given = {name: value for name, value in locals().items() if name in _OF_THE_RUN}
    corpus = CorpusOptions(
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_answer_tokens,
        keep_cut=not whole_answers,
        answer_temperature=answer_temperature,
        seed=seed or 0,
    )
    work = work or drafter.with_name(drafter.name + ".work")
    job = Job(
        target,
        prompts,
        drafter,
        work,
        begin_with,
        made_up,
        corpus,
        max_batch_size,
        devices,
        tensorboard,
    )
    begun = time.perf_counter()
    with notes_shown():
        target_config, drafter_config, asked = _checked(job, given)
        if dry_run:
            document = _planned(job, target_config, drafter_config, asked)
        else:
            document = _document(drafter, _train(job, asked), time.perf_counter() - begun)
    if json:
        output.print_json(document)
    elif dry_run:
        show_plan(document, asked.steps)
    else:
        _show(document)


_OF_THE_RUN = frozenset(
    "mask_token_id layers taps block_size intermediate_size steps documents anchors accumulate "
    "compute_dtype learning_rate warmup schedule decay_share optimizer loss distill_weight "
    "held_out evaluate_every save_every patience accept_every accept_prompts accept_tokens "
    "seed".split()
)


def _checked(job: Job, given: dict[str, Any]) -> "tuple[TargetConfig, DrafterConfig, TrainOptions]":
    """What files and options can tell, before a backend starts."""
    from dflash_jax.config import DrafterConfig, TargetConfig
    from dflash_jax.training.options import check_options, drafter_config
    from dflash_jax.weights.hub import resolve_model

    with Bars() as bars:
        fetch_demo(job.target, bars)
    target = TargetConfig.from_folder(resolve_model(job.target))
    base = None if job.begin_with is None else DrafterConfig.from_folder(job.begin_with)
    asked = train_options.run_options(given, base)
    drafter = base or drafter_config(target, asked)
    check_options(asked, job.devices)
    if target.vocab_size <= asked.frequent + asked.extra:
        asked = dataclasses.replace(asked, frequent=0)  # no rows are left to sample from
    return target, drafter, asked


def _planned(
    job: Job, target: "TargetConfig", drafter: "DrafterConfig", asked: "TrainOptions"
) -> dict[str, Any]:
    from dflash_jax.training.plan import plan_training

    longest = job.corpus.max_prompt_tokens + job.corpus.max_answer_tokens
    texts = prompt_lines(job.prompts) + job.made_up
    plan = plan_training(
        target, drafter, asked, documents=texts, longest=longest, devices=job.devices
    )
    return plan_document(plan, asked.compute_dtype)


def _train(job: Job, asked: "TrainOptions") -> "Trained":
    """Trains; the engine that answers starts when it is needed."""
    from dflash_jax import load_drafter
    from dflash_jax.cli.answers import Answers
    from dflash_jax.serving.text import Tokenizer
    from dflash_jax.training.made_up import PromptOptions
    from dflash_jax.training.run import train_drafter
    from dflash_jax.weights.hub import resolve_model

    folder = resolve_model(job.target)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
    mesh = _mesh(job.devices)
    base = None if job.begin_with is None else load_drafter(job.begin_with, dtype="float32")
    with Bars() as bars:
        return train_drafter(
            folder,
            job.prompts,
            job.drafter,
            asked,
            engine=Answers(tokenizer, lambda: _answering(job, bars)),
            work_folder=job.work,
            prompts=PromptOptions(made_up=job.made_up, seed=asked.seed),
            corpus=job.corpus,
            begin_with=base,
            mesh=mesh,
            tensorboard=job.tensorboard,
            progress=bars,
        )


def _answering(job: Job, bars: Bars) -> "LLM":
    """The engine that makes up prompts and answers them."""
    corpus = job.corpus
    longest = max(corpus.max_answer_tokens, corpus.max_prompt_tokens if job.made_up else 0)
    return start_llm(
        job.target,
        None,
        bars,
        max_seq_len=corpus.max_prompt_tokens + longest,
        max_batch_size=job.max_batch_size,
        prefix_reuse=False,
    )


def _mesh(devices: int) -> Any:
    """The first devices as a mesh that documents are divided over; None for one."""
    import jax
    import numpy as np

    from dflash_jax.training.step import DATA_AXIS

    found = jax.devices()
    if devices > len(found):
        raise ConfigError(
            f"--devices {devices}: JAX sees {len(found)} here ({found[0].platform}); give at most "
            "as many"
        )
    return None if devices == 1 else jax.sharding.Mesh(np.array(found[:devices]), (DATA_AXIS,))


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
