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
import time
from collections.abc import Callable
from typing import Any

PACKAGES = ("jax", "torch", "transformers", "trl", "google-tunix")


Answer = Callable[[dict[str, Any]], dict[str, Any]]
# Gives so many ids behind each of some contexts, which are equally long, for a job and a seed.
Generate = Callable[[list[list[int]], int, dict[str, Any], int], list[list[int]]]


def answer_jobs(answer: Answer) -> None:
    """Answers jobs until there are no more. Whatever libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(answer_line(answer, line), file=out, flush=True)


def answer_generation(generate: Generate) -> None:
    """Answers jobs of static batches, and of conversations (`read_again`); times them."""

    def behind(job: dict[str, Any]) -> list[list[int]]:
        if "messages" not in job:
            return static_batches(job, generate)
        return read_again(job, lambda contexts, new: generate(contexts, new, job, len(contexts[0])))

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        start_s = time.perf_counter()
        replies = behind(job)
        seconds = time.perf_counter() - start_s
        return {"seconds": seconds, "tokens": sum(map(len, replies)), "replies": replies}

    answer_jobs(answer)


def static_batches(job: dict[str, Any], generate: Generate) -> list[list[int]]:
    """Static batches in order of arrival; each goes on until its longest reply is there."""
    replies: list[list[int]] = []
    prompts, lengths, size = job["prompts"], job["lengths"], job["batch"]
    for first in range(0, len(prompts), size):
        wanted = lengths[first : first + size]
        made = generate(prompts[first : first + size], max(wanted), job, first)
        replies += [ids[:length] for ids, length in zip(made, wanted, strict=True)]
    return replies


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
