# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The only file that imports `jetstream`: its gRPC messages, and on demand its engine interface.

JetStream 0.2.2 imports two names of seqio, which would bring TensorFlow (2.5 GB), and sets the root
logger to DEBUG. Its orchestrator calls `jax.tree_map`, which JAX removed, and makes an assertion
that may fail, which ends the process (`_run_again`). Only this is mended here.
"""

import functools
import importlib.metadata
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

SUPPORTED = "0.2.2"
_STAND_INS = {
    "seqio": (),
    "seqio.vocabularies": ("SentencePieceVocabulary", "Vocabulary"),
    "tiktoken": (),
    "tiktoken.load": ("load_tiktoken_bpe",),
}


def import_messages() -> Any:
    """Returns the module of JetStream's messages. Raises ImportError for another version."""
    try:
        version = importlib.metadata.version("google-jetstream")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"google-jetstream {SUPPORTED} is not installed; run `uv sync` (the packages named "
            "`jetstream` and `jetstream-pt` on PyPI are other projects)"
        ) from None
    if version != SUPPORTED:
        raise ImportError(
            f"google-jetstream {version} is installed; earl_jax implements the gRPC service and "
            f"the engine interface of {SUPPORTED}; run `uv sync`"
        )
    from jetstream.core.proto import jetstream_pb2

    return jetstream_pb2


jetstream_pb2 = import_messages()


class EngineModules(NamedTuple):
    """Modules of JetStream around its engine interface."""

    config_lib: Any
    engine_api: Any
    orchestrator: Any
    server_lib: Any
    token_utils: Any
    tokenizer_api: Any
    tokenizer_pb2: Any


@functools.cache
def import_engine() -> EngineModules:
    """Returns the modules around JetStream's engine interface, its orchestrator mended."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    hidden = {name: sys.modules.pop(name) for name in _STAND_INS if name in sys.modules}
    for name, attributes in _STAND_INS.items():
        module = types.ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, type(attribute, (), {}))
        sys.modules[name] = module
    try:
        from jetstream.core import config_lib, orchestrator, server_lib
        from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2
    finally:
        for name in _STAND_INS:
            del sys.modules[name]
        sys.modules.update(hidden)
        root.setLevel(level)
        root.handlers[:] = handlers

    class Thread(orchestrator.JetThread):
        """A thread of the orchestrator, by `_run_again`."""

        def __init__(self, *, target: Callable[[], None], **options: Any) -> None:
            super().__init__(target=functools.partial(_run_again, target), **options)

    orchestrator.JetThread = Thread
    # It would free a prefix as soon as one slot has it, and calls `jax.tree_map`.
    orchestrator.delete_pytree = lambda tree: None
    return EngineModules(
        config_lib=config_lib,
        engine_api=engine_api,
        orchestrator=orchestrator,
        server_lib=server_lib,
        token_utils=token_utils,
        tokenizer_api=tokenizer_api,
        tokenizer_pb2=tokenizer_pb2,
    )


def _run_again(target: Callable[[], None]) -> None:
    """Calls what a thread of the orchestrator does until it returns.

    The thread that decodes asserts that a slot is busy where another thread may just have freed the
    last one. It has nothing to lose then.
    """
    while True:
        try:
            return target()
        except AssertionError as error:
            if "must have some requests inserted" not in str(error):
                raise
