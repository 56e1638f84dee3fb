#!/bin/bash
# usage: source tpu_scripts/workers.sh, behind flags.sh and read_flags
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Commands for all workers of the TPUs that the flags name.
# shellcheck disable=SC2154 # read_flags of flags.sh sets the variables

# Prints the instances of the group, in the order of their names.
instances() {
  if [[ $dry_run ]]; then echo "EACH_INSTANCE"; return; fi
  gcloud compute instance-groups managed list-instances "$name" "${where[@]}" --format='value(NAME)' | sort
}

# Runs gcloud's ssh or scp for every worker at once; {} in an argument is the worker's machine.
# Returns the largest status.
on_all() {
  local verb=$1 status=0 pids=() machine machines pid code
  shift
  if [[ ! $mig ]]; then
    run gcloud compute tpus queued-resources "$verb" "${@//\{\}/$name}" "${where[@]}" --node=all --worker=all
    return
  fi
  machines=$(instances) || return
  [[ $machines ]] || { echo "$name has no instances" >&2; return 1; }
  for machine in $machines; do
    run gcloud compute "$verb" "${@//\{\}/$machine}" "${where[@]}" & pids+=($!)
  done
  for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    ((code <= status)) || status=$code
  done
  return "$status"
}
