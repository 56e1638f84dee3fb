# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A child's side: a job comes as a line of JSON, and so does what came of it.

Imports the standard library alone: engines of other environments use it.
"""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

PACKAGES = ("jax", "torch", "transformers", "trl", "google-tunix")


Answer = Callable[[dict[str, Any]], dict[str, Any]]


def answer_jobs(answer: Answer) -> None:
    """Answers jobs until there are no more. Whatever libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(answer_line(answer, line), file=out, flush=True)


def read_again(
    job: dict[str, Any], generate: Callable[[list[list[int]], int], list[list[int]]]
) -> list[list[int]]:
    """Conversations: behind each message a turn, for which all of it is read again.

    `generate` gives so many ids behind each of some contexts, which are equally long. Returns what
    was sampled in each conversation.
    """
    contexts: list[list[int]] = [[] for _ in job["messages"]]
    replies: list[list[int]] = [[] for _ in job["messages"]]
    for turn in range(len(job["messages"][0])):
        for context, messages in zip(contexts, job["messages"], strict=True):
            context += messages[turn]
        made = generate(contexts, job["turn_tokens"])
        for context, reply, ids in zip(contexts, replies, made, strict=True):
            context += ids
            reply += ids
    return replies


def answer_line(answer: Answer, line: str) -> str:
    """Returns the answer as JSON; a job that is empty asks for versions."""
    job = json.loads(line)
    return json.dumps(answer(job) if job else _versions())


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
