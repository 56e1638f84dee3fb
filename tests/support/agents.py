# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Agents by the names that a config gives them."""


def agent(base_url):
    """Stands for the agent that a test puts here."""
    raise NotImplementedError


def needs_a_row(base_url, row):
    """Is an agent that needs a task of a dataset."""
    raise NotImplementedError
