#!/bin/bash
# usage: tpu_scripts/xpk.sh [--dry-run] --name=N --cluster=C --zone=Z --type=v6e-64 --image=IMAGE [--num_slices=1] [--project=P] --config=FILE --workdir=DIR [--config.KEY=VALUE ...]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Starts a run on a GKE cluster made by xpk, which writes the JobSet itself; without the flag, xpk
# does not restart a run that lost a process (status 1) or was stopped, saved (75). The workdir is on a storage attached to the
# cluster (xpk storage attach). IMAGE: gpu_scripts/Dockerfile with EXTRA=tpu.
set -euo pipefail
usage() { sed -n '2s/^# //p' "$0" >&2; exit 2; }
name='' cluster='' zone='' type='' image='' num_slices=1 project='' dry_run='' arguments=()
for argument in "$@"; do
  case $argument in
    --name=* | --cluster=* | --zone=* | --type=* | --image=* | --num_slices=* | --project=*)
      declare "${argument:2}" ;;
    --dry-run) dry_run=1 ;;
    *) arguments+=("$argument") ;;
  esac
done
[[ " ${arguments[*]-} " == *" --config="* && " ${arguments[*]} " == *" --workdir="* ]] || usage
[[ $name && $cluster && $zone && $type && $image ]] || usage

# A check is made once.
restarts=100
[[ " ${arguments[*]} " != *" --check "* ]] || restarts=0
printf -v words ' %q' "${arguments[@]}"
command=(xpk workload create --workload="$name" --cluster="$cluster" --zone="$zone"
  ${project:+--project="$project"} --tpu-type="$type" --num-slices="$num_slices"
  --docker-image="$image" --max-restarts="$restarts" "--restart-on-exit-codes=1,75" --command="python -m earl_jax.main$words")
if [[ $dry_run ]]; then
  printf '%q ' "${command[@]}"; echo
  exec "${PYTHON:-$(dirname "$0")/../.venv/bin/python}" -m earl_jax.config "${arguments[@]}"
fi
"${command[@]}"
