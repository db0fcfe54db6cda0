"""Text to token ids and back, for every tokenizer of the GPT lineage.

For every text the ids are those of `transformers` (its TokenizersBackend on tokenizer.json). Opening refuses a
tokenizer for which this cannot be promised. Knows nothing of prompts, chats or the model. Torch-free; threads may share
it. Called by the server and by gptserve.LLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from gptserve.weights.errors import TokenizerError, shown
from gptserve.weights.families import load_config
from gptserve.weights.tokenizers.library_encoder import LibraryEncoder, describe, most_bytes_per_byte
from gptserve.weights.tokenizers.tiktoken_encoder import TiktokenEncoder
from gptserve.weights.tokenizers.vocabulary import Vocabulary, load_vocabulary
from gptserve.weights.tokenizers.worker_encoder import WorkerEncoder, is_known

Encoder = TiktokenEncoder | LibraryEncoder | WorkerEncoder


class Tokenizer:
    """Encodes text, and gives the bytes of every token.

    vocab_size is one more than the largest id. The model's may be larger, and it may lack added tokens: a prompt with
    one of these is refused, like any other with an id that the model lacks. No token stands for more than
    max_token_bytes bytes of a text. The same token ids mean the same text to all tokenizers with one fingerprint. If it
    has_workers, a text has no tokens either when one of them passes its limits.
    """

    def __init__(self, vocabulary: Vocabulary, encoder: Encoder, bytes_per_byte: int) -> None:
        self._encoder = encoder
        self.has_workers = isinstance(encoder, WorkerEncoder)
        self._bytes = vocabulary.token_bytes
        self.vocab_size = max(self._bytes, default=-1) + 1
        self._largest_own = max(vocabulary.ids.values(), default=-1)
        self.special_ids = frozenset(token.token_id for token in vocabulary.added if token.special)
        tokens = (f"{token_id}:{data.hex()}" for token_id, data in sorted(self._bytes.items()))
        special = map(str, sorted(self.special_ids))
        self.fingerprint = hashlib.sha256(" ".join(chain(tokens, special)).encode()).hexdigest()[:32]
        self.max_token_bytes = max(map(len, self._bytes.values()), default=0) * bytes_per_byte

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """Open the tokenizer of a model folder; raise TokenizerError when its files are missing or broken."""
        vocabulary = load_vocabulary(folder)
        tiktoken = TiktokenEncoder.recognise(vocabulary)
        if tiktoken is not None:
            return cls(vocabulary, tiktoken, tiktoken.most_bytes_per_byte)
        try:
            encoder = LibraryEncoder(*describe(vocabulary)) if is_known(vocabulary) else WorkerEncoder(vocabulary)
        except TokenizerError as fault:
            raise TokenizerError(f"{vocabulary.file_name}: {fault}") from fault
        return cls(vocabulary, encoder, most_bytes_per_byte(vocabulary))

    @classmethod
    def of_model(cls, folder: Path) -> Tokenizer:
        """Open the tokenizer of a model folder; raise TokenizerError also if the model lacks one of its ids.

        It may lack those of added tokens, as Gemma 3 does: its text models have no row for `<image_soft_token>`.
        """
        limit = load_config(folder).vocab_size  # first: a model that is not served needs no tokenizer
        tokenizer = cls.open(folder)
        if tokenizer._largest_own >= limit:
            raise TokenizerError(
                f"{folder}: the tokenizer's ids must be below config.json's vocab_size {limit}, "
                f"got {tokenizer._largest_own}: they belong to different models"
            )
        return tokenizer

    def close(self) -> None:
        """End its workers, if it has any. Without this they end with the tokenizer itself."""
        if isinstance(self._encoder, WorkerEncoder):
            self._encoder.close()

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, nothing added: special tokens never arise, their text is text.

        Raises TokenizerError for a lone surrogate, which UTF-8 cannot write.
        """
        return self._encoder.encode(_checked(text))

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of plain text as a model is prompted with it: with the tokens its template adds, such as BOS.

        These are `tokenizer(text, split_special_tokens=True).input_ids` of transformers, with one difference: where
        transformers puts a special token together from its parts (Unigram, some merges), plain text stays plain.
        """
        return self._encoder.encode(_checked(text), template=True)

    def encode_with_special(self, text: str, *, template: bool = False) -> list[int]:
        """Return the ids of text in which the text of a special token means that token.

        Nothing is added, or with `template` the tokens that a prompt's template adds.
        """
        return self._encoder.encode(_checked(text), special=True, template=template)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text; bytes that are no UTF-8 become U+FFFD, unknown ids nothing.

        The text is the tokens' bytes one after another, so that it can be continued. transformers differs: it drops the
        first space of a sentencepiece-style text (Llama 2) and the last of GPT-1's, and may write other U+FFFD.
        """
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; none for an id without a token."""
        return self._bytes.get(token_id, b"")


def _checked(text: str) -> str:
    """Return a text that UTF-8 can write, or raise TokenizerError."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as fault:
        raise TokenizerError(
            f"text must be valid Unicode, got a lone surrogate {shown(text[fault.start])} at position {fault.start}"
        ) from fault
    return text
