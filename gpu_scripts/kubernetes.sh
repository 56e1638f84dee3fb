#!/bin/bash
# usage: gpu_scripts/kubernetes.sh [--dry-run] --name=N --image=IMAGE --nodes=N --claim=PVC [--gpus=8] [--gpu=hopper|blackwell] --config=FILE --workdir=/shared/DIR [--config.KEY=VALUE ...]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Starts a run as the JobSet of jobset.yaml. The volume claim is mounted at /shared in every pod.
set -euo pipefail
usage() { sed -n '2s/^# //p' "$0" >&2; exit 2; }
here=$(dirname "$0")
name='' image='' nodes='' claim='' gpus=8 gpu=hopper dry_run='' arguments=()
for argument in "$@"; do
  case $argument in
    --name=* | --image=* | --nodes=* | --claim=* | --gpus=* | --gpu=*) declare "${argument:2}" ;;
    --dry-run) dry_run=1 ;;
    *) arguments+=("$argument") ;;
  esac
done
[[ " ${arguments[*]-} " == *" --config="* && " ${arguments[*]} " == *" --workdir="* ]] || usage
[[ $name && $image && $claim && $nodes =~ ^[1-9][0-9]*$ && $gpus =~ ^[1-9][0-9]*$ ]] || usage

# Each argument as a JSON string; $ is Kubernetes' own there, and doubled.
quoted=''
for argument in "${arguments[@]}"; do
  argument=${argument//\\/\\\\} argument=${argument//\"/\\\"} argument=${argument//\$/\$\$}
  quoted+="${quoted:+, }\"$argument\""
done
manifest=$(<"$here/jobset.yaml")
for key in NAME IMAGE NODES CLAIM GPUS GPU; do
  value=${key,,}
  manifest=${manifest//"\${$key}"/"${!value}"}
done
manifest=${manifest//'${ARGUMENTS}'/"$quoted"}
if [[ $dry_run ]]; then
  echo "kubectl apply -f - <<'END'"$'\n'"$manifest"$'\n'END
  exec "${PYTHON:-$here/../.venv/bin/python}" -m earl_jax.config "${arguments[@]}"
fi
kubectl apply -f - <<<"$manifest"
echo "follow it: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=$name,batch.kubernetes.io/job-completion-index=0"
echo "end it:    kubectl delete jobset $name"
