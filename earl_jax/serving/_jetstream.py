# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The only file that imports `jetstream`.

JetStream 0.2.2 imports two names of seqio, which would bring TensorFlow (2.5 GB), and sets the root
logger to DEBUG; its orchestrator calls `jax.tree_map`, which JAX removed, and answers any exception
in its threads by killing the process. Only this is mended here.
"""

import functools
import importlib.metadata
import logging
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from earl_jax.envs.text_codec import TextCodec
from earl_jax.serving.chat_prompt import prompt_encoder

SUPPORTED = "0.2.2"
_STAND_INS = {
    "seqio": (),
    "seqio.vocabularies": ("SentencePieceVocabulary", "Vocabulary"),
    "tiktoken": (),
    "tiktoken.load": ("load_tiktoken_bpe",),
}


def _import_jetstream() -> tuple[Any, ...]:
    try:
        version = importlib.metadata.version("google-jetstream")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"google-jetstream {SUPPORTED} is not installed; run `uv sync` (the packages named "
            "`jetstream` and `jetstream-pt` on PyPI are other projects)"
        ) from None
    if version != SUPPORTED:
        raise ImportError(
            f"google-jetstream {version} is installed; earl_jax implements the engine interface of "
            f"{SUPPORTED}; run `uv sync`"
        )
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    hidden = {name: sys.modules.pop(name) for name in _STAND_INS if name in sys.modules}
    for name, attributes in _STAND_INS.items():
        module = types.ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, type(attribute, (), {}))
        sys.modules[name] = module
    try:
        from jetstream.core import orchestrator
        from jetstream.core.proto import jetstream_pb2
        from jetstream.core.utils.async_multifuture import AsyncMultifuture
        from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2
    finally:
        for name in _STAND_INS:
            del sys.modules[name]
        sys.modules.update(hidden)
        root.setLevel(level)
        root.handlers[:] = handlers
    # It would free a prefix as soon as one slot has it; a whole group may want the same one.
    orchestrator.delete_pytree = lambda tree: None
    return (
        engine_api,
        orchestrator,
        token_utils,
        tokenizer_api,
        tokenizer_pb2,
        jetstream_pb2,
        AsyncMultifuture,
    )


(
    engine_api,
    orchestrator,
    token_utils,
    tokenizer_api,
    tokenizer_pb2,
    jetstream_pb2,
    AsyncMultifuture,
) = _import_jetstream()
Engine = engine_api.Engine
ResultTokens = engine_api.ResultTokens
SlotData = engine_api.SlotData
# The shortest length to which it pads prompts: powers of two, in its own Driver up to 32,768.
LEAST_PREFILL = 16


def padded_length(tokens: int) -> int:
    """Returns the length to which a prompt of so many tokens is padded."""
    return max(LEAST_PREFILL, 1 << (tokens - 1).bit_length())


class ServedTokenizer(tokenizer_api.Tokenizer):
    """JetStream's view of a `transformers` tokenizer; each of `end_ids` ends a reply."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._end_ids = tokenizer, tuple(end_ids)
        self._codec = TextCodec(tokenizer)
        self._ids_of = prompt_encoder(tokenizer)

    def reply_ids(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a whole reply of this text, as the tokenizer writes it behind text."""
        end = self._end_ids[0] if self._end_ids else self.eos_id
        ends = () if end is None else (end,)
        return (*self._codec.encode_reply(text), *ends)

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """Returns ids padded to the next of JetStream's prefill lengths, and how many count."""
        # The Driver would put a beginning-of-text token before every text.
        kwargs["is_bos"] = False
        ids = np.asarray(self._ids_of(s), np.int32)
        return token_utils.pad_tokens(ids, self.bos_id, self.pad_id, **kwargs)

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Returns the text of any ids.

        Control tokens are visible; bytes that are no UTF-8, and ids that are no tokens (a model's
        vocabulary is often padded), become U+FFFD.
        """
        return self._codec.decode(token_ids)

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """The most bytes of text that one token stands for."""
        longest = 1
        # A vocabulary writes a token in at least as many bytes as its text has.
        for token, number in sorted(
            self._tokenizer.get_vocab().items(), key=lambda t: -len(t[0].encode())
        ):
            if len(token.encode()) <= longest:
                break
            longest = max(longest, len(self.decode([number]).encode()))
        return longest

    @property
    def pad_id(self) -> int:
        """The id of the padding token, or any other: padding is never read."""
        return self._tokenizer.pad_token_id or 0

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text, where there is one."""
        return self._tokenizer.eos_token_id

    @property
    def bos_id(self) -> int:
        """A number, which JetStream wants and does not use, see `encode`."""
        return self.pad_id

    @property
    def stop_tokens(self) -> set[int]:
        """The ids that end a reply: the ends of turn, of a text, and the padding."""
        ends = {*self._end_ids, self.eos_id, self._tokenizer.pad_token_id}
        return {token for token in ends if token is not None}


def tokenizer_parameters() -> Any:
    """Returns the message in which JetStream describes a tokenizer."""
    return tokenizer_pb2.TokenizerParameters(path="earl_jax")
