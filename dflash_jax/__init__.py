"""DFlash speculative decoding for JAX/XLA: the public names, nothing else.

A name is imported when it is first used: the command line prints its help without JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dflash_jax.version import VERSION

if TYPE_CHECKING:
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
    from dflash_jax.planning.plan import MemoryPlan
    from dflash_jax.serving.llm import LLM
    from dflash_jax.serving.planner import plan_memory
    from dflash_jax.serving.request import Completion, DecodeStats, SamplingParams
    from dflash_jax.weights.load import load_drafter, load_target

__version__ = VERSION

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
    "MemoryPlan",
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
    "plan_memory",
]

_MODULES = {
    "config": ("DrafterConfig", "ResolvedConfig", "ServeConfig", "TargetConfig"),
    "decoding.draft": ("Drafter", "Proposal"),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "models": ("DFlashDrafter", "Target"),
    "planning.plan": ("MemoryPlan",),
    "serving.llm": ("LLM",),
    "serving.planner": ("plan_memory",),
    "serving.request": ("Completion", "DecodeStats", "SamplingParams"),
    "weights.load": ("load_drafter", "load_target"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # asked for once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
