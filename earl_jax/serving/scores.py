# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs in the answers of JetStream's service, whose messages have no field for them.

They are two more fields of a sample, which clients of JetStream's own messages keep unread:

    message Scores {
      repeated float logprob = 1001;             // under what each token was drawn from
      repeated float model_logprob = 1002;       // under the model itself, untempered, nothing cut
    }

A client reads `Scores.FromString(sample.SerializeToString())`, with a Scores of its own or this
one. A sample has the fields that its request wants, a number for each of its `token_ids`.
"""

from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

LOGPROB, MODEL_LOGPROB = "logprob", "model_logprob"
_FIELDS = {LOGPROB: 1001, MODEL_LOGPROB: 1002}


def _make_scores() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="earl_jax/scores.proto", package="earl_jax", syntax="proto2"
    )
    message = file.message_type.add(name="Scores")
    for name, number in _FIELDS.items():
        message.field.add(
            name=name,
            number=number,
            type=descriptor_pb2.FieldDescriptorProto.TYPE_FLOAT,
            label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("earl_jax.Scores"))


Scores = _make_scores()


def add_scores(sample: Any, **scores: Sequence[float]) -> None:
    """Adds these log-probs, by the names of their fields, to a sample."""
    sample.MergeFromString(Scores(**scores).SerializeToString())
