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

# A failed collective ends the rank and is not waited for.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1

# A collective that times out leaves a record of who had entered it.
export TORCH_NCCL_DUMP_ON_TIMEOUT=1

# Length of that record, in collectives.
export TORCH_FR_BUFFER_SIZE=2000

# NCCL names the link or peer that failed.
export NCCL_DEBUG=WARN

# Kernels start in the order they were issued in, so that tensor-parallel communication overlaps.
export CUDA_DEVICE_MAX_CONNECTIONS=1

# The caching allocator can grow its segments, which leaves less memory in fragments.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# Data plane: InfiniBand, or an error that says so; NCCL alone would quietly fall back to TCP.
export NCCL_NET=IB

# InfiniBand waits about 17 s for an answer before it gives up: a link flap ends no run.
export NCCL_IB_TIMEOUT=22

# The most retries that the hardware knows.
export NCCL_IB_RETRY_CNT=7
