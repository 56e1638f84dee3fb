# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The only file that imports `jetstream`: the messages of its gRPC service.

Nothing else of JetStream is imported, because its engine brings TensorFlow with it.
"""

import importlib.metadata
from typing import Any

SUPPORTED = "0.2.2"


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
            f"google-jetstream {version} is installed; earl_jax implements the gRPC service of "
            f"{SUPPORTED}; run `uv sync`"
        )
    from jetstream.core.proto import jetstream_pb2

    return jetstream_pb2


jetstream_pb2 = import_messages()
