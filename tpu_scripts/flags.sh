#!/bin/bash
# usage: source tpu_scripts/flags.sh; read_flags "FLAGS THAT MUST BE GIVEN" "$@"
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# The flags of these scripts. All take the same, so that run.sh calls the others with its own.
#
#   --name=N --zone=Z      the TPUs' name, and where they are
#   --project=P            default: gcloud's own
#   --type=T               accelerator type such as v6e-64; with --mig: machine type
#   --num_slices=N         slices of that type that are one run (1)
#   --spot                 cheaper, and preempted at any time
#   --version=V            runtime version (default: by --type); with --mig: image family
#   --mig --topology=4x4x4 --image_project=P
#                          a Compute Engine managed instance group, as TPU7x and later need
#   --dir=DIR              the project's folder on the workers (earl_jax, in the home folder)
#   --prepare=COMMAND      run on every worker before a run, such as the mount of shared storage
#   --dry-run              print the commands instead
# shellcheck disable=SC2034 # the flags are read by those that source this file

usage() { sed -n '2s/^# //p' "$0" >&2; exit 2; }

read_flags() {
  local needed=$1 argument flag
  shift
  name='' zone='' project='' type='' num_slices=1 spot='' version='' dir=earl_jax prepare=''
  mig='' topology='' image_project='' dry_run='' flags=() arguments=()
  for argument in "$@"; do
    flag=${argument%%=*} flag=${flag#--}
    case $argument in
      --config=* | --config.* | --workdir=* | --init_from=* | --check)
        arguments+=("$argument"); continue ;;
      --dry-run | --spot | --mig) declare -g "${flag//-/_}=1" ;;
      --name=* | --zone=* | --project=* | --type=* | --num_slices=* | --version=* | --dir=* | \
        --prepare=* | --topology=* | --image_project=*) declare -g "$flag=${argument#*=}" ;;
      *) echo "unknown: $argument" >&2; usage ;;
    esac
    flags+=("$argument")
  done
  for flag in $needed; do [[ ${!flag} ]] || usage; done
  [[ $num_slices =~ ^[1-9][0-9]*$ ]] || usage
  where=(--zone="$zone" ${project:+--project="$project"})
}

# Runs a command, or prints it.
run() { if [[ $dry_run ]]; then printf '%q ' "$@"; echo; else "$@"; fi; }
