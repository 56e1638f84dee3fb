#!/bin/bash
# usage: tpu_scripts/setup.sh --name=N --zone=Z [--mig] [--project=P] [--dir=earl_jax] [--prepare=COMMAND] [--dry-run]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Copies this project's commit to every worker, and installs it there. See flags.sh.
set -euo pipefail
source "$(dirname "$0")/flags.sh"
source "$(dirname "$0")/workers.sh"
read_flags "name zone" "$@"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
run git -C "$(dirname "$0")/.." archive --format=tar.gz --output="$folder/earl_jax.tar.gz" HEAD
on_all scp "$folder/earl_jax.tar.gz" "{}:earl_jax.tar.gz"
command="${prepare:+$prepare && }mkdir -p $dir && tar xzf earl_jax.tar.gz -C $dir && cd $dir"
# Ubuntu 24.04 lets pip install nothing for a user without that variable; older pips do not read it.
command+=" && PIP_BREAK_SYSTEM_PACKAGES=1 pip install -q --user uv && PATH=~/.local/bin:\$PATH uv sync --locked --no-dev --extra tpu"
on_all ssh "{}" --command="$command"
