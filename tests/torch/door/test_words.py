"""Text of streams, and token ids of conversations."""

from typing import Any

import pytest
from chats import TEMPLATE, chat_tokenizer
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlhfspec.door.conversations import Conversations
from rlhfspec.door.words import TokenTexts, Words
from rlhfspec.engine.scheduling.text import cut_at_stop
from rlhfspec.errors import InvalidRequest
from rlhfspec.tiny.tokenizer import EOS

TOKENIZER = chat_tokenizer()
ASK = {"role": "user", "content": "ä?"}


@given(
    st.lists(st.lists(st.integers(0, 259), max_size=5), max_size=8),
    st.lists(st.sampled_from(["a", "ab", "ä", "\n\n", "zz"]), max_size=2),
)
def test_the_pieces_of_a_stream_are_its_text_cut_at_a_stop_string(steps: list[list[int]], stops: list[str]) -> None:
    words = Words(TOKENIZER, stops)
    pieces = [*map(words.feed, steps), words.end()]
    whole = TOKENIZER.decode([token for step in steps for token in step], skip_special_tokens=True)
    assert "".join(pieces) == cut_at_stop(whole, tuple(stops))


def test_an_incomplete_character_and_a_possible_stop_string_are_held_back() -> None:
    words = Words(TOKENIZER, ["--"])
    fed = [words.feed([byte]) for byte in "aä-b-".encode()]
    assert fed == ["", "", "a", "ä", "-", "b"]
    assert words.end() == "-"


def test_the_bytes_of_parts_of_a_character_are_told() -> None:
    texts = TokenTexts(TOKENIZER)
    token_ids = TOKENIZER.encode("aä😀\n", add_special_tokens=False)
    assert [byte for token_id in token_ids for byte in texts.bytes(token_id) or ()] == list("aä😀\n".encode())
    assert texts.bytes(EOS) == list(b"<eos>")


@pytest.mark.parametrize(("piece", "told"), [("<0xC3>", [0xC3]), ("\N{REPLACEMENT CHARACTER}", None)])
def test_the_bytes_of_other_vocabularies_are_told_where_they_are_certain(piece: str, told: list[int] | None) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={piece: 0}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    assert TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer)).bytes(0) == told


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("ended", [True, False])
def test_a_conversation_goes_on_with_the_ids_that_were_sampled(ended: bool) -> None:
    """The answer's ids are not those that its text is encoded to: token 259 has no text."""
    conversations = Conversations(TOKENIZER, [EOS])
    first = conversations.prompt([ASK], {})
    sampled = [*b"yes", 259, *([EOS] if ended else [])]
    conversations.answered(first, answer("yes"), sampled, is_ended=ended)
    messages = [ASK, answer("yes"), ASK]
    second = conversations.prompt(messages, {})
    new = "" if ended else "<eos>"
    new += "\n<user>ä?<eos>\n<assistant>"
    assert second.token_ids == (*first.token_ids, *sampled, *TOKENIZER.encode(new, add_special_tokens=False))
    assert conversations.counts == {"first": 1, "continued": 1}


def test_another_history_or_template_argument_begins_anew() -> None:
    conversations = Conversations(TOKENIZER, [EOS])
    conversations.answered(conversations.prompt([ASK], {}), answer("yes"), [*b"yes", EOS], is_ended=True)
    for messages, arguments in (([ASK, answer("no"), ASK], {}), ([ASK, answer("yes"), ASK], {"style": 1})):
        prompt = conversations.prompt(messages, arguments)
        said = messages[1]["content"]
        rendered = f"<user>ä?<eos>\n<assistant>{said}<eos>\n<user>ä?<eos>\n<assistant>"
        assert list(prompt.token_ids) == TOKENIZER.encode(rendered, add_special_tokens=False)
    assert conversations.counts == {"first": 3}


def test_a_template_that_rewrites_earlier_text_is_counted_and_rendered_whole() -> None:
    forgets = chat_tokenizer(TEMPLATE.replace("messages %}", "messages[-1:] %}", 1))
    conversations = Conversations(forgets, [EOS])
    conversations.answered(conversations.prompt([ASK], {}), answer("yes"), [*b"yes", EOS], is_ended=True)
    prompt = conversations.prompt([ASK, answer("yes"), ASK], {})
    assert TOKENIZER.decode(prompt.token_ids) == "<user>ä?<eos>\n<assistant>"
    assert conversations.counts == {"first": 1, "rewritten": 1}


def test_the_longest_known_history_is_continued() -> None:
    conversations = Conversations(TOKENIZER, [EOS])
    messages: list[dict[str, Any]] = []
    for turn in range(3):
        messages.append(ASK)
        prompt = conversations.prompt(messages, {})
        conversations.answered(prompt, answer(str(turn)), [48 + turn, 259, EOS], is_ended=True)
        messages.append(answer(str(turn)))
    assert prompt.token_ids.count(259) == 2
    assert conversations.counts == {"first": 1, "continued": 2}


def test_answers_of_the_same_text_are_told_apart_by_the_ids_that_the_client_requires() -> None:
    conversations = Conversations(TOKENIZER, [EOS])
    first = conversations.prompt([ASK], {})
    for hidden in ([], [259], [258]):
        conversations.answered(first, answer("yes"), [*b"yes", *hidden, EOS], is_ended=True)
    messages = [ASK, answer("yes"), ASK]
    for hidden, required in (
        ([258], ()),
        ([], (*first.token_ids, *b"yes", EOS)),
        ([259], (*first.token_ids, *b"yes", 259)),
    ):
        found = conversations.prompt(messages, {}, required=required).token_ids
        assert found[len(first.token_ids) :][: 4 + len(hidden)] == (*b"yes", *hidden, EOS)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation"])
def test_an_argument_of_the_tokenizer_cannot_be_given_as_one_of_the_template(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        Conversations(TOKENIZER, [EOS]).prompt([ASK], {name: "{{ 1 }}"})
