# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention (arXiv 2405.04434, section 2.1): all heads read one latent of a token."""

from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.layers.parts import Parts

# Of the norms of latents, whatever that of others is, as in `transformers`.
_LATENT_EPS = 1e-6


def attend_latents(layer: Any, x_BTD: jax.Array, parts: Parts) -> jax.Array:
    """Returns what heads of latent attention attended to, BTKGH (arXiv 2405.04434, section 2.1).

    Training projects a key and a value of each head from the latents (eq. 10 to 18). To read cached
    latents as they are, the projection to keys is taken to the queries, and that to values to the
    results (appendix C): of latents there is one head, so that all heads of queries are its group.
    """
    config = parts.config
    inside = config.head_size - config.rope_size
    if config.query_latent_size:
        low_BTA = parts.project("BTD,DA->BTA", x_BTD, layer["query_down"])
        low_BTA = parts.norm(low_BTA, layer["query_down_norm"], _LATENT_EPS)
        query_BTKGH = parts.project("BTA,AKGH->BTKGH", low_BTA, layer["query_up"])
    else:
        query_BTKGH = parts.project("BTD,DKGH->BTKGH", x_BTD, layer["query"])
    query_BTKGH, turned_BTKGH = jnp.split(query_BTKGH, [inside], axis=-1)
    row_BTA = parts.project("BTD,DA->BTA", x_BTD, layer["latent"])
    latent_BTA, key_BTH = jnp.split(row_BTA, [config.latent_size], axis=-1)
    latent_BTA = parts.norm(latent_BTA, layer["latent_norm"], _LATENT_EPS)
    turned_BTKGH, key_BTH = map(parts.rotate, (turned_BTKGH, key_BTH))
    if not parts.reads_latents:
        both_BTKH = parts.project("BTA,AKH->BTKH", latent_BTA, layer["latent_up"])
        own_BTKH, value_BTKH = jnp.split(both_BTKH, [inside], axis=-1)
        shape = *own_BTKH.shape[:-1], config.rope_size
        key_BTKH = jnp.broadcast_to(key_BTH[:, :, None], shape)
        key_BTKH = jnp.concatenate([own_BTKH, key_BTKH], axis=-1)
        query_BTKGH = jnp.concatenate([query_BTKGH, turned_BTKGH], axis=-1)
        return parts.attend(query_BTKGH, key_BTKH, value_BTKH, None)
    key_AKH, value_AKH = jnp.split(layer["latent_up"], [inside], axis=-1)
    query_BTGKA = jnp.einsum("BTKGH,AKH->BTGKA", query_BTKGH, key_AKH)
    query_BTGKA = jnp.concatenate([query_BTGKA, turned_BTKGH.swapaxes(2, 3)], axis=-1)
    row_BTA = jnp.concatenate([latent_BTA, key_BTH], axis=-1)
    mixed_BTGKA = parts.attend(query_BTGKA, row_BTA[:, :, None], None, None)
    return jnp.einsum("BTGKA,AKH->BTKGH", mixed_BTGKA, value_AKH)
