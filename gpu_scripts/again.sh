#!/bin/bash
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Runs a command, and again as long as it ends with status 75: a run of several processes of which
# one had too little memory for an update, and which goes on with less from its newest checkpoint.
# Any other end is the end. On every host of a run:
#
#   gpu_scripts/again.sh .venv/bin/python -m earl_jax.main --config=configs/NAME.py ...
#
# At most EARL_JAX_RESTARTS times again (10), each EARL_JAX_RESTART_AFTER_S seconds (5) later: a mesh
# and a way to train on it fail once each. SIGTERM and SIGINT go on to the command as SIGTERM: it
# saves, and is not started again.
set -uo pipefail

if [[ $# -eq 0 ]]; then
  echo "usage: $0 COMMAND [ARGUMENT ...]" >&2
  exit 2
fi
most=${EARL_JAX_RESTARTS:-10}
stopped=
child=
trap 'stopped=1; [[ -n $child ]] && kill -TERM "$child" 2>/dev/null' TERM INT

for ((restarts = 0; ; restarts++)); do
  "$@" &
  child=$!
  wait "$child"
  status=$?
  # A signal ends the wait and not the command.
  while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    status=$?
  done
  if [[ $status -ne 75 || -n $stopped ]]; then
    exit "$status"
  fi
  if ((restarts == most)); then
    echo "$0: too little memory again, after $most restarts; giving up" >&2
    exit "$status"
  fi
  echo "$0: too little memory; starting the run again with less ($((restarts + 1)) of $most)" >&2
  # The first process stays for three seconds behind the others, and keeps its port.
  sleep "${EARL_JAX_RESTART_AFTER_S:-5}"
  if [[ -n $stopped ]]; then
    exit "$status"
  fi
done
