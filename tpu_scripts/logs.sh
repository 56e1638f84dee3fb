#!/bin/bash
# usage: tpu_scripts/logs.sh --name=N --zone=Z [--mig] [--project=P] [--dir=earl_jax] [--dry-run]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Shows the last lines of every worker's log, and follows that of worker 0. See flags.sh.
set -euo pipefail
source "$(dirname "$0")/flags.sh"
source "$(dirname "$0")/workers.sh"
read_flags "name zone" "$@"
on_all ssh "{}" --command="hostname; tail -n 5 $dir/run.log"
follow=(--command="tail -n 50 -f $dir/run.log")
if [[ $mig ]]; then
  run gcloud compute ssh "$(instances | head -n 1)" "${where[@]}" "${follow[@]}"
else
  run gcloud compute tpus queued-resources ssh "$name" "${where[@]}" --node=0 --worker=0 "${follow[@]}"
fi
