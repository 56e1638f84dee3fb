# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A server process of python -m earl_jax.serve, a client of it, and what it must say.

The client uses JetStream's own messages and nothing of ours.
"""

import contextlib
import dataclasses
import functools
import json
import re
import signal
import time
from pathlib import Path

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_write import save_checkpoint
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows, head_weights
from earl_jax.models.fingerprint import fingerprint
from earl_jax.models.parameters import is_spec, parameter_specs
from earl_jax.run.build import build_run
from earl_jax.run.workdir import keep_config
from earl_jax.serving.scores import Scores
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.train.checkpoint import Checkpoints
from tests.support import environment_without
from tests.support.forks import start_python
from tests.support.references import REFERENCE
from tests.support.settings import make_config

MODEL = REFERENCE / "qwen2_tied"
CONTEXT, VOCAB = 128, 320
# Any that are free.
PORTS = ("--port=0", "--grpc_port=0")
# What the parrot says behind "<", in a vocabulary in which most of these are several tokens.
SAYING = "<日🙂é ok"
PARROT_CONTEXT = 8192

Code = grpc.StatusCode


# A server process, and a client.


class Server:
    """A running server process: its address once it is ready, and its end."""

    def __init__(self, *line: str):
        self.process = start_python(*line, env=environment_without("JAX_"))
        deadline_s = time.monotonic() + 200
        while "\n" not in self.process.output()[0] and time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.ready_line = self.process.output()[0].partition("\n")[0]
        pattern = r" at (http://127\.0\.0\.1:\d+) \(gRPC: (127\.0\.0\.1:\d+)\):"
        found = re.search(pattern, self.ready_line)
        if not found:
            self.end()
            raise AssertionError(f"{self.ready_line}{self.errors}")
        self.http, self.address = found[1], found[2]
        self.channel = grpc.insecure_channel(self.address)
        self.stub = jetstream_pb2_grpc.OrchestratorStub(self.channel)

    @property
    def errors(self) -> str:
        """The text that it has written to stderr."""
        return self.process.output()[1]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its status after this signal, or after it has ended on its own."""
        self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


@contextlib.contextmanager
def serving(*flags: str):
    server = Server("-m", "earl_jax.serve", *PORTS, *flags)
    try:
        yield server
    finally:
        with contextlib.closing(server.channel):
            status = server.end()
    assert status == 0, server.errors


def request(prompt, max_tokens: int, **fields):
    """A DecodeRequest for a text or for ids."""
    if isinstance(prompt, str):
        fields["text_content"] = {"text": prompt}
    else:
        fields["token_content"] = {"token_ids": [int(token) for token in prompt]}
    return jetstream_pb2.DecodeRequest(max_tokens=max_tokens, **fields)


def sampling_metadata(**wishes) -> tuple[tuple[str, str], ...]:
    """Metadata that say how a reply is drawn."""
    return (("sampling", json.dumps(wishes)),)


def finish_reason(call) -> str:
    """Why a reply that was read to its end ended."""
    [reason] = [value for key, value in call.trailing_metadata() if key == "finish-reason"]
    return reason


def ids_of(call) -> list[int]:
    return [i for r in call for s in r.stream_content.samples for i in s.token_ids]


def scores_of(call) -> list[dict[str, float]]:
    """The log-probs of each token, read as any client of JetStream's messages can."""
    names = {1001: "logprob", 1002: "model_logprob"}
    found = []
    for response in call:
        [sample] = response.stream_content.samples
        scores = {}
        for field in UnknownFieldSet(sample):
            number = float(np.uint32(field.data).view(np.float32))
            scores.setdefault(names[field.field_number], []).append(number)
        read = Scores.FromString(sample.SerializeToString())
        assert scores == {field.name: list(values) for field, values in read.ListFields()}
        for index, token in enumerate(sample.token_ids):
            found.append({"token": token, **{name: each[index] for name, each in scores.items()}})
        assert all(len(each) == len(sample.token_ids) for each in scores.values())
    return found


def refusal(call) -> tuple[grpc.StatusCode, str]:
    """Returns the error of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


# What is expected.


@functools.cache
def logits_step(model: ModelConfig, context_tokens: int):
    layout = make_layout(MeshShape(), jax.devices()[:1])

    @jax.jit
    def step(params, tokens_T, length):
        segments_BT = (jnp.arange(context_tokens) < length).astype(jnp.int32)[None]
        hidden_BTD = forward_rows(model, layout, params, tokens_T[None], segments_BT)
        return hidden_BTD[0, length - 1] @ head_weights(params)

    return step


def greedy(model: ModelConfig, params, prompt, count: int, stops) -> list[int]:
    """The likeliest tokens, up to a stop: a full forward pass for each, no cache."""
    step = logits_step(model, CONTEXT)
    row, length = np.zeros(CONTEXT, np.int32), len(prompt)
    row[:length] = prompt
    sampled = []
    for place in range(length, length + count):
        token = int(jnp.argmax(step(params, row, place)))
        if token in stops:
            break
        sampled.append(token)
        if place < CONTEXT:
            row[place] = token
    return sampled


@functools.cache
def loaded():
    checkpoint = open_checkpoint(MODEL)
    return checkpoint.model, load_parameters(checkpoint, make_layout(MeshShape()))


def expected(prompt, count: int) -> list[int]:
    """Returns the text that the server of the fixture must answer."""
    return greedy(*loaded(), prompt, count, end_ids())


def end_ids() -> set[int]:
    """Returns the ids that end a reply."""
    tokenizer = load_tokenizer(MODEL)
    return {tokenizer.eos_token_id, tokenizer.pad_token_id}


def prompt(number: int, length: int) -> list[int]:
    return np.random.default_rng(number).integers(4, VOCAB, length).tolist()


def save_parrot(
    folder: Path, *, windows: tuple[int, ...] = (), max_positions: int = PARROT_CONTEXT
) -> None:
    """A checkpoint by which SAYING is said to its end, and "x" is followed by "x" without end."""
    tokenizer = load_tokenizer(MODEL)
    sampled = [*tokenizer.encode(SAYING), tokenizer.eos_token_id]
    [forever] = tokenizer.encode("x")
    after = dict(zip(sampled, sampled[1:], strict=False)) | {forever: forever}
    save_bigrams(folder, tokenizer, after, windows=windows, max_positions=max_positions)


def save_bigrams(
    folder: Path,
    tokenizer,
    after: dict[int, int],
    *,
    windows: tuple[int, ...] = (),
    max_positions: int = PARROT_CONTEXT,
) -> None:
    """A checkpoint that says behind each of these tokens the one that is `after` it.

    Its layers add nothing: the next token depends on the last alone.
    """
    model = ModelConfig(
        num_layers=1,
        width=64,
        num_heads=2,
        num_kv_heads=1,
        head_size=8,
        ffn_size=8,
        windows=windows,
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: np.full(spec.shape, 0 if spec.deviation else spec.constant, np.float32),
        parameter_specs(model, VOCAB),
        is_leaf=is_spec,
    )
    embed_VD = rng.normal(size=(VOCAB, model.width)).astype(np.float32)
    embed_VD /= np.linalg.norm(embed_VD, axis=1, keepdims=True)
    head_DV = np.zeros((model.width, VOCAB), np.float32)
    for token, next_token in after.items():
        head_DV[:, next_token] += embed_VD[token]
    params = jax.tree.map(jnp.asarray, params | {"embed": embed_VD, "head": head_DV})
    save_checkpoint(
        folder,
        params,
        model=model,
        vocab_size=VOCAB,
        tokenizer=tokenizer,
        dtype="float32",
        max_positions=max_positions,
    )


def saying() -> list[int]:
    """Returns the parrot's answer to "<"."""
    return load_tokenizer(MODEL).encode(SAYING)[1:]


def save_run(folder: Path, rank: int):
    """A run as training leaves it: config, tokenizer, a checkpoint of random weights.

    With a `rank`, these are adapters. Returns its world and what the decoder computes with.
    """
    config = make_config(
        {
            "model": {"width": 32, "ffn_size": 64},
            "devices": {"num_cpu_devices": 4},
            "rollout": {"num_slots": 8, "episodes_per_step": 16},
            "train": {"learning_rate": 0.001, "lora": {"rank": rank} if rank else {}},
        }
    )
    world = build_run(config)
    folder.mkdir(parents=True, exist_ok=True)
    keep_config(world.config, world.origin.tokenizer, folder)
    state = world.learner.init_state(MeshShape())
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), state.params)
    state = dataclasses.replace(state, params=noisy)
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    placement = {
        "rollout": ["data=4", 16, 8, False],
        "train": ["data=4", 1, "none"],
        "max_tokens": 32,
        "calm_steps": 0,
        "row_shapes": {},
        "most_tokens": 32,
        "most_length": 32,
    }
    table = {"entries": {}, "failures": []}
    position = {"placement": placement, "history": [], "throughput": table}
    if state.base is not None:
        position["base_fingerprint"] = int(fingerprint(state.base))
    checkpoints.save(7, state, position)
    checkpoints.close()
    return world, world.learner.policy(state)
