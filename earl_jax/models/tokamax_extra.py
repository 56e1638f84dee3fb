# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""tokamax, an optional extra for Python 3.12 and later: kernels for Hopper and Blackwell GPUs.

One known version, as some of what is used has no public name yet.

It looks up the GPU of JAX's default device whenever any pass of it is traced. To compile for
GPUs that are not here, lower under `jax.default_device` of one of their topology.
"""

import importlib.metadata
import importlib.util
import logging

import jax

VERSION = "0.0.17"


def tokamax_obstacle(
    platform: str | None, capabilities: tuple[float, float], compute_dtype: str
) -> str | None:
    """Returns why a kernel of tokamax cannot run on these devices; None where it can.

    `capabilities` are the first compute capability that the kernel is for, and the first beyond.
    A `platform` of None, an abstract mesh's, is taken for GPUs of one of them.
    """
    if platform not in ("gpu", None):
        return f"its kernel is for GPUs and these are {platform} devices"
    if importlib.util.find_spec("tokamax") is None:
        return (
            "tokamax is not installed (`uv sync --extra tokamax`, on Python 3.12 or later, has "
            "the fast kernel for GPUs)"
        )
    if (found := importlib.metadata.version("tokamax")) != VERSION:
        return f"tokamax {found} is installed, and only {VERSION} is known to work"
    if platform:
        chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        default = chosen or jax.devices()[0]
        capability = getattr(default, "compute_capability", None)
        if capability is None:
            return "tokamax goes by JAX's default device, which is not one of these GPUs"
        if not capabilities[0] <= float(capability) < capabilities[1]:
            return f"tokamax cannot train on GPUs of compute capability {capability}"
    if compute_dtype != "bfloat16":
        return (
            "tokamax's kernel computes in bfloat16 and config.model.compute_dtype is "
            f"{compute_dtype!r}"
        )
    return None


def quiet_tokamax() -> None:
    """Stops its warning, for each shape and pass, that no settings were tuned for it."""
    if _is_of_use not in (logger := logging.getLogger("absl")).filters:
        logger.addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Autotuning cache miss")
