"""DFlash speculative decoding for JAX/XLA: the public names, nothing else."""

from dflash_jax.config import DrafterConfig, ResolvedConfig, ServeConfig, TargetConfig
from dflash_jax.decoding.draft import Drafter, Proposal
from dflash_jax.errors import (
    CheckpointError,
    ConfigError,
    DFlashError,
    DownloadError,
    EngineError,
    MemoryPlanError,
    RequestError,
)
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.serving.llm import LLM
from dflash_jax.serving.request import Completion, DecodeStats, SamplingParams
from dflash_jax.weights.load import load_drafter, load_target

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DFlashDrafter",
    "DFlashError",
    "DecodeStats",
    "DownloadError",
    "Drafter",
    "DrafterConfig",
    "EngineError",
    "MemoryPlanError",
    "Proposal",
    "RequestError",
    "ResolvedConfig",
    "SamplingParams",
    "ServeConfig",
    "Target",
    "TargetConfig",
    "load_drafter",
    "load_target",
]
