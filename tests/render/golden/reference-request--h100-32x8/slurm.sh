#!/bin/bash
# One SLURM job of run run-1: the supervisor runs here, in the batch step, and starts one agent on each node.
# `llmtrain launch` and `llmtrain resume` submit it.

# What squeue shows.
#SBATCH --job-name=run-1
# Nodes of the layout, and spares.
#SBATCH --nodes=1
# One agent a node; it starts the node's ranks by torchrun.
#SBATCH --ntasks-per-node=1
# No other job on these nodes: ranks run at full speed.
#SBATCH --exclusive
# Accelerators of each node.
#SBATCH --gpus-per-node=8
# All memory of each node.
#SBATCH --mem=0
# Start when all nodes have booted.
#SBATCH --wait-all-nodes=1
# What this script and SLURM itself have to say; the supervisor has its own log.
#SBATCH --output=/shared/runs/run-1/slurm-%j.log
# A job that is started again goes on in the same file.
#SBATCH --open-mode=append
# Where the supervisor starts.
#SBATCH --chdir=/shared/runs/run-1
# A lost node does not end the job: the supervisor goes on with the others.
#SBATCH --no-kill
# Early warning, to this shell only: ranks save and leave before the time is over.
#SBATCH --signal=B:USR1@300
# The job may be queued again and then goes on with the same run.
#SBATCH --requeue
# The environment of the shell that submits.
#SBATCH --export=ALL

set -o pipefail

run_dir=/shared/runs/run-1
python=/opt/venv/bin/python
log=/shared/runs/run-1/supervisor.log

complain() {
  printf '%s: job %s on %s: %s\n' "$(date +%FT%T)" "${SLURM_JOB_ID:-none}" "$(hostname)" "$*" >&2
}

# ---- environment
# Steps get the environment of this shell, whatever --export the job was submitted with.
export SLURM_EXPORT_ENV=ALL

# The folder that containers must see.
export LLMTRAIN_RUNS=/shared/runs

# Agents have one task each; a binding of this batch step would pin all ranks of a node to a few cores.
unset SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE

if ! command -v "$python" >/dev/null; then
  complain "there is no $python on this node; backend.python of the profile names the interpreter that has llmtrain"
  exit 2
fi

# ---- supervisor
supervisor='' warned=''

# The early warning, and every TERM: the supervisor lets the ranks save and leave.
# shellcheck disable=SC2317 # called by the trap
warn() {
  warned=yes
  [ -z "$supervisor" ] || kill -TERM "$supervisor" 2>/dev/null
}
trap warn USR1 TERM

for ((start = 1; start <= 4; start++)); do
  # --wait-for-lease: an earlier supervisor on a lost node counts as dead only after a while.
  "$python" -m llmtrain.supervise --wait-for-lease 120 "$run_dir" >>"$log" 2>&1 &
  supervisor=$!
  [ -z "$warned" ] || kill -TERM "$supervisor" 2>/dev/null

  # A signal ends `wait`, not the supervisor: wait until it has really left.
  until wait "$supervisor"; status=$?; [ -z "$(jobs -rp)" ]; do :; done
  supervisor=''

  # Over 128: it was killed. Its agents let their ranks save; a new one goes on with the same nodes.
  if [ "$status" -le 128 ] || [ -n "$warned" ]; then break; fi
  complain "the supervisor died with exit code $status"
  sleep 1
done

# Killed by the warning itself, before it could listen: nothing was lost.
if [ "$status" -gt 128 ] && [ -n "$warned" ]; then status=75; fi

# ---- what follows
# SLURM tells this script, and what it runs, to leave as soon as the job is queued again.
trap '' USR1 TERM

# Queues the job again when its run can go on, and cancels the rest of a chain when the run has ended.
"$python" -m llmtrain.backends.slurm.end --status "$status" "$run_dir" >>"$log" 2>&1 ||
  complain "could not settle what follows; see $log"
exit "$status"
