# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The one gate through which JetStream comes in. No other file imports `jetstream`.

JetStream 0.2.2 imports two names of seqio, which would bring TensorFlow (2.5 GB), and sets the root
logger to DEBUG; its orchestrator calls `jax.tree_map`, which JAX removed, and answers any exception
in its threads by killing the process. What is mended here is only that.
"""

import importlib.metadata
import logging
import sys
import types
from typing import Any

import numpy as np

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
        from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2
    finally:
        for name in _STAND_INS:
            del sys.modules[name]
        sys.modules.update(hidden)
        root.setLevel(level)
        root.handlers[:] = handlers
    # It would free a prefix as soon as one slot has it; a whole group may want the same one.
    orchestrator.delete_pytree = lambda tree: None
    return engine_api, orchestrator, token_utils, tokenizer_api, tokenizer_pb2


engine_api, orchestrator, token_utils, tokenizer_api, tokenizer_pb2 = _import_jetstream()
Engine = engine_api.Engine
ResultTokens = engine_api.ResultTokens


class ServedTokenizer(tokenizer_api.Tokenizer):
    """JetStream's view of a `transformers` tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """Ids padded to the next of JetStream's prefill lengths, and how many count."""
        ids = np.asarray(self._tokenizer.encode(s, add_special_tokens=False), np.int32)
        # The Driver asks for a beginning-of-text token; there is none.
        kwargs["is_bos"] = False
        return token_utils.pad_tokens(ids, self.bos_id, self.pad_id, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """The text of these ids."""
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self._tokenizer.pad_token_id

    @property
    def eos_id(self) -> int:
        """Id that ends a turn."""
        return self._tokenizer.eos_token_id

    @property
    def bos_id(self) -> int:
        """There is no beginning-of-text token; JetStream wants a number."""
        return self._tokenizer.pad_token_id


def tokenizer_parameters() -> Any:
    """The message in which JetStream describes a tokenizer."""
    return tokenizer_pb2.TokenizerParameters(path="earl_jax")
