# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The limit of open files in process 0, which has connections with all other processes."""

import resource

# Of each other process: that of its messages, and that of JAX's coordination service.
_EACH = 2
# Whatever else process 0 has open: devices, checkpoints, environments.
_OWN = 256


def allow_connections(count: int) -> str:
    """Raises this process's limit of open files where `count` processes need a higher one.

    Returns what is wrong, in words, where the system does not allow it; "" where all is well.
    """
    need = _OWN + _EACH * (count - 1)
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < need:
        return (
            f"process 0 may open {most} files, and needs {need} for its connections with the other "
            f"{count - 1} processes; raise the hard limit of open files on its host to {need} or "
            "more (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of docker)"
        )
    if least != resource.RLIM_INFINITY and least < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, most))
    return ""
