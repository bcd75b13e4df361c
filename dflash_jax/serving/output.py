"""One answer as it grows: from committed ids to the text, ids and log-probabilities of its pieces.

Plain Python on the host. Binds the three rules of an ending: end ids and limits (`stopping.py`),
stop strings (`stop_strings.py`), whole characters (`text.py`). Knows no slot and no device.
"""

import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

from dflash_jax.serving.request import FinishReason, SamplingParams, TokenLogprob
from dflash_jax.serving.stop_strings import StopStrings
from dflash_jax.serving.stopping import find_end
from dflash_jax.serving.text import TextStream, Tokenizer


class Piece(NamedTuple):
    """What became final with one push; any part may be empty.

    Attributes:
        logprobs: one for each id; None where the request did not ask for them.
        finish_reason: None: the answer goes on.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None


_Scored = tuple[int, TokenLogprob | None]


class _Token(NamedTuple):
    """A token that a stop string may still take; `start`: characters of text before its own."""

    start: int
    token_id: int
    logprob: TokenLogprob | None


class Output:
    """One choice's answer; the pieces joined are its text, ids and log-probabilities.

    How the ids are split into pushes changes nothing: they are looked at one by one.

    With stop strings the answer ends before the first of them. A token belongs to it when its text
    begins before that cut, so of a token across the cut the id stays and the text is cut inside.
    A token that shows nothing (bytes of an unfinished character, a special) stands where the next
    text begins: bytes go with their character. Worked example, one byte a token, stop "ab":

        bytes    x   c3  a9  a   b   y      text "xé", ids x c3 a9; the other three are cut

    Text that may be the beginning of a stop string is held back with its tokens until it is
    decided, and handed out when the answer ends otherwise. Where `min_tokens` ids are asked for, a
    stop string counts when it ends behind them and at least as many ids are left without it.

    Attributes:
        token_ids, text, logprobs: what was handed out; `logprobs` is None where not asked for.
        finish_reason: None: it goes on. Neither `push` nor `abort` is called after the end.
        num_cut: tokens inside the limit that a stop string took away again.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, ends: Collection[int]):
        """Without a tokenizer the text is empty and there are no stop strings.

        `ends` are the ids that end the answer (`stopping.end_ids`).
        """
        self._params, self._ends = params, ends
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        has_stops = tokenizer is not None and len(params.stop) > 0
        self._stops = StopStrings(params.stop) if has_stops else None
        self._earliest = sys.maxsize if params.min_tokens else 0  # no stop string counts yet
        self._pending: list[_Token] = []
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.num_cut = 0

    @property
    def pending(self) -> int:
        """Tokens held back."""
        return len(self._pending)

    @property
    def num_generated(self) -> int:
        """Tokens handed out and held back."""
        return len(self.token_ids) + self.pending

    def push(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> Piece:
        """Takes in committed ids; what lies behind the end of the answer is left out.

        Args:
            logprobs: one for each id where the request asks for them.
        """
        params, before = self._params, self.num_generated
        kept, reason = find_end(ids, before, params.max_tokens, self._ends, params.min_tokens)
        scores = [None] * len(ids) if self.logprobs is None else logprobs or ()
        new = list(zip(ids, scores, strict=True))[:kept]
        text = self._take(new) if self._stops is None else self._look_at(new, self._stops)
        if reason is not None and not self._stopped:
            text += self._rest()
        return self._hand_out(text, "stop" if self._stopped else reason, before + kept)

    def abort(self) -> Piece:
        """Ends the answer where it is and hands out what was held back."""
        return self._hand_out(self._rest(), "abort", self.num_generated)

    @property
    def _stopped(self) -> bool:
        return self._stops is not None and self._stops.found

    def _take(self, new: Sequence[_Scored]) -> str:
        """The text of new tokens where no stop string can take them away again."""
        self._pending += [_Token(0, *token) for token in new]
        return self._decode([token_id for token_id, _ in new])

    def _look_at(self, new: Sequence[_Scored], stops: StopStrings) -> str:
        """The text that is decided with new tokens, up to the first stop string."""
        text = ""
        for token_id, logprob in new:
            start = stops.seen
            self._pending.append(_Token(start, token_id, logprob))
            text += stops.push(self._decode([token_id]), self._earliest)
            if stops.found:
                break
            if self.num_generated == self._params.min_tokens:
                self._earliest = start + 1  # a cut behind `start` leaves this token
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return "" if self._stream is None else self._stream.push(ids)

    def _rest(self) -> str:
        """What was held back, now that nothing follows; a stop string may still end in it."""
        text = "" if self._stream is None else self._stream.finish()
        if self._stops is None:
            return text
        text = self._stops.push(text, self._earliest)
        return text if self._stops.found else text + self._stops.finish()

    def _hand_out(self, text: str, reason: FinishReason | None, generated: int) -> Piece:
        """Makes `text` and the tokens that go with it final; `generated`: ids inside the limit."""
        final = self._settle(ended=reason is not None)
        token_ids = [token.token_id for token in final]
        self.token_ids += token_ids
        self.text += text
        logprobs = None
        if self.logprobs is not None:
            logprobs = [token.logprob for token in final if token.logprob is not None]
            self.logprobs += logprobs
        if reason is not None:
            self.num_cut = generated - len(self.token_ids)
        self.finish_reason = reason
        return Piece(text, token_ids, logprobs, reason)

    def _settle(self, *, ended: bool) -> list[_Token]:
        """The pending tokens that belong to the answer for certain; at its end no other stays."""
        count = self.pending
        if self._stops is not None and (self._stopped or not ended):
            count = sum(token.start < self._stops.decided for token in self._pending)
        final = self._pending[:count]
        self._pending = [] if ended else self._pending[count:]
        return final
