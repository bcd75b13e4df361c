"""A `dflash-jax train` call: its options as a record, what can be checked early, and the run.

An option that was not given is None and leaves the record's default; a drafter to go on from has a
shape already, and an option that says otherwise is refused. The command itself is `train.py`.
"""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_jax.cli.progress import Bars
from dflash_jax.cli.start import fetch_demo, start_llm
from dflash_jax.cli.train_plan import plan_document, prompt_lines
from dflash_jax.errors import ConfigError

if TYPE_CHECKING:
    from dflash_jax import LLM
    from dflash_jax.config import DrafterConfig, TargetConfig
    from dflash_jax.training.corpus import CorpusOptions
    from dflash_jax.training.made_up import PromptOptions
    from dflash_jax.training.options import TrainOptions
    from dflash_jax.training.trainer import Trained
    from dflash_jax.weights.layouts import Layout


class Job(NamedTuple):
    """What is to be trained from what, besides the run's own record."""

    target: str
    prompts: Path
    drafter: Path
    work: Path
    begin_with: Path | None
    made_up: "PromptOptions"
    corpus: "CorpusOptions"
    max_batch_size: int | None
    devices: int
    tensorboard: bool
    layout: "Layout"


# Options whose field has another name.
_FIELDS = {
    "layers": "num_layers",
    "taps": "num_taps",
    "documents": "documents_per_step",
    "anchors": "anchors_per_document",
}
_NAMES = {field: name for name, field in _FIELDS.items()}


def run_option_names() -> set[str]:
    """Names of the command's parameters that are the record's."""
    from dflash_jax.training.options import TrainOptions

    return {_NAMES.get(field.name, field.name) for field in dataclasses.fields(TrainOptions)}


def run_options(given: Mapping[str, Any], begin_with: "DrafterConfig | None") -> "TrainOptions":
    """The run that was asked for.

    Args:
        given: by parameter name; None was not given.
        begin_with: config of the drafter to go on from.

    Raises:
        ConfigError: no mask id, or an option that contradicts `begin_with`.
    """
    from dflash_jax.training.options import TrainOptions

    said = {
        _FIELDS.get(name, name): value.value if isinstance(value, enum.Enum) else value
        for name, value in given.items()
        if value is not None
    }
    if begin_with is None:
        if "mask_token_id" not in said:
            raise ConfigError(
                "no mask id: give --mask-token-id, a reserved id that text never holds"
            )
        return TrainOptions(**said)
    fields: dict[str, Any] = {"mask_token_id": begin_with.mask_token_id} | said
    asked = TrainOptions(**fields)
    held = asked.with_shape_of(begin_with)
    different = [
        f"{field.name} {getattr(asked, field.name)} is {getattr(held, field.name)} there"
        for field in dataclasses.fields(held)
        if field.name in said and getattr(asked, field.name) != getattr(held, field.name)
    ]
    if different:
        raise ConfigError(
            f"--from has a drafter of another shape: {'; '.join(different)}; leave these out"
        )
    return held


def checked(job: Job, given: dict[str, Any]) -> "tuple[TargetConfig, DrafterConfig, TrainOptions]":
    """What files and options can tell, before a backend starts."""
    from dflash_jax.config import DrafterConfig, TargetConfig
    from dflash_jax.training.checks import checked_run
    from dflash_jax.weights.hub import resolve_model

    with Bars() as bars:
        fetch_demo(job.target, bars)
    target = TargetConfig.from_folder(resolve_model(job.target))
    base = None if job.begin_with is None else DrafterConfig.from_folder(job.begin_with)
    asked = run_options(given, base)
    # The run trains the whole vocabulary of a drafter that has a reduced one (`train`).
    whole = None if base is None else dataclasses.replace(base, draft_vocab_size=None)
    drafter, asked = checked_run(target, asked, begin_with=whole, devices=job.devices)
    return target, drafter, asked


def planned(
    job: Job, target: "TargetConfig", drafter: "DrafterConfig", asked: "TrainOptions"
) -> dict[str, Any]:
    """The document of a dry run."""
    from dflash_jax.training.plan import plan_training

    longest = job.corpus.max_prompt_tokens + job.corpus.max_answer_tokens
    texts = prompt_lines(job.prompts) + job.made_up.made_up
    plan = plan_training(
        target, drafter, asked, documents=texts, longest=longest, devices=job.devices
    )
    return plan_document(plan, asked.compute_dtype)


def train(job: Job, asked: "TrainOptions") -> "Trained":
    """Trains; the engine that answers starts when it is needed."""
    from dflash_jax import load_drafter
    from dflash_jax.cli.answers import Answers
    from dflash_jax.serving.loading import read_tokenizer
    from dflash_jax.training.run import train_drafter
    from dflash_jax.weights.hub import resolve_model
    from dflash_jax.weights.vocabulary import with_whole_vocabulary

    folder = resolve_model(job.target)
    tokenizer = read_tokenizer(folder)
    mesh = _mesh(job.devices)
    base = None
    if job.begin_with is not None:
        base = with_whole_vocabulary(load_drafter(job.begin_with, dtype="float32"))
    with Bars() as bars:
        return train_drafter(
            folder,
            job.prompts,
            job.drafter,
            asked,
            engine=Answers(tokenizer, lambda: _answering(job, bars)),
            work_folder=job.work,
            prompts=job.made_up,
            corpus=job.corpus,
            begin_with=base,
            layout=job.layout,
            target_name="" if Path(job.target).is_dir() else job.target,
            mesh=mesh,
            tensorboard=job.tensorboard,
            progress=bars,
        )


def _answering(job: Job, bars: Bars) -> "LLM":
    """The engine that makes up prompts and answers them."""
    corpus = job.corpus
    longest = max(corpus.max_answer_tokens, corpus.max_prompt_tokens if job.made_up.made_up else 0)
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
