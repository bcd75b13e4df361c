"""Tokenizers without a file, for the tests of prompts and answers: words, one id each."""

from collections.abc import Sequence


class Words:
    """Ids are given to words as they come; a turn is `<ROLE> TEXT`, the answer begins at `<a>`."""

    has_chat_template = True
    eos_token_ids = (0,)

    def __init__(self):
        self.words = ["</s>"]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.words += [word for word in dict.fromkeys(text.split()) if word not in self.words]
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self.eos_token_ids if skip_special_tokens else ()
        return " ".join(self.words[index] for index in ids if index not in hidden)

    def chat_ids(self, messages, *, add_generation_prompt: bool = True) -> list[int]:
        said = [f"<{message['role'][0]}> {message['content']}" for message in messages]
        return self.encode(" ".join([*said, *["<a>"] * add_generation_prompt]))
