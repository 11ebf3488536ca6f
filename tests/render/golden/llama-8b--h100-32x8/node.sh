#!/bin/bash
# Starts the ranks of one node; one script for all nodes and all attempts of the run.
# usage: node.sh ATTEMPT NODE_RANK NODES RANKS_ON_NODE MASTER_ADDRESS MASTER_PORT
set -euo pipefail

attempt=${1:?attempt number}
node_rank=${2:?rank of this node}
nodes=${3:?number of nodes}
ranks_on_node=${4:?ranks on this node}
address=${5:?address of node 0}
port=${6:?free port of node 0}

# Variables of the ranks, with a comment on each.
source /shared/runs/run-1/scripts/env.sh

# exec: torchrun takes the place of this shell, so that signals and exit codes pass through nothing.
# static: the order of nodes is ours, since it decides which ranks share a node.
# rdzv-id: every attempt has its own, so that ranks of an older one can never join.
# max-restarts 0: the supervisor restarts, from the newest checkpoint; torchrun knows of no checkpoints.
# log-dir: torchrun leaves a folder of notes on its workers behind; the agent removes this one.
exec /opt/venv/bin/python -m torch.distributed.run \
  --nnodes="$nodes" \
  --node-rank="$node_rank" \
  --nproc-per-node="$ranks_on_node" \
  --rdzv-backend=static \
  --rdzv-id=run-1."$attempt" \
  --master-addr="$address" \
  --master-port="$port" \
  --max-restarts=0 \
  ${LLMTRAIN_SCRATCH:+--log-dir="$LLMTRAIN_SCRATCH"} \
  -m llmtrain.engine /shared/runs/run-1/job.json
