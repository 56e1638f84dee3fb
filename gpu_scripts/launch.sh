#!/bin/bash
# usage: gpu_scripts/launch.sh [--dry-run] [--hosts=A,B,...] [--per_host=N] [--port=8476] [--dir=DIR] --config=FILE --workdir=DIR [--config.KEY=VALUE ...]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# One run over hosts that ssh reaches, or over processes of this machine (no --hosts). A host has
# one process with all of its GPUs, or --per_host processes with a GPU each. The project is in DIR
# (this folder) on every host, with its .venv; all hosts see the workdir. Ctrl-C or SIGTERM saves
# and ends (status 75). Where a process is lost, or its host stops it, all are started again, up to
# 10 times, and the run resumes.
set -euo pipefail
usage() { sed -n '2s/^# //p' "$0" >&2; exit 2; }
hosts='' per_host=1 port=8476 dir=$PWD dry_run='' arguments=()
for argument in "$@"; do
  case $argument in
    --hosts=* | --per_host=* | --port=* | --dir=*) declare "${argument:2}" ;;
    --dry-run) dry_run=1 ;;
    *) arguments+=("$argument") ;;
  esac
done
[[ " ${arguments[*]-} " == *" --config="* && " ${arguments[*]} " == *" --workdir="* ]] || usage
[[ $per_host =~ ^[1-9][0-9]*$ && $port =~ ^[1-9][0-9]*$ ]] || usage

python=${PYTHON:-.venv/bin/python}
# ssh takes IPv6 addresses without brackets, and the coordinator's has them before its port.
IFS=, read -ra all <<<"${hosts:-localhost}"
all=("${all[@]//[\[\]]/}") coordinator=${all[0]#*@}
[[ $coordinator != *:* ]] || coordinator="[$coordinator]"
# What the user set for Python, JAX, XLA and NCCL holds on every host.
mapfile -t names < <(compgen -e | grep -E '^(GPU|PYTHONPATH|(JAX|XLA|NCCL|CUDA)_.*)$')
given=''
for name in "${names[@]}"; do given+="$name=$(printf %q "${!name}") "; done

# Sets `line` to the shell command of process number $1.
command_of() {
  local variables="JAX_COORDINATOR_ADDRESS=$coordinator:$port"
  variables+=" JAX_NUM_PROCESSES=$((${#all[@]} * per_host)) JAX_PROCESS_ID=$1"
  ((per_host == 1)) || variables+=" JAX_LOCAL_DEVICE_IDS=$(($1 % per_host))"
  line="cd $(printf %q "$dir") && export $given$variables && . gpu_scripts/settings.sh"
  line+=" && exec $(printf '%q ' "$python" -m earl_jax.main "${arguments[@]}")"
}

# On a host: the command, which gets SIGTERM when the connection's input ends.
# shellcheck disable=SC2016
watched='exec 3<&0; bash -c "$0" </dev/null & run=$!
(read -r _ <&3; kill -TERM $run) & watch=$!; wait $run; status=$?; kill $watch; exit $status'

# Runs process $1; where it is lost, or was given a mistake, ends the others' input.
run_one() {
  local status=0 at=(bash -c "$watched")
  command_of "$1"
  [[ -z $hosts ]] || at=(ssh -o BatchMode=yes "${all[$1 / per_host]}" bash -c "$(printf %q "$watched")")
  [[ -z $hosts ]] || line=$(printf %q "$line")
  "${at[@]}" "$line" <&4 || status=$?
  # 75: a signal stopped the run, and the others end by themselves.
  ((status == 0 || status == 75)) || kill "$hold" 2>/dev/null || true
  return "$status"
}

if [[ $dry_run ]]; then
  for ((n = 0; n < ${#all[@]} * per_host; n++)); do
    command_of "$n"
    echo "${hosts:+ssh ${all[n / per_host]} }bash -c $(printf %q "$line")"
  done
  exec "$python" -m earl_jax.config "${arguments[@]}"
fi

stop=''
trap 'stop=1; kill "$hold" 2>/dev/null || true' TERM INT
trap 'kill "$hold" 2>/dev/null || true' EXIT
for start in {0..10}; do
  # A host may be away for a moment.
  ((start == 0)) || { echo "starting the run again ($start of 10)" >&2; sleep "${WAIT_S:-15}" >&- 2>&- & wait $! || true; }
  [[ ! $stop ]] || exit "${status:-75}"
  exec 4< <(exec sleep infinity)
  hold=$! pids=() codes=()
  for ((n = 0; n < ${#all[@]} * per_host; n++)); do
    run_one "$n" & pids+=($!)
  done
  for pid in "${pids[@]}"; do
    # A signal cuts a wait short.
    while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done
    code=0
    wait "$pid" || code=$?
    codes+=("$code")
  done
  kill "$hold" 2>/dev/null || true
  # 2 is a mistake of the user's; a check is made once.
  status=$(printf '%s\n' "${codes[@]}" | sort -n | tail -1)
  if [[ " ${codes[*]} " == *" 2 "* ]]; then exit 2; fi
  if [[ $stop || " ${arguments[*]} " == *" --check "* ]] || ((status == 0)); then exit "$status"; fi
done
exit "$status"
