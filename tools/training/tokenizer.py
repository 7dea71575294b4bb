"""A byte-level BPE tokenizer for source code, trained on the corpus.

A newline and the indentation after it form one piece, so the begin of a block costs one token at any depth. The
vocabulary contains all 256 bytes, so every string survives the round trip.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizerSequence
from tokenizers.trainers import BpeTrainer

__all__ = ["END_OF_TEXT", "encode_documents", "end_of_text_id", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"

# In order: newlines with the indentation that follows; a word after at most one sign or space; up to three digits;
# signs after at most one space; the remaining white space.
_PIECES = r"[\r\n]+[ \t]*|[^\s\p{L}\p{N}_]?[\p{L}_]+| [\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+?(?=[\r\n])|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
    """Learn a vocabulary from texts.

    Args:
        texts: The training documents, read once.
        vocab_size: Number of entries, counting the 256 bytes and the end-of-text token.

    Returns:
        A tokenizer whose token 0 is ``<|endoftext|>``. It has fewer entries if the texts have too few pairs.

    Raises:
        ValueError: The vocabulary cannot hold the bytes.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size {vocab_size} cannot hold 256 bytes and {END_OF_TEXT}; use 257 or more")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = PreTokenizerSequence(
        [Split(Regex(_PIECES), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.train_from_iterator(texts, _trainer(vocab_size))
    return tokenizer


def _trainer(vocab_size: int) -> BpeTrainer:
    return BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> npt.NDArray[np.uint16]:
    """Return all texts as one stream of tokens, with the end-of-text token after each text.

    Args:
        tokenizer: A tokenizer of at most 65536 entries.
        texts: The documents, in the order of the stream.

    Returns:
        uint16 [num_tokens], owned by the caller.
    """
    end = end_of_text_id(tokenizer)
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    streams = [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in encodings]
    return np.concatenate(streams) if streams else np.empty(0, dtype=np.uint16)


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id of ``<|endoftext|>``.

    Args:
        tokenizer: A tokenizer that :func:`train_tokenizer` made.

    Raises:
        ValueError: The tokenizer has no such token.
    """
    token_id = tokenizer.token_to_id(END_OF_TEXT)
    if token_id is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT} token; train it with train_tokenizer")
    return int(token_id)
