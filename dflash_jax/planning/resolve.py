"""`ServeConfig` -> `ResolvedConfig`: every number decided, or refused with the whole list at once.

Reads records only: no file, no device. `resolve` decides all that does not depend on the machine,
so that a refusal comes before JAX starts a backend; `on_platform` adds what does. The rules
themselves stand in `rules.py`.
"""

import dataclasses
import logging

from dflash_jax.config import DrafterConfig, ResolvedConfig, ServeConfig, TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.planning import rules

logger = logging.getLogger(__name__)

DEFAULT_SERVED_LENGTH = 4096
DEFAULT_NUM_TOKENS = 8192
DEFAULT_BATCH_SIZE = 16
CPU_READ_PIECE = 256


def resolve(
    config: ServeConfig,
    target: TargetConfig,
    drafter: DrafterConfig | None,
) -> ResolvedConfig:
    """Decides every option that the user left open, the dtype excepted (see `on_platform`).

    Raises:
        ConfigError: what the options, the target and the drafter do not allow, all at once.
    """
    findings = rules.bad_numbers(config) + rules.not_built(config)
    speculation = _speculation(config, drafter, findings)
    if config.rope_scaling is not None:
        target = target.with_rope_scaling(config.rope_scaling)
    if findings:
        _refuse(findings)
    active = drafter if speculation == "dflash" else None
    draft_len = _draft_len(config, active, findings)
    if active is not None:
        findings += rules.wrong_pair(target, active) + rules.wrong_vocabulary(target, active)
    served = _served_length(config, target, findings)
    num_tokens = config.max_num_tokens or DEFAULT_NUM_TOKENS
    batch = _batch_size(config, draft_len, num_tokens, findings)
    if findings:
        _refuse(findings)
    return ResolvedConfig(
        target=target,
        drafter=active,
        speculation=speculation,
        max_seq_len=served,
        max_batch_size=batch,
        max_num_tokens=num_tokens,
        max_draft_len=draft_len,
        block_width=active.block_width(draft_len) if active is not None else 0,
        dtype=config.dtype,
        attention="xla",
        draft_attention="xla",
        read_piece=None,
        mesh=config.mesh,
    )


def _refuse(findings: list[str]) -> None:
    raise ConfigError("\n".join(findings))


def _speculation(config: ServeConfig, drafter: DrafterConfig | None, findings: list[str]):
    wanted = config.speculation or ("dflash" if drafter is not None else "none")
    if wanted == "dflash" and drafter is None:
        findings.append("speculation='dflash' needs a drafter: give drafter=… or leave it unset")
    return wanted


def _draft_len(config: ServeConfig, drafter: DrafterConfig | None, findings: list[str]) -> int:
    if drafter is None:
        if config.max_draft_len is not None:
            findings.append(
                f"max_draft_len={config.max_draft_len} without a drafter: give drafter=… or leave "
                "it unset"
            )
        return 0
    wanted = config.max_draft_len or drafter.trained_draft_len
    if finding := rules.draft_len_above_trained(wanted, drafter):
        findings.append(finding)
    if wanted < drafter.trained_draft_len:
        logger.warning(
            "max_draft_len=%d is narrower than the drafter was trained for, which lowers "
            "acceptance: max_draft_len=%d is the trained width",
            wanted,
            drafter.trained_draft_len,
        )
    return wanted


def _served_length(config: ServeConfig, target: TargetConfig, findings: list[str]) -> int:
    if config.max_seq_len is None:
        served = min(target.max_position_embeddings, DEFAULT_SERVED_LENGTH)
        logger.info("max_seq_len is not set: serving %d positions", served)
        return served
    if finding := rules.beyond_positions(config.max_seq_len, target):
        findings.append(finding)
    return config.max_seq_len


def _batch_size(config: ServeConfig, draft_len: int, num_tokens: int, findings: list[str]) -> int:
    if config.max_batch_size is not None:
        if finding := rules.token_budget(config.max_batch_size, draft_len, num_tokens):
            findings.append(finding)
        return config.max_batch_size
    batch = min(DEFAULT_BATCH_SIZE, num_tokens // (1 + draft_len))
    if batch < 1:
        findings.append(rules.token_budget(1, draft_len, num_tokens) or "")
    if batch < DEFAULT_BATCH_SIZE:
        logger.warning(
            "clamping max_batch_size to %d: max_num_tokens=%d holds no more rows of 1 + %d tokens",
            batch,
            num_tokens,
            draft_len,
        )
    return batch


def on_platform(config: ResolvedConfig, serve: ServeConfig, platform: str) -> ResolvedConfig:
    """Adds what the platform decides: the dtype and how attention reads the arena.

    Args:
        platform: "cpu", "gpu", …
    """
    cpu = platform == "cpu"
    wanted = serve.dtype
    return dataclasses.replace(
        config,
        dtype=("float32" if cpu else "bfloat16") if wanted == "auto" else wanted,
        # On a GPU the loop's trip count would be read back by the host at every layer.
        read_piece=CPU_READ_PIECE if cpu else None,
    )
