#!/bin/bash
# usage: tpu_scripts/create.sh --name=N --zone=Z --type=v6e-64 [--num_slices=N] [--spot] [--project=P] [--version=V] [--dry-run]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Requests TPU VMs (v4 to v6e) as a queued resource, and waits until they are there. One that is
# there stays; one that was preempted or failed is deleted first. With --mig: create_mig.sh.
set -euo pipefail
source "$(dirname "$0")/flags.sh"
read_flags "name zone type" "$@"
[[ ! $mig ]] || exec "$(dirname "$0")/create_mig.sh" "${flags[@]}"

case ${version:-$type} in
  v4-*) version=tpu-ubuntu2204-base ;;
  v5litepod-*) version=v2-alpha-tpuv5-lite ;;
  v5p-*) version=v2-alpha-tpuv5 ;;
  v6e-*) version=v2-alpha-tpuv6e ;;
esac
[[ $version ]] || { echo "--type=$type: give its --version=V, or --mig for TPU7x and later" >&2; exit 2; }
nodes=(--node-id="$name")
((num_slices == 1)) || nodes=(--node-count="$num_slices" --node-prefix="$name")
queued=(gcloud compute tpus queued-resources)
state() {
  [[ $dry_run ]] || "${queued[@]}" describe "$name" "${where[@]}" --format='value(state.state)' 2>/dev/null || true
}

found=$(state)
case $found in
  SUSPENDING | SUSPENDED | FAILED)
    run "${queued[@]}" delete "$name" "${where[@]}" --force --quiet
    found='' ;;
esac
[[ $found ]] || run "${queued[@]}" create "$name" "${where[@]}" --accelerator-type="$type" \
  --runtime-version="$version" "${nodes[@]}" ${spot:+--spot}
[[ ! $dry_run ]] || exit 0
while found=$(state) && [[ $found != ACTIVE ]]; do
  [[ ! $found =~ ^(FAILED|SUSPENDING|SUSPENDED)$ ]] || { echo "failed: ${queued[*]} describe $name ${where[*]}" >&2; exit 1; }
  echo "$name: ${found:-requested}" >&2
  sleep "${WAIT_S:-30}"
done
