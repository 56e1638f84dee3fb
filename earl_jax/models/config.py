# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a decoder looks like: sizes and settings, with every rule they must keep."""

import dataclasses
import math
from typing import Literal

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of rotary embeddings, for contexts beyond `original_max_position`.

    Waves longer than `original_max_position / low_freq_factor` tokens turn `factor` times slower,
    those shorter than `original_max_position / high_freq_factor` as before; between the two the
    frequencies are interpolated. `factor` 1 stretches nothing.
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        path = "config.model.rope_scaling"
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"{path}.factor is {self.factor}; it must be at least 1 (1: none)")
        if self.original_max_position < 1:
            raise ValueError(
                f"{path}.original_max_position is {self.original_max_position}; it must be at "
                "least 1"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                f"{path}.low_freq_factor is {self.low_freq_factor} and {path}.high_freq_factor is "
                f"{self.high_freq_factor}; both must be positive, the second the larger"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

    `attention_bias` adds biases to the projections of queries, keys and values; `query_key_norm`
    normalises queries and keys per head before they are rotated.

    `compute_dtype` is the type of matrix work and of the KV cache; the trainer's parameters are
    fp32 always. `init_scale` multiplies the 1/sqrt(fan-in) deviation of the projections that write
    into the residual stream, which is further divided by sqrt(2 * num_layers).

    `path` is a folder with a checkpoint of `transformers`, which then gives everything but
    `compute_dtype`; "" is a model from scratch. It is "" in the ModelConfig that comes of it, which
    is `World.model`.
    """

    path: str = ""
    num_layers: int = 2
    width: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    ffn_size: int = 192
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    attention_bias: bool = False
    query_key_norm: bool = False
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    init_scale: float = 1.0
    compute_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def num_query_groups(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        for field in ("num_layers", "width", "num_heads", "num_kv_heads", "head_size", "ffn_size"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"config.model.{field} is {getattr(self, field)}; it must be at least 1"
                )
        for field in ("rope_theta", "norm_eps", "init_scale"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(
                    f"config.model.{field} is {getattr(self, field)}; it must be a positive number"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.model.num_heads is {self.num_heads}, not a multiple of "
                f"config.model.num_kv_heads ({self.num_kv_heads}); each key/value head serves the "
                "same number of query heads"
            )
        if self.head_size % 2:
            raise ValueError(
                f"config.model.head_size is {self.head_size}; rotary embeddings need an even size"
            )
        self.rope_scaling.validate()
        if self.compute_dtype not in DTYPES:
            raise ValueError(
                f"config.model.compute_dtype is {self.compute_dtype!r}; choose one of {DTYPES}"
            )
