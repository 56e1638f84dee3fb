#!/bin/bash
# usage: tpu_scripts/create_mig.sh --name=N --zone=Z --type=tpu7x-standard-4t --topology=4x4x4 --version=IMAGE_FAMILY --image_project=P [--spot] [--project=P] [--dry-run]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Creates a slice of TPUs as a Compute Engine managed instance group (TPU7x and later; v5p and v6e
# too), and waits until it is there. A group that is there stays, unless spot instances of it are
# gone: such a slice is deleted and created again as a whole.
set -euo pipefail
source "$(dirname "$0")/flags.sh"
read_flags "name zone type topology version image_project" "$@"
((num_slices == 1)) || { echo "--num_slices=$num_slices: an instance group is one slice" >&2; exit 2; }
[[ $topology =~ ^[0-9]+(x[0-9]+){1,2}$ && $type =~ -([0-9]+)t$ ]] || usage
size=$((${topology//x/*} / BASH_REMATCH[1]))
own=("${project:+--project=$project}")
[[ $project ]] || own=()

group=(gcloud compute instance-groups managed)
if [[ ! $dry_run ]] && "${group[@]}" describe "$name" "${where[@]}" >/dev/null 2>&1; then
  states=$("${group[@]}" list-instances "$name" "${where[@]}" --format='value(STATUS)')
  [[ $(grep -cx RUNNING <<<"$states") != "$size" ]] || exit 0
  "$(dirname "$0")/delete.sh" "${flags[@]}"
elif [[ ! $dry_run ]]; then
  # What is left of a creation that failed has the flags of then. A group in use keeps both.
  gcloud compute instance-templates delete "$name" --quiet "${own[@]}" >/dev/null 2>&1 || true
  gcloud compute resource-policies delete "$name" --quiet "${own[@]}" --region="${zone%-*}" >/dev/null 2>&1 || true
fi
run gcloud compute resource-policies create workload-policy "$name" "${own[@]}" --region="${zone%-*}" \
  --type=HIGH_THROUGHPUT --accelerator-topology="$topology"
run gcloud compute instance-templates create "$name" "${own[@]}" --machine-type="$type" \
  --image-family="$version" --image-project="$image_project" --maintenance-policy=TERMINATE \
  ${spot:+--provisioning-model=SPOT --instance-termination-action=STOP}
run "${group[@]}" create "$name" "${where[@]}" --template="$name" --size="$size" \
  --workload-policy="$name" --target-size-policy-mode=bulk
run "${group[@]}" wait-until "$name" "${where[@]}" --stable
