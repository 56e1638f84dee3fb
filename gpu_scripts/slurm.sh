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
# the job's time is over it gets a SIGTERM: it saves, and the same command goes on from there. Where
# one process has too little memory for an update, all are started again, and go on with less.
#SBATCH --job-name=earl_jax
#SBATCH --signal=TERM@120
#SBATCH --output=%x_%j.log
set -euo pipefail

if [[ $# -eq 0 ]]; then
  echo "usage: sbatch --nodes=N --gpus-per-node=G --ntasks-per-node=G $0 --config=FILE --workdir=DIR" >&2
  exit 2
fi
# The status of srun is the largest of its tasks' statuses.
exec gpu_scripts/again.sh srun --kill-on-bad-exit=0 .venv/bin/python -m earl_jax.main "$@"
