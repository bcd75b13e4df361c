"""Tests of `training/prompts.py`: files of turns and messages, refusals by line, later turns."""

import json
from pathlib import Path

import pytest

from byte_tokenizer import byte_level, write_folder
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.serving.service import Service
from dflash_jax.serving.text import Tokenizer
from dflash_jax.training.answering import chat_tokenizer
from dflash_jax.training.prompts import Prompt, next_turn, prompts_from_file
from fake_llm import FakeLLM
from serving_http import running
from tiny_chat import Words
from tiny_text import SPECIALS, TEMPLATE


def _file(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def _messages(*roles: str) -> dict[str, object]:
    return {"messages": [{"role": role, "content": f"{role}{i}"} for i, role in enumerate(roles)]}


def test_prompts_are_conversations_up_to_the_answer(tmp_path):
    words = Words()
    path = _file(
        tmp_path,
        {"source": "s", "turns": ["one two", "later", "last"]},
        "",
        _messages("user"),
        _messages("system", "user", "assistant", "user", "assistant"),
    )
    got = list(prompts_from_file(path, words))
    assert [words.decode(prompt.ids) for prompt in got] == [
        "<u> one two <a>",
        "<u> user0 <a>",
        # The dataset's own last answer is dropped: the target gives its own.
        "<s> system0 <u> user1 <a> assistant2 <u> user3 <a>",
    ]
    assert [prompt.source for prompt in got] == ["s", "prompts", "prompts"]
    assert [prompt.later for prompt in got] == [("later", "last"), (), ()]


def test_a_line_separator_inside_a_text_and_a_byte_order_mark_are_no_new_line(tmp_path):
    path = _file(tmp_path, '\ufeff{"turns": ["one\u2028two"]}')
    words = Words()
    assert [words.decode(p.ids) for p in prompts_from_file(path, words)] == ["<u> one two <a>"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1", "line 2: no valid JSON .*column"),
        ("[1]", "line 2: 0 of turns and messages, not 1"),
        ({}, "line 2: 0 of turns and messages, not 1"),
        ({"turns": ["a"]} | _messages("user"), "line 2: 2 of turns and messages"),
        ({"turns": []}, "line 2: turns is no list of user turns"),
        ({"turns": ["a", " "]}, "line 2: turns is no list of user turns"),
        ({"turns": "abc"}, "line 2: turns is no list of user turns"),
        ({"messages": []}, "line 2: messages is no list"),
        ({"messages": [{"role": "user"}]}, "line 2: message 0 has no text in content"),
        (_messages("user", "tool"), "line 2: message 1 has the role 'tool': system, user or"),
        (_messages("user", "user"), "message 1 has the role 'user' where 'assistant' is due"),
        (_messages("system", "assistant"), "message 1 has the role 'assistant' where 'user' is"),
        (_messages("user", "system"), "message 1 has the role 'system' where 'assistant' is due"),
        (_messages("system"), "line 2: messages has no user turn"),
    ],
)
def test_a_line_that_is_no_conversation_is_refused_by_number(tmp_path, line, message):
    path = _file(tmp_path, {"turns": ["fine"]}, line)
    with pytest.raises(RequestError, match=message):
        list(prompts_from_file(path, Words()))


def test_a_file_without_a_prompt_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"prompts\.jsonl has no prompt: each line is"):
        list(prompts_from_file(_file(tmp_path, "", "  "), Words()))
    with pytest.raises(RequestError, match="cannot be read"):
        list(prompts_from_file(tmp_path / "absent.jsonl", Words()))
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["\xe9"]}')
    with pytest.raises(RequestError, match="cannot be read as UTF-8"):
        list(prompts_from_file(tmp_path / "latin.jsonl", Words()))


def test_every_later_turn_holds_the_answers_before_it():
    words = Words()
    first = Prompt(words.encode("<u> a <a>"), "s", ({"role": "user", "content": "a"},), ("b", "c"))
    second = next_turn(words, first, words.encode("x y </s>"))
    assert second is not None
    assert words.decode(second.ids) == "<u> a <a> x y <u> b <a>"
    third = next_turn(words, second, words.encode("z"))
    assert third is not None and third.later == ()
    assert words.decode(third.ids) == "<u> a <a> x y <u> b <a> z <u> c <a>"
    assert next_turn(words, third, [1]) is None
    assert len({first.key, first._replace(later=()).key, second.key}) == 3


def test_prompts_are_what_the_chat_endpoint_feeds_its_engine(tmp_path):
    """The server is asked over its socket, turn by turn, as a client would ask it."""
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    tokenizer = Tokenizer.from_folder(
        write_folder(tmp_path / "t", byte_level(SPECIALS), tokenizer_config=settings)
    )
    system = {"role": "system", "content": "Be short."}
    asked = [system, {"role": "user", "content": "Naïve <|end|> text"}]
    path = _file(tmp_path, {"messages": asked}, {"turns": ["hi", "and then?"]})
    whole, first = prompts_from_file(path, tokenizer)
    seen: list[list[int]] = []

    class Noting(FakeLLM):
        def submit(self, prompt, params, *, timeout=None):
            seen.append(list(prompt))
            return super().submit(prompt, params, timeout=timeout)

    llm = Noting(served=256, tokenizer=tokenizer)
    with Service(llm, max_queue=2) as service, running(service) as site:

        def ask(messages):
            answer = site.post("/v1/chat/completions", messages=messages, max_tokens=6)
            return answer.document["choices"][0]["message"]

        ask(asked)
        messages = [{"role": "user", "content": "hi"}]
        said = ask(messages)
        answer = {"role": "assistant", "content": said["content"]}
        ask([*messages, answer, {"role": "user", "content": "and then?"}])
    second = next_turn(tokenizer, first, tokenizer.encode(said["content"]))
    assert second is not None
    assert [whole.ids, first.ids, second.ids] == seen


def test_a_target_that_cannot_chat_is_refused_with_what_to_add(tmp_path):
    class Engine:
        tokenizer: Tokenizer | None = None

        def answers(self, prompts, *, max_tokens, temperatures, seeds):
            raise AssertionError("nothing is asked")

        def close(self):
            raise AssertionError("nothing was begun")

    engine = Engine()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        chat_tokenizer(engine)
    engine.tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level(SPECIALS)))
    with pytest.raises(ConfigError, match=r"no chat template.*add chat_template\.jinja"):
        chat_tokenizer(engine)
