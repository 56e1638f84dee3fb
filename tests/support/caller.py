# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A served policy that calls a tool, and says what it is after the tool has answered."""

from itertools import pairwise
from pathlib import Path

from earl_jax.envs.text.tokenizer import load_tokenizer
from tests.support.served import MODEL, SAYING, save_bigrams

# Behind tools: a text and a call. Behind the answer of a tool: SUM. Without tools: SAYING.
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
SUM = "3"
# Behind the openings of a call of any tool, and of a call of `add`.
ANY = '{"name": "add", "arguments": {"a": 5, "b": 6}}</tool_call>'
NAMED = ' {"a": 7, "b": 8}}</tool_call>'
_TEMPLATE = """\
{%- if tools %}<|user|>{{ tools | tojson }} <tool_call><|end|>{% endif -%}
{%- for m in messages -%}
<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.role[0] }} {{ m.content }}
{%- for call in m.tool_calls %}{{ call.id }}{{ call.function | tojson }}{% endfor %}
{{- m.tool_call_id }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>
{{- '!' if messages[-1].role == 'tool' else '' if tools else '<' }}{% endif %}"""


def save_caller(folder: Path) -> None:
    """Saves its checkpoint, in whose vocabulary a call is one token."""
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.add_tokens([CALL, ANY, NAMED])
    after = dict[int, int]()
    for text in (f"I{CALL}", f"!{SUM}", f"\n{ANY}", f":{NAMED}", SAYING):
        after |= pairwise([*tokenizer.encode(text), tokenizer.eos_token_id])
    after[tokenizer.convert_tokens_to_ids("<|assistant|>")] = tokenizer.encode("I")[0]
    save_bigrams(folder, tokenizer, after)
