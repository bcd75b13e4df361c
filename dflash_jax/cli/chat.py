"""`dflash-jax chat`: a conversation in the terminal, or over a pipe with one user turn a line.

The whole conversation goes through the chat template at every turn; what no longer fits the served
length is said and refused, never cut in silence.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_jax.cli import options, output
from dflash_jax.cli.progress import Bars
from dflash_jax.cli.start import start_llm
from dflash_jax.cli.terminal import STDERR, complain, note
from dflash_jax.errors import RequestError

if TYPE_CHECKING:
    from dflash_jax import LLM, SamplingParams


def chat(
    target: options.TargetArgument,
    drafter: options.DrafterOption = None,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message to begin with.")
    ] = None,
    max_tokens: options.MaxTokensOption = 512,
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = None,
    max_seq_len: options.MaxSeqLenOption = None,
    max_draft_len: options.MaxDraftLenOption = None,
    speculation: options.SpeculationOption = None,
    json: options.JsonOption = False,
) -> None:
    """Talk to the model; answers are streamed.

    /reset forgets the conversation; /quit, Ctrl-D, or Ctrl-C at the prompt ends it; Ctrl-C during
    an answer ends the answer. Over a pipe each line is a turn, and exit code 1 says that some were
    refused.
    """
    from dflash_jax import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    params.check()
    with Bars() as bars:
        llm = start_llm(
            target,
            drafter,
            bars,
            max_seq_len=max_seq_len,
            max_batch_size=1,
            max_draft_len=max_draft_len,
            speculation=speculation,
        )
    talk = Conversation(llm, params, system)
    talk.ids()  # a model without a chat template is refused before the first question
    refused = False
    for turn in _user_turns():
        if turn == "/reset":
            talk.reset()
            note("a new conversation")
            continue
        try:
            talk.answer(turn, output.drop_text if json else output.write_text)
        except RequestError as error:
            complain(error)
            refused = True
    if json:
        output.print_json({"target": target, "drafter": drafter, "messages": talk.messages})
    if refused and not sys.stdin.isatty():
        raise typer.Exit(1)


@dataclass
class Conversation:
    """The messages so far, and how the next turn is answered."""

    llm: "LLM"
    params: "SamplingParams"
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Only the system message stays."""
        self.messages = [] if self.system is None else [_message("system", self.system)]

    def ids(self, turn: str = "") -> list[int]:
        """The conversation with one more user turn, up to where the answer begins."""
        return self.llm.chat_ids([*self.messages, _message("user", turn)])

    def answer(self, turn: str, write: Callable[[str], None]) -> None:
        """Answers a turn and keeps both; a refused turn leaves no trace.

        Raises:
            RequestError: the conversation with this turn leaves no room for an answer.
        """
        ids, served = self.ids(turn), self.llm.config.max_seq_len
        room = served - len(ids)
        if room < 1:
            raise RequestError(
                f"the conversation has {len(ids)} tokens with this turn and no longer fits the "
                f"served length of {served}: /reset begins a new one, --max-seq-len serves more"
            )
        params = replace(self.params, max_tokens=min(self.params.max_tokens, room))
        text, reason = _stream(self.llm.stream(ids, params), write)
        write("\n")
        self.messages += [_message("user", turn), _message("assistant", text)]
        if reason == "length":
            note(_cut(params.max_tokens, room, served), style="yellow")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _cut(max_tokens: int, room: int, served: int) -> str:
    if max_tokens < room:
        return f"(cut after {max_tokens} tokens: --max-tokens allows more)"
    return (
        f"(cut: the conversation has reached the served length of {served} tokens; /reset begins "
        "a new one, --max-seq-len serves more)"
    )


def _stream(pieces: Any, write: Callable[[str], None]) -> tuple[str, str]:
    """Text and finish reason of one answer, which Ctrl-C ends early ("abort")."""
    said: list[str] = []
    with _interrupt_noted() as interrupted:
        while not interrupted():
            try:
                piece = next(pieces)
            except StopIteration as end:
                return "".join(said), end.value.finish_reason
            said.append(piece)
            write(piece)
    pieces.close()
    return "".join(said), "abort"


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted instead of raised: raised inside a round it would lose the donated arenas.

    A second one is raised all the same.
    """
    noted: list[int] = []

    def note_it(number: int, frame: Any) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note_it)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


def _user_turns() -> Iterator[str]:
    """Lines of the user until /quit, the end of input, or Ctrl-C; blank ones are passed over."""
    asks = sys.stdin.isatty()
    if asks:
        import readline  # noqa: F401  (line editing for input)

        note("/reset forgets the conversation, /quit ends it", style="dim")
    elif hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    while True:
        try:
            line = STDERR.input("> ") if asks else input()
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip() == "/quit":
            return
        if line.strip():
            yield line.strip()
