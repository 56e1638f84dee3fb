# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The text of a conversation for the served policy, by its chat template, and the ids of a text.

`text_process` imports this module, and must start quickly: it imports no JAX.
"""

import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerFast

from earl_jax.settings.errors import InputError

# Variables that this module or `transformers` gives to the template.
_OURS = {"messages", *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters}


def prompt_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Returns a function from a prompt's text to its ids; control tokens in it become their ids.

    A beginning-of-text token is put before it where the tokenizer is made so, and the text does
    not begin with it. The function may be used by several threads, and raises InputError for text
    that is no UTF-8.
    """
    # A copy: encoding with the tokenizer itself, as a `ChatRenderer` does, may change its settings.
    backend, bos = copy.deepcopy(tokenizer.backend_tokenizer), tokenizer.bos_token
    backend.encode_special_tokens = False
    backend.no_truncation()
    backend.no_padding()

    def ids_of(text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(
                "the text holds a lone surrogate, which no text can have; remove it"
            ) from None
        whole = bool(bos) and text.startswith(bos)
        return backend.encode(text, add_special_tokens=not whole).ids

    return ids_of


class ChatPrompt:
    """The chat template of a tokenizer; `arguments` are given to it beside those of a request."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._tokenizer, self._arguments = tokenizer, dict(arguments)
        added = tokenizer.added_tokens_decoder.values()
        self._control = tuple(str(token) for token in added if token.special)

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        arguments: Mapping[str, Any],
        opening: str = "",
    ) -> str:
        """Returns the text of the conversation, up to the policy's reply, which has this opening.

        Raises InputError for a conversation that the template refuses, for tools and arguments
        that it does not read, and for control tokens in the text of anyone but the policy.
        """
        if not self._tokenizer.chat_template:
            raise InputError("this policy has no chat template; send a text to /v1/completions")
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                self._check(f"messages[{number}]", message)
        self._check("tools", tools)
        self._check("chat_template_kwargs", arguments)
        for name in arguments:
            read = re.search(rf"\b{re.escape(name)}\b", str(self._tokenizer.chat_template))
            if name in _OURS or not read:
                raise InputError(
                    f"chat_template_kwargs.{name} is not read by this policy's chat template, or "
                    "is not a request's to set; remove it"
                )
        written = self._write(messages, tools, arguments)
        if tools and written == self._write(messages, (), arguments):
            raise InputError(
                "this policy's chat template does not show tools; leave them out, or describe them "
                "in a message"
            )
        return written + opening

    def _check(self, where: str, given: Any) -> None:
        text = json.dumps(given, ensure_ascii=False)
        found = [token for token in self._control if token in text]
        if found:
            raise InputError(
                f"{where} contains the control token {found[0]!r}, which would begin or end a "
                "message; remove it"
            )

    def _write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        arguments: Mapping[str, Any],
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **{**self._arguments, **arguments},
            )
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise InputError(
                f"this policy's chat template refuses the messages: "
                f"{str(error)[:300] or type(error).__name__}"
            ) from error
