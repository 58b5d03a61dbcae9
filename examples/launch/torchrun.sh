#!/bin/bash
# torchrun on several hosts. Run on every host, from the root of the repository:
#   bash examples/launch/torchrun.sh NODES NODE HEAD [SCRIPT...]    NODE: 0, 1, ...; HEAD: the host of node 0
set -euo pipefail
nodes=$1 node=$2 head=$3
shift 3
if [ $# -eq 0 ]; then set -- examples/ddp_to_gossamer.py; fi
exec torchrun --nnodes "$nodes" --node-rank "$node" --nproc-per-node "${WORKERS_PER_NODE:-4}" \
    --master-addr "$head" --master-port "${MASTER_PORT:-29500}" "$@"
