#!/bin/bash
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# One run over the GPUs of several nodes, a process for each GPU:
#
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 gpu_scripts/slurm.sh \
#       --config=configs/NAME.py --workdir=/shared/NAME
#
# Slurm tells JAX who is who. All nodes must see the repository and the workdir. Two minutes before
# the job's time is over it gets a SIGTERM: it saves, and the same command goes on from there.
#
# Where a process is lost, or has too little memory for an update, all end with status 1. They are
# started again up to 10 times, and the run resumes from its newest checkpoint, with less where
# memory was short. Without Slurm, the same on every host:
#
#   until .venv/bin/python -m earl_jax.main ...; do (($? == 1)) || break; done
#SBATCH --job-name=earl_jax
#SBATCH --signal=TERM@120
#SBATCH --output=%x_%j.log
set -uo pipefail

if [[ $# -eq 0 ]]; then
  echo "usage: sbatch --nodes=N --gpus-per-node=G --ntasks-per-node=G $0 --config=FILE --workdir=DIR" >&2
  exit 2
fi
for start in {0..10}; do
  ((start == 0)) || echo "starting the run again ($start of 10)" >&2
  # The status of srun is the largest of its tasks' statuses; 2 is a mistake of the user's.
  srun --kill-on-bad-exit=1 .venv/bin/python -m earl_jax.main "$@"
  status=$?
  ((status != 0 && status != 2)) || exit "$status"
done
exit "$status"
