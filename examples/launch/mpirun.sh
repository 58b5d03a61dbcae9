#!/bin/bash
# Open MPI, MPICH or Intel MPI. Run from the root of the repository, on the first host of the job:
#   bash examples/launch/mpirun.sh WORKERS HOSTFILE [COMMAND...]
set -euo pipefail
workers=$1 hosts=$2
shift 2
if [ $# -eq 0 ]; then set -- python examples/ddp_to_gossamer.py; fi
export MASTER_ADDR=${MASTER_ADDR:-$(hostname)} MASTER_PORT=${MASTER_PORT:-29500}
if mpirun --version | grep -q "Open MPI"; then
    mpirun -n "$workers" --hostfile "$hosts" -x MASTER_ADDR -x MASTER_PORT bash examples/launch/worker.sh "$@"
else
    mpirun -n "$workers" -f "$hosts" -genv MASTER_ADDR "$MASTER_ADDR" -genv MASTER_PORT "$MASTER_PORT" \
        bash examples/launch/worker.sh "$@"
fi
