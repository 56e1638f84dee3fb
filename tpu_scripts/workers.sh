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
  local verb=$1 status=0 pids=() machine pid
  shift
  if [[ ! $mig ]]; then
    run gcloud compute tpus queued-resources "$verb" "${@//\{\}/$name}" "${where[@]}" --node=all --worker=all
    return
  fi
  for machine in $(instances); do
    run gcloud compute "$verb" "${@//\{\}/$machine}" "${where[@]}" & pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || { (($? <= status)) || status=$?; }; done
  return "$status"
}
