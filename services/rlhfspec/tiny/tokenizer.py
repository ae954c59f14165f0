"""Byte tokenizer: ids 0-255 are bytes, then BOS, EOS, PAD and an unused id, 260 in all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS = 256
EOS = 257
PAD = 258
VOCAB_SIZE = 260


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(token_ids: Iterable[int]) -> str:
    """Return text without special tokens; invalid UTF-8 becomes replacement characters."""
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")


def hugging_face_tokenizer() -> PreTrainedTokenizerFast:
    """Return the Hugging Face tokenizer, which prepends BOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **specials}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=2048
    )


def _byte_characters() -> list[str]:
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, num_moved = [], 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + num_moved))
            num_moved += 1
    return characters
