#!/bin/bash
# usage: tpu_scripts/gke.sh [--dry-run] [--check] --name=N --image=IMAGE --accelerator=tpu-v6e-slice --topology=4x4 --claim=PVC [--slices=1] [--chips=4] --config=FILE --workdir=/shared/DIR [--config.KEY=VALUE ...]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Starts a run on GKE as the JobSet of jobset.yaml, on SLICES node pools of that topology with CHIPS
# chips a node. The volume claim is mounted at /shared. IMAGE: gpu_scripts/Dockerfile, EXTRA=tpu.
set -euo pipefail
here=$(dirname "$0") topology=4x4 chips=4
for argument in "$@"; do
  case $argument in --topology=* | --chips=*) declare "${argument:2}" ;; esac
done
[[ $topology =~ ^[0-9]+(x[0-9]+){1,2}$ && $chips =~ ^[1-9][0-9]*$ && $((${topology//x/*} % chips)) == 0 ]] ||
  { echo "--topology=$topology --chips=$chips: give a slice's chips, such as 4x4, and those of a node, 4" >&2; exit 2; }
hosts=$((${topology//x/*} / chips))
USAGE_OF=$0 exec "$here/../gpu_scripts/kubernetes.sh" --manifest="$here/jobset.yaml" --slices=1 \
  --chips="$chips" --hosts="$hosts" "$@"
