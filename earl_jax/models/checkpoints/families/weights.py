# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint, and those that most families have."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint: its name, and its axes ("KGH D").

    Letters are the axes of the parameter (parameters.py); those that stand together are one axis of
    the tensor. A dot is an axis of one number. "{layer}" and "{expert}" in the name are numbers;
    each layer and expert is a tensor of its own.

    Where parameters share a tensor, one of its axes is cut between letters, at "|": each place of
    those before has the numbers of all these parameters, one parameter after the other in the order
    of the table. Of "D F|" and "D F|" the one has the even columns, the other the odd ones; of
    "|KH D" and "|F D" the one has the first rows, the other those behind. Of the numbers of such a
    place the parameter's begin at `first`, and there are `total`.
    """

    name: str
    axes: str
    first: int = 0
    total: int = 0

    @property
    def letters(self) -> str:
        """The axes that the parameter has too, in the order of the tensor."""
        return "".join(filter(str.isalpha, self.axes))

    @property
    def is_shared(self) -> bool:
        """True if the tensor has another parameter too."""
        return "|" in self.axes

    @property
    def shared_letters(self) -> str:
        """The letters behind the cut."""
        return self.axes.partition("|")[2].partition(" ")[0]


def layer_weights(**tensors: tuple[str, str]) -> dict[str, Weight]:
    """Returns a table of weights of layers: parameter=(name of the tensor in its layer, axes).

    query=("self_attn.q_proj.weight", "KGH D") -> {"layers.query":
    Weight("model.layers.{layer}.self_attn.q_proj.weight", "KGH D")}
    """
    return {
        f"layers.{parameter}": Weight(f"model.layers.{{layer}}.{name}", axes)
        for parameter, (name, axes) in tensors.items()
    }


# Keyed by where parameters.py has the parameter. These are Llama's.
PLAIN_WEIGHTS: Mapping[str, Weight] = {
    "embed": Weight("model.embed_tokens.weight", "V D"),
    **layer_weights(
        attention_norm=("input_layernorm.weight", "D"),
        query=("self_attn.q_proj.weight", "KGH D"),
        key=("self_attn.k_proj.weight", "KH D"),
        value=("self_attn.v_proj.weight", "KH D"),
        out=("self_attn.o_proj.weight", "D KGH"),
        ffn_norm=("post_attention_layernorm.weight", "D"),
        gate=("mlp.gate_proj.weight", "F D"),
        up=("mlp.up_proj.weight", "F D"),
        down=("mlp.down_proj.weight", "D F"),
    ),
    "final_norm": Weight("model.norm.weight", "D"),
    "head": Weight("lm_head.weight", "V D"),
}
BIASES: Mapping[str, Weight] = layer_weights(
    query_bias=("self_attn.q_proj.bias", "KGH"),
    key_bias=("self_attn.k_proj.bias", "KH"),
    value_bias=("self_attn.v_proj.bias", "KH"),
)
# One norm for each head of queries and keys, or one for all of them at once.
HEAD_NORMS: Mapping[str, Weight] = layer_weights(
    query_norm=("self_attn.q_norm.weight", "H"),
    key_norm=("self_attn.k_norm.weight", "H"),
)
ALL_HEADS_NORMS: Mapping[str, Weight] = layer_weights(
    query_norm=("self_attn.q_norm.weight", "KGH"),
    key_norm=("self_attn.k_norm.weight", "KH"),
)
EXPERTS: Mapping[str, Weight] = layer_weights(
    router=("mlp.gate.weight", "X D"),
    expert_gate=("mlp.experts.{expert}.gate_proj.weight", "F D"),
    expert_up=("mlp.experts.{expert}.up_proj.weight", "F D"),
    expert_down=("mlp.experts.{expert}.down_proj.weight", "D F"),
)
