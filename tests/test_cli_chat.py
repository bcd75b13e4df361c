"""`chat` over a pipe: turns, history, what ends it, what no longer fits, Ctrl-C."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import dflash_jax as dj
import tiny_engine
from command_line import Ran, run
from dflash_jax.cli.chat import Conversation
from tiny_text import write_text_drafter, write_text_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_target(tmp_path_factory.mktemp("chat") / "target")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_drafter(tmp_path_factory.mktemp("chat") / "drafter")


@pytest.fixture(scope="module")
def llm(target: Path) -> dj.LLM:
    return tiny_engine.start(target, None, max_seq_len=128, max_batch_size=1)


def talk(target: Path, stdin: str, *words: object) -> Ran:
    return run("chat", target, "--max-seq-len", 128, "--max-tokens", 8, *words, stdin=stdin)


def answers(llm: dj.LLM, *turns: str) -> list[str]:
    """The answers to a conversation by `LLM.chat` itself."""
    messages, given = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        (one,) = llm.chat(messages, dj.SamplingParams(max_tokens=8))
        messages.append({"role": "assistant", "content": one.text})
        given.append(one.text)
    return given


def test_each_line_is_a_turn_and_the_history_is_kept(target: Path, drafter: Path, llm: dj.LLM):
    ran = talk(target, "hi\n\n and you\n", "--drafter", drafter)
    first, second = answers(llm, "hi", "and you")
    assert ran.code == 0
    assert ran.stdout == f"{first}\n{second}\n".replace("\r\n", "\n")


def test_reset_forgets_and_quit_ends(target: Path, llm: dj.LLM):
    ran = talk(target, "hi\n/reset\nand you\n/quit\nnever asked\n")
    (first,), (second,) = answers(llm, "hi"), answers(llm, "and you")
    assert ran.code == 0
    assert ran.stdout == f"{first}\n{second}\n".replace("\r\n", "\n")
    assert "a new conversation" in ran.stderr


def test_json_is_the_conversation_in_one_document(target: Path, llm: dj.LLM):
    ran = talk(target, "hi\n", "--json", "--system", "be")
    system, user, assistant = ran.document["messages"]
    assert system == {"role": "system", "content": "be"}
    assert user == {"role": "user", "content": "hi"}
    (one,) = llm.chat([system, user], dj.SamplingParams(max_tokens=8))
    assert assistant == {"role": "assistant", "content": one.text}


def test_a_conversation_that_no_longer_fits_is_said_and_the_next_one_goes_on(
    target: Path, llm: dj.LLM
):
    ran = talk(target, f"hi\n{'x' * 130}\n/reset\nhi\n")
    (first,) = answers(llm, "hi")
    assert ran.code == 1  # a script has to hear of the turn that has no answer
    assert ran.stdout == f"{first}\n{first}\n".replace("\r\n", "\n")
    assert "no longer fits the served length of 128: /reset begins a new one" in ran.stderr


def test_an_answer_that_is_cut_says_by_what(target: Path):
    assert "(cut after 8 tokens: --max-tokens allows more)" in talk(target, "hi\n").stderr
    fills = talk(target, "x" * 119 + "\n")  # with the template 122 of 128: six are left
    assert "(cut: the conversation has reached the served length of 128 tokens" in fills.stderr


def test_a_model_without_a_chat_template_is_refused_before_the_first_turn(tmp_path: Path):
    ran = talk(write_text_target(tmp_path / "plain", template=None), "hi\n")
    assert (ran.code, ran.stdout) == (2, "")
    assert "error: this model has no chat template" in ran.stderr


def interrupting(pieces: list[str]) -> Callable[[str], None]:
    """A reader who presses Ctrl-C at the second piece."""

    def write(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            signal.raise_signal(signal.SIGINT)

    return write


def test_ctrl_c_ends_an_answer_but_not_the_conversation(llm: dj.LLM):
    before = signal.getsignal(signal.SIGINT)
    conversation = Conversation(llm, dj.SamplingParams(max_tokens=8))
    pieces: list[str] = []
    conversation.answer("hi", interrupting(pieces))
    (whole,) = answers(llm, "hi")
    said = conversation.messages[-1]["content"]
    assert said == "".join(pieces[:2])
    assert whole.startswith(said) and said != whole
    assert signal.getsignal(signal.SIGINT) is before
    conversation.reset()
    conversation.answer("hi", lambda piece: None)
    assert conversation.messages[-1]["content"] == whole


def test_a_second_ctrl_c_is_raised_and_nothing_stays_in_a_slot(llm: dj.LLM):
    conversation = Conversation(llm, dj.SamplingParams(max_tokens=8))

    def twice(piece: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        conversation.answer("hi", twice)
    assert conversation.messages == []
    assert answers(llm, "hi") == answers(llm, "hi")
