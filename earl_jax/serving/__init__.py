# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine behind JetStream's gRPC service and OpenAI's HTTP endpoints."""
