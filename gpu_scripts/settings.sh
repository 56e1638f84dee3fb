#!/bin/bash
# usage: source gpu_scripts/settings.sh   (GPU=hopper, the default, or GPU=blackwell; VARIABLE=VALUE of yours stays)
# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
#
# Settings of JAX, XLA and NCCL for training on GPUs. None was timed on GPUs by this project.

# A lost node ends a collective with an error that is printed, instead of silence.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

flags=(
  # Layers' weights are gathered (fsdp) while the layer before computes.
  --xla_gpu_enable_latency_hiding_scheduler=true
  # Gathers and scatters of a loop over layers overlap the neighbouring layers.
  --xla_gpu_enable_pipelined_all_gather=true
  --xla_gpu_enable_pipelined_reduce_scatter=true
  # The loop's body is unrolled twice, so that a pipelined gather needs no copy of its buffer.
  --xla_gpu_enable_while_loop_double_buffering=true
)
case ${GPU:-hopper} in
  hopper)
    # One connection to the hardware's queues keeps collectives in the order of the schedule.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    # Collectives are combined up to 64 MB: enough for 450 GB/s of NVLink, early enough to overlap.
    bytes=67108864
    ;;
  blackwell)
    # Blackwell's queues are independent: with one, collectives and kernels would wait in line.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-16}
    # NVLink has twice Hopper's bandwidth, and a collective starts no faster: combine twice as much.
    bytes=134217728
    ;;
  *) echo "GPU is '$GPU'; set GPU=hopper or GPU=blackwell" >&2; exit 2 ;;
esac
for kind in all_reduce all_gather reduce_scatter; do
  flags+=("--xla_gpu_${kind}_combine_threshold_bytes=$bytes")
done
# The flags of the user's own come last: they win.
export XLA_FLAGS="${flags[*]}${XLA_FLAGS:+ $XLA_FLAGS}"
unset flags bytes kind
