"""From names of models to a memory plan: reads configs and headers, asks devices, decides.

Shared by `plan_memory` and by `LLM`, so that what is planned is what is started. Gate (i): options,
configs and file headers, before JAX starts a backend; gate (ii): the device's memory, before
anything is compiled or loaded. Gate (iii), the compiled programs' memory, is `llm.py`'s step.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dflash_jax.config import DrafterConfig, ResolvedConfig, ServeConfig, TargetConfig
from dflash_jax.errors import ConfigError, MemoryPlanError
from dflash_jax.planning.account import Inputs
from dflash_jax.planning.budget import allocation_order
from dflash_jax.planning.device import (
    DeviceMemory,
    card_memory,
    devices_memory,
    given_memory,
)
from dflash_jax.planning.footprint import Weights, dtype_bytes
from dflash_jax.planning.options import serve_config
from dflash_jax.planning.plan import MemoryPlan, findings, fit_batch, make_plan
from dflash_jax.planning.resolve import on_platform, refuse_before_files, resolve
from dflash_jax.planning.rules import not_built
from dflash_jax.weights.hub import is_remote, resolve_model
from dflash_jax.weights.names import MESH_AXES
from dflash_jax.weights.sizes import weight_bytes

logger = logging.getLogger(__name__)

# What a plan is for when no device is asked.
PLANNED_PLATFORM = "gpu"


class Pair(NamedTuple):
    """Folders and configs of a target and, maybe, its drafter."""

    target: Path
    drafter: Path | None
    target_config: TargetConfig
    drafter_config: DrafterConfig | None


def plan_memory(
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    card: int | str | None = None,
    mem_fraction: float | None = None,
    shards: int = 1,
    **options: Any,
) -> MemoryPlan:
    """Plans the memory of a configuration; nothing is loaded, compiled or allocated.

    Works for folders with only config files. With `device_memory` or `card` no backend starts and
    the plan is for a GPU (dtype "auto" counts as bfloat16).

    Args:
        target, drafter: as `LLM` takes them.
        card: the memory of a whole card, "80GiB"; in place of `device_memory`.
        mem_fraction: the share of the card that XLA may allocate.
        shards: devices to divide the model over, where no mesh is given.
        **options: fields of `ServeConfig`.

    Returns:
        The plan, also when its verdict is "refused".

    Raises:
        ConfigError: the options, the target and the drafter do not go together.
        MemoryPlanError: no `device_memory`, and the device does not say.
    """
    serve = serve_config(options)
    if card is not None and serve.device_memory is not None:
        raise ConfigError("device_memory and card are two ways to say one thing: give one")
    pair = read_pair(target, drafter, serve, engine=False)
    platform = PLANNED_PLATFORM
    if card is not None:
        memory = card_memory(card, mem_fraction)
    elif serve.device_memory is not None:
        memory = given_memory(serve.device_memory)
    else:
        devices = used_devices(serve)
        platform, memory = devices[0].platform, devices_memory(devices)
    count = shards if serve.mesh is None else shard_count(serve.mesh)
    plan = _planned(pair, serve, platform, memory, count, host_memory=platform == "cpu")
    unbuilt = not_built(serve)
    return plan.with_warnings(unbuilt) if unbuilt else plan


def read_pair(
    target: str | Path, drafter: str | Path | None, serve: ServeConfig, *, engine: bool = True
) -> Pair:
    """Finds both models and reads their configs; a hub id is fetched here.

    What options alone can say is said before a download; the rest is `resolve`'s, once, whether
    the models were here or came from the hub.

    Raises:
        ConfigError, CheckpointError, DownloadError: as `LLM`.
    """
    if is_remote(target) or (drafter is not None and is_remote(drafter)):
        refuse_before_files(serve, engine=engine)
    target_folder = resolve_model(target, kind="target")
    drafter_folder = None if drafter is None else resolve_model(drafter, kind="drafter")
    return Pair(
        target_folder,
        drafter_folder,
        TargetConfig.from_folder(target_folder),
        None if drafter_folder is None else DrafterConfig.from_folder(drafter_folder),
    )


def resolve_pair(pair: Pair, serve: ServeConfig) -> ResolvedConfig:
    """Gate (i) of an engine: all that files and options can tell, a given memory included.

    Raises:
        ConfigError, MemoryPlanError: every finding at once.
    """
    if serve.device_memory is None:
        return resolve(serve, pair.target_config, pair.drafter_config)
    memory = given_memory(serve.device_memory)
    count = 1 if serve.mesh is None else shard_count(serve.mesh)

    def beyond(config: ResolvedConfig) -> str | None:
        # The platform is not known yet: "auto" counts as bfloat16, the smaller of the two.
        plan = _quiet_plan(pair, serve, config, memory, count)
        return "\n".join(findings(plan)) or None

    return resolve(serve, pair.target_config, pair.drafter_config, fit=beyond)


def engine_plan(pair: Pair, serve: ServeConfig, config: ResolvedConfig) -> MemoryPlan:
    """Gate (ii) of an engine: the plan against the memory of the devices it will use.

    Raises:
        MemoryPlanError: a device does not say how much memory it has.
    """
    count = 1 if serve.mesh is None else shard_count(serve.mesh)
    cpu = used_devices(serve)[0].platform == "cpu"
    inputs = _inputs(pair, serve, config, memory_now(serve), count, host_memory=cpu)
    plan = fit_batch(config, inputs)
    if plan.pool is not None and cpu and serve.kv_max_tokens is serve.kv_max_bytes is None:
        logger.info(
            "the pool is in the host's memory and takes %d pages, at most what %d rows of %d "
            "tokens fill: set kv_max_bytes or kv_max_tokens for another size",
            plan.pool.pages,
            plan.config.max_batch_size,
            plan.config.max_seq_len,
        )
    return plan


def memory_now(serve: ServeConfig) -> DeviceMemory:
    """What the user gave, or what the devices say."""
    if serve.device_memory is not None:
        return given_memory(serve.device_memory)
    return devices_memory(used_devices(serve))


def used_devices(serve: ServeConfig) -> Sequence[Any]:
    """The mesh's devices, or the default one."""
    return jax.devices()[:1] if serve.mesh is None else list(serve.mesh.devices.flat)


def shard_count(mesh: Any) -> int:
    """Devices on the axis that divides heads."""
    return dict(mesh.shape).get(MESH_AXES["k"], 1)


def _planned(
    pair: Pair,
    serve: ServeConfig,
    platform: str,
    memory: DeviceMemory,
    shards: int,
    *,
    host_memory: bool,
) -> MemoryPlan:
    """The plan; refused by memory alone it is returned, by a rule it is raised."""
    plans: list[MemoryPlan] = []

    def beyond(config: ResolvedConfig) -> str | None:
        config = on_platform(config, serve, platform)
        inputs = _inputs(pair, serve, config, memory, shards, host_memory=host_memory)
        plans.append(fit_batch(config, inputs))
        return "\n".join(findings(plans[0])) or None

    try:
        resolve(serve, pair.target_config, pair.drafter_config, engine=False, fit=beyond)
    except MemoryPlanError:
        return plans[0]
    return plans[0]


def _quiet_plan(
    pair: Pair, serve: ServeConfig, config: ResolvedConfig, memory: DeviceMemory, shards: int
) -> MemoryPlan:
    """A plan of the smallest batch that would do, without a word about clamping."""
    if serve.max_batch_size is None:
        config = config.with_batch_size(1)
    return make_plan(config, _inputs(pair, serve, config, memory, shards))


def _inputs(
    pair: Pair,
    serve: ServeConfig,
    config: ResolvedConfig,
    memory: DeviceMemory,
    shards: int,
    *,
    host_memory: bool = False,
) -> Inputs:
    return Inputs(
        serve=serve,
        weights=_weights(pair, config, shards),
        memory=memory,
        shards=shards,
        order=allocation_order(serve.allocation_order),
        host_memory=host_memory,
    )


def _weights(pair: Pair, config: ResolvedConfig, shards: int) -> Weights:
    size = dtype_bytes(config)
    target = weight_bytes(pair.target_config, pair.target, dtype_bytes=size, shards=shards)
    if config.drafter is None or pair.drafter is None or pair.drafter.samefile(pair.target):
        return Weights(target, 0)
    drafter = weight_bytes(config.drafter, pair.drafter, dtype_bytes=size, shards=shards)
    return Weights(target, drafter)
