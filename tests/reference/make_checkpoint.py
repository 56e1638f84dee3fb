# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a Qwen2 checkpoint with random weights: a small input for runs with config.model.path.

    uv run python tests/reference/make_checkpoint.py FOLDER [--tied] [--seed=0]

Without torch. The tokenizer and the chat template are those of tests/tokenizers/qwen2.
"""

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
TOKENIZER = ROOT / "tests/tokenizers/qwen2"
# More rows than the tokenizer has entries, as in Qwen's own: they divide over a tensor axis.
VOCAB_SIZE = 384


def write_checkpoint(folder: Path, *, tied: bool, seed: int) -> None:
    """A checkpoint in two files. Its biases are not zero, so that losing one would show.

    Raises:
        ValueError: the folder exists already.
    """
    import jax

    from earl_jax.envs.text.tokenizer import load_tokenizer
    from earl_jax.models.checkpoints.hf_write import save_checkpoint
    from earl_jax.models.config import ModelConfig
    from earl_jax.models.parameters import init_parameters, parameter_specs

    model = ModelConfig(
        num_layers=2,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        ffn_size=128,
        attention_bias=True,
        tie_embeddings=tied,
    )
    params = init_parameters(parameter_specs(model, VOCAB_SIZE), jax.random.key(seed))
    for number, name in enumerate(("query_bias", "key_bias", "value_bias")):
        key = jax.random.fold_in(jax.random.key(seed), number)
        params["layers"][name] = 0.1 * jax.random.normal(key, params["layers"][name].shape)
    save_checkpoint(
        folder,
        params,
        model=model,
        vocab_size=VOCAB_SIZE,
        tokenizer=load_tokenizer(TOKENIZER),
        dtype="float32",
        max_positions=4096,
        max_shard_bytes=300_000,
    )
    # A turn ends with either of two tokens, as Qwen's do.
    shutil.copy(TOKENIZER / "generation_config.json", folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    try:
        write_checkpoint(flags.folder, tied=flags.tied, seed=flags.seed)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
