#!/bin/bash
# Runs a command as one worker, with the variables that torch.distributed reads, made from those of Slurm or MPI.
# Usage: bash worker.sh COMMAND...    FIRST_RANK is added to the rank, for one Slurm step per node.
set -euo pipefail
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:?start worker.sh with srun, mpirun or mpiexec}}}
export RANK=$((${FIRST_RANK:-0} + rank))
export WORLD_SIZE=${WORLD_SIZE:-${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${SLURM_STEP_NUM_TASKS:-}}}}
export LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${SLURM_LOCALID:-0}}}
exec "$@"
