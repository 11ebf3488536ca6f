# Environment of every rank. Read by node.sh; the same on all nodes and in all attempts.

# Ranks share the node's cores; without this each of them would start one thread for every core.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  OMP_NUM_THREADS=$(($(nproc) / ${ranks_on_node:?set by node.sh}))
  [ "$OMP_NUM_THREADS" -ge 1 ] || OMP_NUM_THREADS=1
fi
export OMP_NUM_THREADS

# What a dying rank has printed must reach its log.
export PYTHONUNBUFFERED=1

# A crash in native code leaves a Python stack in the log.
export PYTHONFAULTHANDLER=1

# All ranks are on this machine: their traffic stays on the loopback device.
export GLOO_SOCKET_IFNAME=lo

# All ranks are on this machine: their traffic stays on the loopback device.
export NCCL_SOCKET_IFNAME=lo
