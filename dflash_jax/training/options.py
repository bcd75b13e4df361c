"""What a training run was asked for, in one frozen record, and the drafter's shape that follows.

The record is stored with every checkpoint: a resume with other options is refused with the
difference. Nothing here touches an array.
"""

import dataclasses
from typing import Literal

from dflash_jax.config import DrafterConfig, TargetConfig, layer_ids_by_rule
from dflash_jax.errors import ConfigError, DFlashError


class TrainingError(DFlashError, RuntimeError):
    """Training cannot go on; the message names the step and the batch."""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """One training run.

    Attributes:
        mask_token_id: id of the masked slots; one that never occurs in text. A checkpoint names
            it, so it is asked for and never guessed.
        num_layers, num_taps, block_size, intermediate_size: the drafter (None: the target's MLP).
        init: "target" starts the layers from the target's last ones, "random" from noise.
        steps: optimiser steps of the whole run.
        documents_per_step, anchors_per_document: blocks of a step (a document with fewer eligible
            anchors gives fewer).
        anchor_chunk: blocks of a row that are computed at a time, so that attention masks stay
            small, at the price of a second forward pass in the backward one; 0: all at once.
        pack: documents that share a row of context, each seen by its own blocks only.
        sliding_window: the drafter's layers see this many positions back; None: all.
        features: "cached" on disk once, or "computed" anew for every step.
        optimizer: "adamw", or "muon" for matrices with AdamW for the rest.
        learning_rate: peak, after a linear warm-up over `warmup` of the steps.
        schedule: "cosine" to 0 over the rest, or "wsd": stable at the peak, then linear to 0 over
            the last `decay_share` of the steps.
        accumulate: parts that the documents of a step are computed in, one after the other; the
            step is the same, its activations take as many times less memory.
        compute_dtype: of the forward and backward pass; parameters, their gradient's sum and
            moments are float32.
        gamma: decay of the slot weights, in slots.
        loss: cross-entropy of the labels under "decayed" or "dpace" weights of the slots; "distill"
            and "distill_dpace": mixed with the divergence from the target's distribution.
        distill_weight: share of the distilling part in that mix, 0 to 1.
        overlap_weight: share of -log(overlap with the target's distribution) in the distilling
            part, the divergence is the rest; 0 to 1. For drafts at temperature 1.
        keep_final: keep the final hidden states with the features, also without a distilling loss.
        narrow_until, narrow_width: blocks have `narrow_width` slots before this share of the steps.
        frequent, extra: candidate ids of the head's product (`head.py`); 0 frequent: all rows.
        full_head_from: share of the steps after which every row of the head is used.
        draft_vocab: the drafter proposes so many ids alone, those that the answers trained on use
            most, and learns and is measured so; None: all.
        held_out: share of the documents, chosen by a hash of their ids, never trained on.
        evaluate_every, save_every: steps. A better held-out figure is saved at once.
        patience: stop after so many evaluations in a row without a better one; 0: never.
        accept_every: steps between measurements by the decoding round itself; 0: never.
        accept_prompts, accept_tokens: held-out prompts of it, and the longest answer.
        seed: of everything random.
    """

    mask_token_id: int
    num_layers: int = 3
    num_taps: int = 5
    block_size: int = 8
    intermediate_size: int | None = None
    init: Literal["target", "random"] = "target"
    steps: int = 2000
    documents_per_step: int = 8
    anchors_per_document: int = 32
    features: Literal["cached", "computed"] = "cached"
    anchor_chunk: int = 0
    pack: int = 1
    sliding_window: int | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_share: float = 0.2
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    accumulate: int = 1
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    gamma: float = 4.0
    loss: Literal["decayed", "dpace", "distill", "distill_dpace"] = "decayed"
    distill_weight: float = 0.5
    overlap_weight: float = 0.0
    keep_final: bool = False
    narrow_until: float = 0.0
    narrow_width: int = 4
    frequent: int = 6144
    extra: int = 2048
    full_head_from: float = 0.9
    draft_vocab: int | None = None
    held_out: float = 0.03
    evaluate_every: int = 200
    save_every: int = 200
    patience: int = 0
    accept_every: int = 400
    accept_prompts: int = 8
    accept_tokens: int = 64
    seed: int = 0

    def width_at(self, step: int) -> int:
        """Slots of a block at a step."""
        narrow = step < self.narrow_until * self.steps
        return min(self.narrow_width, self.block_size) if narrow else self.block_size

    @property
    def distils(self) -> bool:
        """Whether the loss compares with the target's distribution."""
        return self.loss.startswith("distill")

    @property
    def keeps_final(self) -> bool:
        """Whether features come with the target's final hidden states."""
        return self.keep_final or self.distils

    @property
    def weighs_by_run(self) -> bool:
        """Whether slots have D-PACE weights."""
        return self.loss.endswith("dpace")

    def full_head_at(self, step: int) -> bool:
        """Whether a step uses every row of the head."""
        return self.frequent == 0 or step >= self.full_head_from * self.steps

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up, at least one."""
        return max(int(self.warmup * self.steps), 1)

    @property
    def decay_steps(self) -> int:
        """Steps of the decay of schedule "wsd", at least one."""
        return max(int(self.decay_share * self.steps), 1)

    def is_stable_at(self, step: int) -> bool:
        """Whether a step lies between warm-up and decay of schedule "wsd"."""
        stable = self.warmup_steps <= step <= self.steps - self.decay_steps
        return self.schedule == "wsd" and stable

    def with_shape_of(self, config: DrafterConfig) -> "TrainOptions":
        """The same run for a drafter that is there already: its shape is the config's."""
        return dataclasses.replace(
            self,
            mask_token_id=config.mask_token_id,
            num_layers=config.num_hidden_layers,
            num_taps=len(config.target_layer_ids),
            block_size=config.block_size,
            intermediate_size=config.intermediate_size,
            sliding_window=config.windows[0] if len(set(config.windows)) == 1 else None,
        )


def drafter_config(target: TargetConfig, options: TrainOptions) -> DrafterConfig:
    """The drafter that `options` describe for a target: its widths, heads, rotary and positions.

    Raises:
        ConfigError: a mask id outside the vocabulary, more layers to start from than the target
            has, a block without a slot to predict, a window shorter than a block, or too shallow a
            target for the taps.
    """
    layers = options.num_layers
    if not 0 <= options.mask_token_id < target.vocab_size:
        raise ConfigError(
            f"mask_token_id {options.mask_token_id} is outside the vocabulary of "
            f"{target.vocab_size}: give a reserved id that text never holds"
        )
    if options.block_size < 2:
        raise ConfigError(f"block_size {options.block_size}: at least 2, the anchor and one draft")
    if options.sliding_window is not None and options.sliding_window < options.block_size:
        raise ConfigError(
            f"sliding_window {options.sliding_window} is shorter than a block of "
            f"{options.block_size}: give at least that"
        )
    if layers > target.num_hidden_layers:
        raise ConfigError(
            f"num_layers {layers} is more than the target's {target.num_hidden_layers}"
        )
    taps = layer_ids_by_rule(target.num_hidden_layers, options.num_taps)
    if len(set(taps)) != len(taps) or min(taps) < 0:
        raise ConfigError(
            f"num_taps {options.num_taps} gives the layer ids {list(taps)} for a target of "
            f"{target.num_hidden_layers} layers: use fewer taps"
        )
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope=target.rope,
        windows=(options.sliding_window,) * layers,
        # Published drafters with windows are causal inside a block in the layers that slide.
        causal=(options.sliding_window is not None,) * layers,
        attention_bias=False,
        block_size=options.block_size,
        target_layer_ids=taps,
        mask_token_id=options.mask_token_id,
        num_target_layers=target.num_hidden_layers,
        target_hidden_size=target.hidden_size,
        predicts_from_anchor=False,
    )
