"""`ServeConfig` -> `ResolvedConfig`: every number decided, or refused with the whole list at once.

Reads records only: no file, no device. `before_files` says what options alone can say; `resolve`
decides all that does not depend on the machine, so that a refusal comes before JAX starts a
backend; `on_platform` adds what does. The rules themselves stand in `rules.py`; memory is
`plan.py`'s.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dflash_jax.config import DrafterConfig, ResolvedConfig, ServeConfig, TargetConfig
from dflash_jax.errors import ConfigError, MemoryPlanError
from dflash_jax.planning import rules
from dflash_jax.planning.context_rules import DEFAULT_NUM_TOKENS, clamped_batch_size
from dflash_jax.planning.qualification import Combination, admit

logger = logging.getLogger(__name__)

DEFAULT_SERVED_LENGTH = 4096
DEFAULT_BATCH_SIZE = 16
CPU_READ_PIECE = 256
# Blocks of 8 fill the narrowest tile of a tensor core, which plain decoding leaves mostly empty.
SUFFIX_DRAFT_LEN = 7

Fit = Callable[[ResolvedConfig], str | None]


class _Lengths(NamedTuple):
    draft_len: int
    served: int
    num_tokens: int
    batch: int


def before_files(config: ServeConfig, *, engine: bool = True) -> list[str]:
    """Findings of the options alone: what can be said before a hub id is fetched.

    Args:
        engine: whether it is to be served, not only planned.
    """
    findings = _malformed(config) + _unavailable(config, engine)
    batch, draft_len = config.max_batch_size, config.max_draft_len
    if findings or batch is None or draft_len is None or config.allow_token_limited:
        return findings
    finding = rules.token_budget(batch, draft_len, config.max_num_tokens or DEFAULT_NUM_TOKENS)
    return [finding] if finding else []


def refuse_before_files(config: ServeConfig, *, engine: bool = True) -> None:
    """Raises what `before_files` finds.

    Raises:
        ConfigError: with every finding.
    """
    if findings := before_files(config, engine=engine):
        raise ConfigError("\n".join(findings))


def resolve(
    config: ServeConfig,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    engine: bool = True,
    fit: Fit | None = None,
) -> ResolvedConfig:
    """Decides every option that the user left open, the dtype excepted (see `on_platform`).

    Args:
        engine: whether it is to be served, not only planned.
        fit: says why a configuration does not fit a memory that is known already, or None.

    Raises:
        ConfigError: what the options, the target and the drafter do not allow, all at once.
        MemoryPlanError: only the memory does not allow it.
    """
    malformed = _malformed(config)
    findings = malformed + _unavailable(config, engine)
    speculation = _speculation(config, drafter, findings)
    target = _with_rope(config, target, findings)
    if malformed:
        # The rules below calculate with them.
        raise ConfigError("\n".join(findings))
    active = drafter if speculation == "dflash" else None
    lengths = _lengths(config, target, active, speculation, findings)
    unqualified = _check_qualified(config, speculation, findings)
    resolved = ResolvedConfig(
        target=target,
        drafter=active,
        speculation=speculation,
        max_seq_len=lengths.served,
        max_batch_size=lengths.batch,
        max_num_tokens=lengths.num_tokens,
        max_draft_len=lengths.draft_len,
        block_width=active.block_width(lengths.draft_len) if active is not None else 0,
        dtype=config.dtype,
        kv_layout=config.kv_layout,
        context_store=config.context_store,
        page_size=config.page_size,
        num_pages=0,
        unqualified=unqualified,
        adaptive=config.adaptive,
        prefix_reuse=config.prefix_reuse,
        rounds_per_step=config.rounds_per_step,
        attention="xla" if config.attention == "auto" else config.attention,
        draft_attention="xla" if config.draft_attention == "auto" else config.draft_attention,
        read_piece=None,
        mesh=config.mesh,
    )
    # A batch of 0 rows has been found fault with already.
    beyond = fit(resolved) if fit is not None and lengths.batch else None
    if findings:
        raise ConfigError("\n".join([*findings, beyond] if beyond else findings))
    if beyond:
        raise MemoryPlanError(beyond)
    return resolved


def _malformed(config: ServeConfig) -> list[str]:
    return rules.bad_choices(config) + rules.bad_numbers(config)


def _unavailable(config: ServeConfig, engine: bool) -> list[str]:
    findings = rules.pool_options(config) + rules.host_drafts_a_round(config)
    return findings + (rules.not_built(config) if engine else [])


def _speculation(config: ServeConfig, drafter: DrafterConfig | None, findings: list[str]):
    wanted = config.speculation or ("dflash" if drafter is not None else "none")
    if wanted == "dflash" and drafter is None:
        findings.append("speculation='dflash' needs a drafter: give drafter=… or leave it unset")
    if wanted == "suffix" and drafter is not None:
        logger.info("speculation='suffix' drafts from the text itself: the drafter is not loaded")
    return wanted


def _with_rope(config: ServeConfig, target: TargetConfig, findings: list[str]) -> TargetConfig:
    scaling = config.rope_scaling
    if scaling is None:
        return target
    if not isinstance(scaling, Mapping):
        findings.append(
            f"rope_scaling={scaling!r}: a mapping such as {{'rope_type': 'yarn', 'factor': 4.0}} "
            "is needed"
        )
        return target
    try:
        return target.with_rope_scaling(scaling)
    except ConfigError as error:
        findings.append(str(error))
    except (TypeError, ValueError):
        findings.append(f"rope_scaling={scaling!r}: its numbers must be numbers")
    return target


def _lengths(
    config: ServeConfig,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    speculation: str,
    findings: list[str],
) -> _Lengths:
    if speculation == "suffix":
        draft_len = config.max_draft_len or SUFFIX_DRAFT_LEN
    else:
        draft_len = _draft_len(config, drafter, findings)
    if drafter is not None:
        findings += rules.wrong_pair(target, drafter) + rules.wrong_vocabulary(target, drafter)
    served = _served_length(config, target, findings)
    num_tokens = config.max_num_tokens or DEFAULT_NUM_TOKENS
    batch = _batch_size(config, draft_len, num_tokens, findings)
    if drafter is not None:
        width = drafter.block_width(draft_len)
        if warning := rules.drafting_ends_early(served, drafter, width):
            logger.warning("%s", warning)
    return _Lengths(draft_len, served, num_tokens, batch)


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
    if warning := rules.draft_len_below_trained(wanted, drafter):
        logger.warning("%s", warning)
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
    wanted = config.max_batch_size
    if wanted is not None:
        # Rows may take turns, but one row at least must fit a step.
        least = 1 if config.allow_token_limited else wanted
        if finding := rules.token_budget(least, draft_len, num_tokens):
            findings.append(finding)
        return wanted
    batch = clamped_batch_size(num_tokens, draft_len, DEFAULT_BATCH_SIZE)
    if finding := rules.token_budget(1, draft_len, num_tokens):
        findings.append(finding)
    elif batch < DEFAULT_BATCH_SIZE:
        logger.warning(
            "clamping max_batch_size to %d: max_num_tokens=%d holds no more rows of 1 + %d tokens",
            batch,
            num_tokens,
            draft_len,
        )
    return batch


def _check_qualified(config: ServeConfig, speculation: str, findings: list[str]) -> str | None:
    """The grounds on which a combination was admitted without being qualified; None: qualified."""
    # Attention kernels of their own exist for GPUs; xla is admitted everywhere.
    attention = "xla" if config.attention == "auto" else config.attention
    combination = Combination("gpu", attention, config.kv_layout, speculation)
    admission = admit(combination, allow_unqualified=config.allow_unqualified)
    if admission.finding:
        findings.append(admission.finding)
    if admission.warning:
        logger.warning("%s", admission.warning)
    return admission.warning


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
