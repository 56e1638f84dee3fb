#!/bin/bash
# usage: tpu_scripts/delete.sh --name=N --zone=Z [--mig] [--project=P] [--dry-run]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Deletes the TPUs of create.sh, with all that is on their disks. See flags.sh.
set -euo pipefail
source "$(dirname "$0")/flags.sh"
read_flags "name zone" "$@"
if [[ ! $mig ]]; then
  run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
  exit
fi
own=(--quiet ${project:+--project="$project"})
# Each of them, because a creation may have failed behind the first.
status=0
run gcloud compute instance-groups managed delete "$name" "${where[@]}" --quiet || status=$?
run gcloud compute instance-templates delete "$name" "${own[@]}" || status=$?
run gcloud compute resource-policies delete "$name" "${own[@]}" --region="${zone%-*}" || status=$?
exit "$status"
