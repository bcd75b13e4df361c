"""Tokenizer on byte tokenizers, where every id is known: text, end ids, chat, two vocabularies."""

import json

import pytest
from tokenizers import Tokenizer as RawTokenizer

from byte_tokenizer import FIRST_SPECIAL, byte_level, byte_symbols, write_folder
from dflash_jax.errors import CheckpointError, RequestError
from dflash_jax.serving.text import Tokenizer

SPECIALS = ["<s>", "</s>"]
BYTES = Tokenizer(byte_level(SPECIALS))
CHAT = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"


# --- Encoding and decoding ---------------------------------------------------------------------


def test_the_tokens_of_the_byte_tokenizer_are_the_bytes_of_the_text():
    assert BYTES.encode("é🙂 a") == list("é🙂 a".encode())
    assert BYTES.decode(list("é🙂 a".encode())) == "é🙂 a"
    assert BYTES.vocab_size == FIRST_SPECIAL + len(SPECIALS)


def test_specials_in_a_text_are_parsed_and_hidden_when_decoding():
    ids = BYTES.encode("a<s>b</s>")
    assert ids == [97, 256, 98, 257]
    assert BYTES.decode(ids) == "ab"
    assert BYTES.decode(ids, skip_special_tokens=False) == "a<s>b</s>"


def test_ids_without_a_token_decode_to_nothing():
    assert BYTES.decode([97, 5000, 98]) == "ab"


def test_a_lone_surrogate_is_refused_as_a_request():
    with pytest.raises(RequestError, match="valid Unicode"):
        BYTES.encode("a\ud800")


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    raw = byte_level()
    raw.enable_truncation(3)
    raw.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, raw))
    assert tokenizer.encode("abcdef") == list(b"abcdef")
    assert tokenizer.encode("a") == list(b"a")


def test_a_folder_without_or_with_a_broken_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has no tokenizer.json; add the one of the model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match="tokenizer.json is not a valid tokenizer file"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content, message", [("{", "is not valid JSON"), ("[]", "not list")])
def test_a_broken_config_beside_the_tokenizer_is_named(tmp_path, content, message):
    write_folder(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"generation_config.json .*{message}"):
        Tokenizer.from_folder(tmp_path)


# --- End ids -----------------------------------------------------------------------------------


def test_the_end_ids_of_all_three_sources_are_united(tmp_path):
    """Fault 28."""
    folder = write_folder(
        tmp_path,
        byte_level(SPECIALS),
        config={"eos_token_id": 1},
        generation_config={"eos_token_id": [1, 106]},
        tokenizer_config={"eos_token": {"content": "</s>", "special": True}},
    )
    assert Tokenizer.from_folder(folder).eos_token_ids == (1, 106, 257)


@pytest.mark.parametrize("config", [{}, {"eos_token_id": None}])
def test_a_model_without_end_ids_has_none(tmp_path, config):
    folder = write_folder(tmp_path, byte_level(), config=config)
    assert Tokenizer.from_folder(folder).eos_token_ids == ()


def test_the_end_ids_are_shown_when_the_tokenizer_is_read(tmp_path, caplog):
    """Fault 28."""
    folder = write_folder(tmp_path, byte_level(), config={"eos_token_id": [7, 9]})
    with caplog.at_level("INFO", logger="dflash_jax.serving.text"):
        Tokenizer.from_folder(folder)
    assert "end with any of the ids (7, 9)" in caplog.text


# --- Chat --------------------------------------------------------------------------------------


def test_chat_and_raw_text_begin_with_exactly_one_start_token():
    """Fault 111."""
    raw = byte_level(SPECIALS, bos="<s>")
    tokenizer = Tokenizer(raw, special_tokens={"bos_token": "<s>"}, chat_template=CHAT)
    chat = tokenizer.chat_ids([{"role": "u", "content": "hi"}])
    assert chat == [256, *b"u:hi\n"]
    assert tokenizer.encode("hi") == [256, *b"hi"]
    assert tokenizer.encode("hi", add_special_tokens=False) == list(b"hi")


def test_chat_text_and_raw_text_give_the_same_ids():
    """Fault 112."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = Tokenizer(byte_level(SPECIALS, bos="<s>"), chat_template=template)
    text = "<s>é </s>🙂"
    chat = tokenizer.chat_ids([{"role": "user", "content": text}])
    assert chat == tokenizer.encode(text, add_special_tokens=False)
    assert chat == [256, *"é ".encode(), 257, *"🙂".encode()]


def test_the_template_follows_the_rules_that_templates_are_written_for():
    template = (
        "{% for m in messages %}\n"
        "    {% if m['role'] == 'skip' %}{% continue %}{% endif %}\n"
        "    {{- m | tojson }}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}{{ thinking }}"
        "{% if add_generation_prompt %}>{% endif %}{{ tools is none }}"
    )
    tokenizer = Tokenizer(byte_level(), chat_template=template)
    messages = [{"role": "skip"}, {"role": "user", "content": "<é&'>"}]
    ids = tokenizer.chat_ids(messages, thinking="no")
    assert tokenizer.decode(ids) == '{"role": "user", "content": "<é&\'>"}\n4no>True'
    ids = tokenizer.chat_ids(messages, add_generation_prompt=False, thinking="no")
    assert tokenizer.decode(ids).endswith("4noTrue")


def test_a_model_without_a_template_refuses_chat_and_says_what_to_do():
    assert not BYTES.has_chat_template
    with pytest.raises(RequestError, match=r"has no chat template .* use generate\(\)"):
        BYTES.chat_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + '!' }}", "cannot render these messages"),
        ("{{ ''.__class__.__mro__ }}", "cannot render these messages"),
        ("{{ messages.append(1) }}", "cannot render these messages"),
        ("{% for %}", "is not valid jinja"),
    ],
)
def test_what_a_template_cannot_or_may_not_do_is_a_refused_request(template, message):
    tokenizer = Tokenizer(byte_level(), chat_template=template)
    with pytest.raises(RequestError, match=message):
        tokenizer.chat_ids([{"role": "user", "content": None}])


def test_the_template_is_read_from_its_own_file_before_the_config(tmp_path):
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": "config"})
    assert Tokenizer.from_folder(folder).chat_ids([]) == list(b"config")
    (folder / "chat_template.jinja").write_text("own file")
    assert Tokenizer.from_folder(folder).chat_ids([]) == list(b"own file")


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_ids([]) == list(b"plain")


# --- Two vocabularies --------------------------------------------------------------------------


def swapped(first: int, second: int) -> Tokenizer:
    content = json.loads(byte_level(SPECIALS).to_str())
    vocabulary, symbols = content["model"]["vocab"], byte_symbols()
    vocabulary[symbols[first]], vocabulary[symbols[second]] = second, first
    return Tokenizer(RawTokenizer.from_str(json.dumps(content)))


def test_swapped_ids_are_found_and_the_first_is_named():
    """Fault 94."""
    assert BYTES.same_ids(swapped(5, 6)) == 5
    assert swapped(200, 17).same_ids(BYTES) == 17


def test_vocabularies_that_differ_in_padding_only_are_the_same():
    """Fault 94."""
    padded = Tokenizer(byte_level([*SPECIALS, "<pad0>", "<pad1>", "<mask>"]))
    assert padded.vocab_size == BYTES.vocab_size + 3
    assert BYTES.same_ids(padded) is None
    assert padded.same_ids(BYTES) is None
    assert BYTES.same_ids(BYTES) is None
