# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The model families whose `transformers` checkpoints can be read and written.

A module has the families of one line, such as qwen.py; family.py says what a family is, weights.py
how tensors are named, and table.py lists the families. To add one whose layers the decoder has
already:

1. write its `Family` in the module of its line, or in a new one: which settings of ModelConfig its
   layers have, which of them config.json gives, and which keys of config.json must hold which
   value, because the decoder computes only that;
2. give it its weights: the tensors that have other names or other axes than those of Llama;
3. name it in table.py.

If its layers need more, ModelConfig gets a setting (and PLAIN its value where layers are without),
hf_settings.py its key of config.json, parameters.py the parameters, models/layers the computation;
layers never ask for a family.

Then let tests/reference/make_reference.py write a small model of it, and name one in presets.py:
tests/test_families.py and tests/test_presets.py ask for both. tests/test_adding_a_family.py reads,
computes and writes a family that is made up.
"""
