#!/bin/bash
# usage: gpu_scripts/kubernetes.sh [--dry-run] [--check] --name=N --image=IMAGE --nodes=N --claim=PVC [--gpus=8] [--gpu=hopper|blackwell] --config=FILE --workdir=/shared/DIR [--config.KEY=VALUE ...]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Starts a run as the JobSet of jobset.yaml, or of --manifest=FILE: --key=VALUE takes the place of
# its ${KEY}, and all must be given. The volume claim is mounted at /shared in every pod.
set -euo pipefail
usage() { sed -n '2s/^# //p' "${USAGE_OF:-$0}" >&2; exit 2; }
manifest=$(dirname "$0")/jobset.yaml dry_run='' arguments=()
declare -A values=([GPUS]=8 [GPU]=hopper)
for argument in "$@"; do
  case $argument in
    --config=* | --config.* | --workdir=* | --init_from=* | --check) arguments+=("$argument") ;;
    --manifest=*) manifest=${argument#*=} ;;
    --dry-run) dry_run=1 ;;
    --[a-z]*=*) key=${argument%%=*} key=${key#--}; values[${key^^}]=${argument#*=} ;;
    *) usage ;;
  esac
done
[[ " ${arguments[*]-} " == *" --config="* && " ${arguments[*]} " == *" --workdir="* ]] || usage
[[ " ${arguments[*]} " == *" --workdir=/shared/"* ]] || { echo "--workdir must be below /shared: a pod's own disk goes with it" >&2; exit 2; }

# Each argument as a JSON string; $ is Kubernetes' own there, and doubled.
quoted=''
for argument in "${arguments[@]}"; do
  argument=${argument//\\/\\\\} argument=${argument//\"/\\\"} argument=${argument//\$/\$\$}
  quoted+="${quoted:+, }\"$argument\""
done
filled=$(grep -v '^#' "$manifest") values[ARGUMENTS]=$quoted
for key in "${!values[@]}"; do
  [[ $key == @(GPUS|GPU|HOSTS|CHIPS|SLICES) || $filled == *"\${$key}"* ]] || { echo "unknown: --${key,,}" >&2; usage; }
done
# shellcheck disable=SC2016
for key in $(grep -o '\${[A-Z]*}' <<<"$filled" | sort -u | tr -d '${}'); do
  [[ ${values[$key]-} ]] || { echo "--${key,,} is missing" >&2; usage; }
  filled=${filled//"\${$key}"/"${values[$key]}"}
done
# A check is made once.
shopt -s extglob
[[ " ${arguments[*]} " != *" --check "* ]] || filled=${filled/maxRestarts: +([0-9])/maxRestarts: 0}
if [[ $dry_run ]]; then
  echo "kubectl apply -f - <<'END'"$'\n'"$filled"$'\n'END
  exec "${PYTHON:-.venv/bin/python}" -m earl_jax.config "${arguments[@]}"
fi
kubectl apply -f - <<<"$filled"
echo "follow it: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=${values[NAME]},jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
echo "end it:    kubectl delete jobset ${values[NAME]}"
