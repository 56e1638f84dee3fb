# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of a decoder, with every rule that they must keep."""

import dataclasses
import math
from typing import Literal

from earl_jax.settings.errors import InputError, check_bounds, check_choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A stretching of rotary embeddings, for contexts beyond those of pre-training.

    `kind` "linear": all waves turn `factor` times slower. "llama3": those longer than
    `original_max_position / low_freq_factor` tokens do, those shorter than
    `original_max_position / high_freq_factor` turn as before, and between the two the frequencies
    are interpolated. "yarn" (arXiv 2309.00071): the same two bounds (its beta_slow and beta_fast),
    with an interpolation by the number of the pair, between whole numbers unless `truncate` is
    False, and queries and keys are `attention_factor` times as long; 0 means 0.1 ln(`factor`) + 1.
    Attention scores are multiplied by (0.1 `score_mscale` ln(`factor`) + 1)^2, which is 1 for 0
    (DeepSeek's mscale_all_dim). `factor` 1 stretches nothing.
    """

    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 0.0
    truncate: bool = True
    score_mscale: float = 0.0

    @property
    def score_factor(self) -> float:
        """The factor of attention scores."""
        if self.kind != "yarn":
            return 1.0
        return (0.1 * self.score_mscale * math.log(self.factor) + 1.0) ** 2

    @property
    def magnitude(self) -> float:
        """The length of rotated queries and keys, of 1 before."""
        if self.kind != "yarn" or self.factor == 1:
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1.0

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        path = "config.model.rope_scaling"
        check_choices(self, path)
        if not 1 <= self.factor < math.inf:
            raise InputError(f"{path}.factor is {self.factor}; it must be at least 1 (1: none)")
        if self.original_max_position < 1:
            raise InputError(
                f"{path}.original_max_position is {self.original_max_position}; it must be at "
                "least 1"
            )
        low, high = self.low_freq_factor, self.high_freq_factor
        # YaRN's bounds, which are rounded to pairs, may be one.
        are_apart = low < high or (self.kind == "yarn" and low == high)
        if not (0 < low and are_apart and high < math.inf):
            raise InputError(
                f"{path}.low_freq_factor is {low} and {path}.high_freq_factor is {high}; both must "
                "be positive, the second the larger"
            )
        if not 0 <= self.attention_factor < math.inf:
            raise InputError(
                f"{path}.attention_factor is {self.attention_factor}; it must be a positive "
                "number, or 0 for 0.1 ln(factor) + 1"
            )
        if not 0 <= self.score_mscale < math.inf:
            raise InputError(
                f"{path}.score_mscale is {self.score_mscale}; it must be a positive number, or 0 "
                "for none"
            )


# Fields of ModelConfig that a user sets. The others say how a known family computes, the sizes of
# latent and of linear attention and of shared networks among them: they come from a preset or from
# a checkpoint.
MODEL_SETTINGS = (
    "path",
    "preset",
    "num_layers",
    "width",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "ffn_size",
    "windows",
    "num_experts",
    "experts_per_token",
    "expert_ffn_size",
    "compute_dtype",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary embeddings, grouped-query attention, gated FFN.

    `num_layers` layers write into the residual stream. `width` is the size of the residual stream,
    in numbers a token. Attention has `num_heads` heads of queries. `num_kv_heads` is the number of
    heads of keys and values. `head_size` is the size of each head. `ffn_size` is the number of
    hidden units of the feed-forward network. Pair i of a head's n numbers turns by `rope_theta` **
    (-2 i / n) a position. Norms divide by the root of the mean square plus `norm_eps`.
    `tie_embeddings` scores the next token with the embedding matrix instead of a head of its own.

    - `attention_bias`: biases in the projections of queries, keys and values; `out_bias`: in that
      of their result; `expert_bias`: in the router and the projections of experts.
    - `attention_sinks`: each query head has a learned score that takes part in the softmax and has
      no value (arXiv 2309.17453; gpt-oss).
    - `query_key_norm`: queries and keys are normalised before they are rotated, "head": each head,
      "all": all heads at once.
    - `norm_from_one`: norms multiply by 1 + w, and w begins at 0; else by w, which begins at 1.
    - `pre_norms`, `post_norms`: what attention and feed-forward read is normalised, and what they
      add to the residual stream.
    - `activation` of the gate of the feed-forward network; "swiglu_clamped" is that of gpt-oss
      (activations.py).
    - `windows`: layer i looks back over `windows[i % len(windows)]` tokens, itself among them; 0
      means over all. Empty: every layer over all.
    - `window_rope_theta`: the rotary base of layers with a window, which are not stretched then; 0
      means that they rotate as the others.
    - `no_rope_every`: every so many-th layer rotates nothing (NoPE, arXiv 2501.18795); 0: all do.
    - `query_pre_attn_scalar`: attention scores are divided by its square root; 0 means the size of
      a head.
    - `attention_gate`: the result of each head of queries is multiplied by the sigmoid of a gate.
    - `attention_softcap`, `final_softcap`: attention scores and logits x become c * tanh(x / c);
      0 means none.

    `scale_embeddings` multiplies embeddings by sqrt(width).

    With `latent_size` attention is multi-head latent attention (MLA, arXiv 2405.04434): of a token
    there is one latent of so many numbers, normalised, from which each head's key and value are
    projected, and one key of `rope_size` numbers for all heads, which is rotated. These are the
    last numbers of a head, and the others those from the latent; values have `value_size` numbers.
    The KV cache has latents and rotated keys. Queries come from a normalised latent of
    `query_latent_size` numbers; 0: from the residual stream. `rope_interleaved` pairs neighbours
    of a head, 2i and 2i + 1, else i and i + n / 2. Without latents `rope_size` are the first
    numbers of a head that are rotated; 0: all.

    With `attention_every` only every so many-th layer attends to all tokens. Those before it are
    layers of linear attention (Gated DeltaNet, arXiv 2412.06464), which read a state of a fixed
    size instead: a matrix of `linear_key_size` x `linear_value_size` for each of
    `linear_value_heads` heads, of which those with one of the `linear_key_heads` queries and keys
    are neighbours. Queries, keys and values go through a causal convolution over `conv_size` tokens
    before. 0: all layers attend.

    With `num_experts` each layer has so many feed-forward networks, of `expert_ffn_size` each
    instead of one of `ffn_size`. A router sends every token to `experts_per_token` of them, and
    what they make of it is added up, weighted by the router's probabilities of these experts.
    `normalize_expert_weights` scales the weights to a sum of 1. 0 is a dense model. A mixture may
    have beside it:

    - `num_dense_layers`: the number of first layers that have one dense network instead.
    - `shared_ffn_size`: a network of this size that every token goes through too; 0: none. With
      `shared_ffn_gate` its result is multiplied by the sigmoid of a number of the token's.
    - `router_scores`: probabilities are a "softmax" over experts, or each a "sigmoid".
    - `router_correction`: numbers that are added to probabilities where experts are chosen, and
      only there (arXiv 2408.15664). They are not trained.
    - `expert_groups`: experts are so many groups of neighbours, of which a token uses
      `groups_per_token`, those with the largest sum of their `group_score` best probabilities.
    - `expert_scale`: the factor of weights, behind everything else.

    `compute_dtype` is the type of matrix work and of the KV cache, in the rollout too unless
    config.rollout.compute_dtype is another: by default bfloat16 for a model of a checkpoint or a
    preset, float32 for one from scratch. The trainer's parameters are fp32 always. `init_scale`
    multiplies the 1/sqrt(fan-in) deviation of the projections that write into the residual stream,
    which is further divided by sqrt(2 * num_layers).

    `path` is a checkpoint of `transformers`, a local folder or a name of a hub, which then gives
    everything but the compute type; "" is a model from scratch. `preset` names a model of
    presets.py whose settings are the defaults of this section. Both are "" in the ModelConfig of a
    checkpoint.
    """

    path: str = ""
    preset: str = ""
    num_layers: int = 2
    width: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    ffn_size: int = 192
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    rope_interleaved: bool = False
    latent_size: int = 0
    query_latent_size: int = 0
    rope_size: int = 0
    value_size: int = 0
    attention_every: int = 0
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_key_size: int = 16
    linear_value_size: int = 16
    conv_size: int = 4
    windows: tuple[int, ...] = ()
    window_rope_theta: float = 0.0
    no_rope_every: int = 0
    attention_bias: bool = False
    out_bias: bool = False
    attention_sinks: bool = False
    query_key_norm: Literal["", "head", "all"] = ""
    query_pre_attn_scalar: int = 0
    attention_gate: bool = False
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 2
    expert_ffn_size: int = 96
    normalize_expert_weights: bool = True
    expert_bias: bool = False
    num_dense_layers: int = 0
    shared_ffn_size: int = 0
    shared_ffn_gate: bool = False
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    router_correction: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    group_score: Literal[1, 2] = 1
    expert_scale: float = 1.0
    norm_eps: float = 1e-6
    norm_from_one: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    activation: Literal["silu", "gelu_tanh", "swiglu_clamped"] = "silu"
    tie_embeddings: bool = False
    scale_embeddings: bool = False
    init_scale: float = 1.0
    compute_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def num_query_groups(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """The factor of attention scores."""
        scale = (self.query_pre_attn_scalar or self.head_size) ** -0.5
        return scale * self.rope_scaling.score_factor

    @property
    def rotated_size(self) -> int:
        """The numbers of a head that are rotated."""
        return self.rope_size or self.head_size

    @property
    def value_head_size(self) -> int:
        """The size of a head of values."""
        return self.value_size if self.latent_size else self.head_size

    @property
    def cached_size(self) -> int:
        """The numbers of a token and layer in the KV cache, of all heads."""
        if self.latent_size:
            return self.latent_size + self.rope_size
        return 2 * self.num_kv_heads * self.head_size

    @property
    def has_states(self) -> bool:
        """True where some layers are of linear attention, which have a state and no pages."""
        return self.attention_every > 0

    @property
    def linear_groups(self) -> int:
        """Heads of values per head of keys, of linear attention."""
        return self.linear_value_heads // self.linear_key_heads

    def attends(self, layer: int) -> bool:
        """Returns whether a layer attends to all tokens, and not to a state."""
        return not self.has_states or (layer + 1) % self.attention_every == 0

    @property
    def num_linear_layers(self) -> int:
        """Layers of linear attention."""
        return sum(not self.attends(layer) for layer in range(self.num_layers))

    @property
    def paged_windows(self) -> tuple[int, ...]:
        """The window of each layer that has pages, those of linear attention left out."""
        return tuple(w for layer, w in enumerate(self.layer_windows) if self.attends(layer))

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of each layer: with windows (4, 0) and three layers 4, 0, 4."""
        windows = self.windows or (0,)
        return tuple(windows[layer % len(windows)] for layer in range(self.num_layers))

    @property
    def layers_differ(self) -> bool:
        """True where not all layers have the same window and rotation."""
        return len(set(self.layer_windows)) > 1 or self.no_rope_every > 0

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        self._check_numbers()
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"config.model.num_heads is {self.num_heads}, not a multiple of "
                f"config.model.num_kv_heads ({self.num_kv_heads}); each key/value head serves the "
                "same number of query heads"
            )
        if self.latent_size:
            self._check_latents()
        elif self.rotated_size % 2 or not 0 <= self.rope_size <= self.head_size:
            name = "rope_size" if self.rope_size else "head_size"
            raise InputError(
                f"config.model.{name} is {self.rotated_size}; rotary embeddings need an even size, "
                f"at most that of a head (config.model.head_size, {self.head_size})"
            )
        if self.has_states:
            self._check_states()
        if any(window < 0 for window in self.windows) or (self.windows and not any(self.windows)):
            raise InputError(
                f"config.model.windows is {self.windows}; give a number of tokens for each layer "
                "of the pattern, 0 where a layer looks at all, and () where every layer does"
            )
        if self.num_experts < 0:
            raise InputError(
                f"config.model.num_experts is {self.num_experts}; it must be 0 (a dense model) or "
                "the number of experts of a layer"
            )
        if 0 < self.num_experts < self.experts_per_token:
            raise InputError(
                f"config.model.experts_per_token is {self.experts_per_token}, more than "
                f"config.model.num_experts ({self.num_experts}); a token uses each expert once"
            )
        if self.num_experts:
            self._check_mixture()
        self.rope_scaling.validate()
        check_choices(self, "config.model")

    def _check_latents(self) -> None:
        if self.num_kv_heads != self.num_heads:
            raise InputError(
                f"config.model.num_kv_heads is {self.num_kv_heads} and config.model.num_heads "
                f"{self.num_heads}; with latent attention every head has a key and a value of its "
                "own, so set both to the same number"
            )
        if self.rope_size < 2 or self.rope_size % 2 or self.rope_size >= self.head_size:
            raise InputError(
                f"config.model.rope_size is {self.rope_size}; it must be even, and at least 2 less "
                f"than config.model.head_size ({self.head_size})"
            )
        if not 0 < self.value_size <= self.head_size:
            raise InputError(
                f"config.model.value_size is {self.value_size}; it must be from 1 to "
                f"config.model.head_size ({self.head_size})"
            )
        for field in ("attention_bias", "attention_sinks", "query_key_norm", "windows"):
            if getattr(self, field):
                raise InputError(
                    f"config.model.{field} is {getattr(self, field)!r}; latent attention is "
                    "computed without"
                )

    def _check_states(self) -> None:
        every = self.attention_every
        if every < 2 or self.num_layers % every:
            raise InputError(
                f"config.model.attention_every is {every}; it must be at least 2 and divide "
                f"config.model.num_layers ({self.num_layers})"
            )
        for field in ("linear_key_heads", "linear_value_heads"):
            if getattr(self, field) < 1 or self.linear_value_heads % self.linear_key_heads:
                raise InputError(
                    f"config.model.{field} is {getattr(self, field)}; "
                    "config.model.linear_value_heads must be a multiple of "
                    "config.model.linear_key_heads, both at least 1"
                )
        for field, least in (("linear_key_size", 1), ("linear_value_size", 1), ("conv_size", 2)):
            if getattr(self, field) < least:
                raise InputError(
                    f"config.model.{field} is {getattr(self, field)}; it must be at least {least}"
                )
        without = ("latent_size", "windows", "no_rope_every", "attention_sinks", "post_norms")
        for field in (*without, "out_bias", "num_dense_layers"):
            if getattr(self, field):
                raise InputError(
                    f"config.model.{field} is {getattr(self, field)!r}; models with layers of "
                    "linear attention are computed without"
                )

    def _check_mixture(self) -> None:
        if not 0 <= self.num_dense_layers < self.num_layers:
            raise InputError(
                f"config.model.num_dense_layers is {self.num_dense_layers}; it must be less than "
                f"the number of layers, so give a larger config.model.num_layers than "
                f"{self.num_layers}"
            )
        groups, chosen = self.expert_groups, self.groups_per_token
        size = self.num_experts // max(groups, 1)
        if groups < 1 or self.num_experts % groups or (groups > 1 and size < self.group_score):
            raise InputError(
                f"config.model.num_experts is {self.num_experts}, which are not "
                f"config.model.expert_groups ({groups}) groups of as many experts"
            )
        if not 1 <= chosen <= groups or self.experts_per_token > chosen * size:
            raise InputError(
                f"config.model.groups_per_token is {chosen}; a token's {self.experts_per_token} "
                f"experts must be in so many of {groups} groups of {size}"
            )

    def _check_numbers(self) -> None:
        sizes = ("num_layers", "width", "num_heads", "num_kv_heads", "head_size", "ffn_size")
        sizes += ("experts_per_token", "expert_ffn_size")
        check_bounds(self, "config.model", dict.fromkeys(sizes, (1, None)))
        for field in ("rope_theta", "norm_eps", "init_scale", "expert_scale"):
            if not 0 < getattr(self, field) < math.inf:
                raise InputError(
                    f"config.model.{field} is {getattr(self, field)}; it must be a positive number"
                )
        for field, none in (
            ("latent_size", "keys and values of heads"),
            ("query_latent_size", "queries from the residual stream"),
            ("shared_ffn_size", "no shared network"),
            ("window_rope_theta", "config.model.rope_theta"),
            ("query_pre_attn_scalar", "config.model.head_size"),
            ("attention_softcap", "no cap"),
            ("final_softcap", "no cap"),
        ):
            if not 0 <= getattr(self, field) < math.inf:
                raise InputError(
                    f"config.model.{field} is {getattr(self, field)}; it must be a positive "
                    f"number, or 0 for {none}"
                )
