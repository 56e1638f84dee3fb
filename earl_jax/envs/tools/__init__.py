# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Tools: functions that a policy calls, the calls in its replies, and the environment of both."""
