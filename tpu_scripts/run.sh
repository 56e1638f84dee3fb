#!/bin/bash
# usage: tpu_scripts/run.sh --name=N --zone=Z --type=v6e-64 [--num_slices=N] [--spot] [--dry-run] --config=FILE --workdir=DIR [--config.KEY=VALUE ...]
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Starts the run on every worker, and shows what worker 0 prints, and the errors of all. Where TPUs
# are not there (yet, or after a preemption) they are requested and set up; where a worker is lost,
# or stops the run (status 75), it starts again, up to 100 times, and resumes from its newest
# checkpoint. The workdir is on storage that outlives the TPUs (--prepare mounts it). See flags.sh.
set -euo pipefail
source "$(dirname "$0")/flags.sh"
source "$(dirname "$0")/workers.sh"
read_flags "name zone type" "$@"
[[ " ${arguments[*]-} " == *" --config="* && " ${arguments[*]} " == *" --workdir="* ]] || usage
here=$(dirname "$0")
for argument in "${arguments[@]}"; do
  file=${argument#--config=}
  [[ $argument != --config=* || $file == /* ]] || git -C "$here/.." cat-file -e "HEAD:$file" 2>/dev/null ||
    { echo "--config=$file is not in the current commit, which the workers get: commit it" >&2; exit 2; }
done

# With mode=on JAX asks the TPU VMs' metadata who is who. What is left of an earlier start, which
# ends when its connection has, keeps the lock, and the chips.
printf -v words ' %q' "${arguments[@]}" --config.distributed.mode=on
command="set -o pipefail; cd $dir && flock -w 900 run.lock .venv/bin/python -m earl_jax.main$words 2>&1 | tee run.log"
for again in {0..100}; do
  ((again == 0)) || { echo "starting the run again ($again of 100)" >&2; sleep "${WAIT_S:-30}"; }
  "$here/create.sh" "${flags[@]}"
  status=0
  "$here/setup.sh" "${flags[@]}" || status=$?
  # Behind the first start a worker may be away still.
  ((status == 0 || again > 0)) || exit "$status"
  ((status != 0)) || on_all ssh "{}" --command="$command" || status=$?
  [[ ! $dry_run ]] || exec "${PYTHON:-$here/../.venv/bin/python}" -m earl_jax.config "${arguments[@]}"
  # 2 is a mistake of the user's; a check is made once.
  ((status != 0 && status != 2)) && [[ " ${arguments[*]} " != *" --check "* ]] || exit "$status"
done
exit "$status"
