# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The one door to the coordination service that `jax.distributed` keeps in process 0.

JAX has no public name for its client (0.10.2 to 0.12); orbax takes it from this place too. Of all
its methods only those that set, get and delete bytes under a key are used, by `host_channel.py`.
"""

from typing import Any

from jax._src import distributed


def coordination_client() -> Any:
    """The client of this process. Raises RuntimeError where `jax.distributed` was not started."""
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("there is no coordination service; call jax.distributed.initialize")
    return client
