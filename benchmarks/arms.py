"""The contestants of `decode.py`: this engine, plain or drafted, and `transformers` on torch.

Every arm answers one prompt greedily and says how long it decoded: the pass over the prompt and the
first step or round after it are not in the time, nor is loading, compiling and warming up.
"""

import dataclasses
import inspect
import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from dflash_jax import SamplingParams
from dflash_jax.config import DrafterConfig, ServeConfig, TargetConfig
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.planning.resolve import on_platform, resolve
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.output import Output
from dflash_jax.serving.row import Row
from dflash_jax.serving.stopping import find_end

# Narrower than trained is what is measured here.
logging.getLogger("dflash_jax.planning.resolve").setLevel(logging.ERROR)


class Answer(NamedTuple):
    """One prompt, decoded once.

    Attributes:
        timed_tokens, timed_rounds: what `seconds` covers.
        acceptance_lengths: of all rounds, the untimed first included; empty for torch.
    """

    token_ids: list[int]
    seconds: float
    timed_tokens: int
    timed_rounds: int
    acceptance_lengths: list[int]


class Arm(Protocol):
    """One contestant."""

    name: str

    def answer(self, prompt: list[int], max_tokens: int) -> Answer: ...


@dataclasses.dataclass
class Pair:
    """What all arms of this engine share: one copy of the weights, and the ids that end."""

    target: Target
    drafter: DFlashDrafter | None
    target_folder: Path
    drafter_folder: Path | None
    ends: Collection[int]


class EngineArm:
    """This engine behind its own queue, as `LLM.generate` runs it; K = 0 is plain decoding."""

    def __init__(self, pair: Pair, draft_len: int, max_seq_len: int, *, suffix: bool = False):
        method = "suffix" if suffix else "DFlash"
        self.name = f"{method} K={draft_len}" if draft_len else "plain"
        self.draft_len = draft_len
        serve = ServeConfig(
            max_seq_len=max_seq_len,
            max_batch_size=1,
            max_draft_len=draft_len or None,
            speculation="suffix" if suffix else None,
        )
        folder = pair.drafter_folder if draft_len and not suffix else None
        drafter = None if folder is None else DrafterConfig.from_folder(folder)
        resolved = resolve(serve, TargetConfig.from_folder(pair.target_folder), drafter)
        self.config = on_platform(resolved, serve, jax.default_backend())
        model = pair.drafter if folder is not None else None
        self.engine = Engine(self.config, pair.target, model)
        self._batch = Batch(self.engine)
        self._ends = pair.ends

    def answer(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        seeded: bool = False,
    ) -> Answer:
        """With a temperature the draws are those of `seed`, which the request names if `seeded`."""
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed if seeded else None
        )
        ends = frozenset(self._ends)
        output = Output(None, params, ends)
        row = Row(0, prompt=prompt, params=params, seed=seed, ends=ends, output=output)
        self._batch.submit(row)
        while not row.stats.num_rounds and row.finish_reason is None:
            self._batch.step()
        before, rounds = len(row.token_ids), row.stats.num_rounds
        begun = time.perf_counter()
        while row.finish_reason is None:
            self._batch.step()
        seconds = time.perf_counter() - begun
        return Answer(
            row.token_ids,
            seconds,
            len(row.token_ids) - before,
            row.stats.num_rounds - rounds,
            row.stats.acceptance_lengths,
        )


class TorchArm:
    """`transformers` in float32 with its cache: forward and argmax in a bare loop.

    The loop leaves out what `generate` adds around every token, so it is the faster of the two.
    """

    name = "transformers, bare loop"

    def __init__(self, model: Any, ends: Collection[int]):
        self.model, self._ends = model, ends

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        import torch

        with torch.inference_mode():
            step = self._steps(torch.tensor([prompt]))
            ids = [step(), step()]
            reason = find_end(ids, 0, max_tokens, self._ends)
            begun, before = time.perf_counter(), len(ids)
            while reason.reason is None:
                ids.append(step())
                reason = find_end(ids[-1:], len(ids) - 1, max_tokens, self._ends)
            seconds = time.perf_counter() - begun
        kept = min(len(ids), max_tokens) if len(ids) > before else reason.kept
        return Answer(ids[:kept], seconds, len(ids) - before, len(ids) - before, [])

    def _steps(self, ids: Any) -> Callable[[], int]:
        state: dict[str, Any] = {"ids": ids, "cache": None}
        known = inspect.signature(self.model.forward).parameters
        argument = "cache" if "cache" in known else "past_key_values"  # renamed in 5.x

        def step() -> int:
            out = self.model(
                input_ids=state["ids"],
                use_cache=True,
                logits_to_keep=1,
                **{argument: state["cache"]},
            )
            chosen = out.logits[:, -1].argmax(-1, keepdim=True)
            state.update(ids=chosen, cache=out.past_key_values)
            return int(chosen)

        return step


class GenerateArm:
    """`transformers` through `model.generate`, timed from the second new token to the last."""

    name = "transformers, generate"

    def __init__(self, model: Any, ends: Collection[int]):
        self.model, self._ends = model, sorted(ends)

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        import torch

        clock = _Clock()
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                use_cache=True,
                eos_token_id=self._ends or None,
                pad_token_id=self._ends[0] if self._ends else 0,
                streamer=clock,
            )
        ids = out[0, len(prompt) :].tolist()
        steps = max(len(ids) - 2, 0)
        return Answer(ids, clock.since_second_token(), steps, steps, [])


class _Clock:
    """A `generate` streamer that notes when each token came; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def since_second_token(self) -> float:
        return self.times[-1] - self.times[2] if len(self.times) > 3 else 0.0


def torch_arms(folder: Path, ends: Collection[int]) -> Sequence[Arm]:
    """Both ways of decoding with `transformers`, over one copy of the model."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return (TorchArm(model, ends), GenerateArm(model, ends))
