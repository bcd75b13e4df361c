"""The steps of a start that read a pair's files: checks, compiled programs, loaded models.

`planner.py` has found the folders and made the plan; `llm.py` decides in which order these steps
are taken and what is refused between them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from dflash_jax.config import ResolvedConfig
from dflash_jax.errors import ConfigError
from dflash_jax.progress import Progress
from dflash_jax.serving.engine import compile_engine
from dflash_jax.serving.planner import Pair
from dflash_jax.serving.text import Tokenizer
from dflash_jax.weights.load import check_files, load_drafter, load_target, unloaded
from dflash_jax.weights.vocabulary import for_target


def check_weights(pair: Pair, config: ResolvedConfig) -> None:
    """Whether the weights to be loaded fit their configs; starts no backend."""
    check_files(pair.target, "target")
    if config.drafter is not None and pair.drafter is not None:
        check_files(pair.drafter, "drafter", vocab_size=config.target.vocab_size)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None


def check_tokenizers(target: Tokenizer | None, drafter: Path | None) -> None:
    """A drafter that brings a tokenizer must number tokens as the target does."""
    own = None if drafter is None else read_tokenizer(drafter)
    if target is None or own is None:
        return
    first = target.same_ids(own)
    if first is not None:
        raise ConfigError(
            f"the drafter's tokenizer gives id {first} to {own.token(first)!r} and the target's to "
            f"{target.token(first)!r}: choose the drafter of this target"
        )


def compile_pair(
    config: ResolvedConfig, pair: Pair, progress: Progress | None
) -> Mapping[str, jax.stages.Compiled]:
    """Every program, from shapes alone: nothing is loaded and no arena exists yet."""
    model = unloaded(pair.target, "target", dtype=config.dtype, mesh=config.mesh)
    model.config = config.target
    method = None
    if config.drafter is not None and pair.drafter is not None:
        method = unloaded(pair.drafter, "drafter", dtype=config.dtype, mesh=config.mesh)
        method = for_target(method, model)
    return compile_engine(config, model, method, progress)


def load_pair(config: ResolvedConfig, pair: Pair, progress: Progress | None) -> tuple[Any, Any]:
    total = 2 if config.drafter is not None else 1
    if progress is not None:
        progress("load", 0, total)
    model = load_target(pair.target, dtype=config.dtype, mesh=config.mesh)
    # The config decides (rope override, served positions), the folder only brought the weights.
    model.config = config.target
    if progress is not None:
        progress("load", 1, total)
    if config.drafter is None or pair.drafter is None:
        return model, None
    method = load_drafter(pair.drafter, dtype=config.dtype, mesh=config.mesh)
    method = for_target(method, model)
    if progress is not None:
        progress("load", 2, total)
    return model, method
