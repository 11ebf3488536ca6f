#!/bin/bash
# selftest.sh: brings each bed up and down twice and checks that it is real.   usage: selftest.sh WORK [N]
# shellcheck disable=SC2016  # the single-quoted scripts expand in the shell that they are given to
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
[ -n "${1:-}" ] || { echo "usage: selftest.sh WORK [N]" >&2; exit 2; }
mkdir -p "$1"; W=$(cd "$1" && pwd -P); N=${2:-4}
PASS=0; FAIL=0
ok() { local what=$1; shift; if "$@" >"$W/out" 2>&1; then PASS=$((PASS + 1)); echo "ok   $what"; else FAIL=$((FAIL + 1)); echo "FAIL $what"; sed 's/^/     /' "$W/out" | tail -n 8; fi; }
no() { local what=$1; shift; ok "$what" bash -c '! "$@"' no "$@"; }
S="$HERE/ssh_bed.sh"; L="$HERE/slurm_bed.sh"; P="$HERE/prom_bed.sh"
is() { [ "$("${@:2}" 2>/dev/null)" = "$1" ]; }
clean() { ! ip netns list | grep -q "^${BED_NAME:-bed}-" && ! ip link show "${BED_NAME:-bed}head" 2>/dev/null; }
ssh_() { ssh -n -F "$W/ssh/ssh_config" -o ConnectTimeout=3 "$@"; }
slurm_() { SLURM_CONF=$W/slurm/slurm/slurm.conf "$@"; }
wait_is() { local k; for ((k = 0; k < $1 * 2; k++)); do is "${@:2}" && return 0; sleep 0.5; done; return 1; }
gone() { ! kill -0 "$1" 2>/dev/null; }

for round in 1 2; do
  echo "== ssh bed, round $round"
  ok "up $N" "$S" up "$N" "$W/ssh"
  ok "up again" "$S" up "$N" "$W/ssh"
  ok "ssh runs inside the node" is "node$N" ssh_ "node$N" hostname
  ok "exit code comes through" bash -c 'ssh -n -F "$1" node1 "exit 7"; [ $? = 7 ]' x "$W/ssh/ssh_config"
  ok "node to node" is node1 "$S" exec node2 "$W/ssh" ssh node1 hostname
  ok "names on the head" is node2 "$S" exec head "$W/ssh" ssh node2 hostname
  ok "cut node2" "$S" cut node2 "$W/ssh"
  no "cut node does not answer" ssh_ node2 true
  ok "heal node2" "$S" heal node2 "$W/ssh"
  ok "healed node answers" wait_is 10 node2 ssh_ node2 hostname
  ok "delay 20 ms" "$S" delay node2 "$W/ssh" 20
  ok "delayed node answers" is node2 ssh_ node2 hostname
  ok "undelay" "$S" undelay node2 "$W/ssh"
  ok "rate" "$S" rate node2 "$W/ssh" 100mbit
  ok "loss" "$S" loss node2 "$W/ssh" 0.02
  ok "heal" "$S" heal node2 "$W/ssh"
  pid=$(cut -d' ' -f1 "$W/ssh/nodes/node1/init.pid")
  ok "power loss of node1" "$S" power node1 "$W/ssh"
  ok "its processes are gone" gone "$pid"
  ok "boot node1" "$S" boot node1 "$W/ssh"
  ok "booted node answers" is node1 ssh_ node1 hostname
  ok "status" "$S" status "$W/ssh"
  ok "down" "$S" down "$W/ssh"
  ok "down again" "$S" down "$W/ssh"
  ok "nothing left" clean
done
for acct in none db; do
  echo "== slurm bed, accounting $acct"
  export BED_ACCT=$acct
  ok "up $N" "$L" up "$N" "$W/slurm"
  ok "up again" "$L" up "$N" "$W/slurm"
  ok "status" "$L" status "$W/slurm"
  ok "srun over all nodes" is "$N" bash -c 'SLURM_CONF=$1 srun -N"$2" --ntasks-per-node=2 --gpus-per-node=8 hostname | sort -u | wc -l' x "$W/slurm/slurm/slurm.conf" "$N"
  ok "gpus are given out" is 0,1,2,3 slurm_ srun -n1 --gres=gpu:4 printenv CUDA_VISIBLE_DEVICES
  ok "sbatch --wait gives the exit code" bash -c 'SLURM_CONF=$1 sbatch --wait --output=/dev/null --wrap "exit 5"; [ $? = 5 ]' x "$W/slurm/slurm/slurm.conf"
  ok "squeue --json" bash -c 'SLURM_CONF=$1 squeue --json | python3 -c "import json,sys; assert json.load(sys.stdin)[\"jobs\"]"' x "$W/slurm/slurm/slurm.conf"
  no "too many GPUs are refused" slurm_ sbatch --gpus-per-node=9 --output=/dev/null --wrap true
  if [ "$acct" = db ]; then ok "sacct (it lags a little)" wait_is 20 "FAILED|5:0" bash -c 'SLURM_CONF=$1 sacct -X -n -P -o state,exitcode | grep FAILED | sort -u' x "$W/slurm/slurm/slurm.conf"; fi
  ok "power loss of node$N" "$S" power "node$N" "$W/slurm"
  ok "Slurm sees it" wait_is 60 "down*" bash -c 'SLURM_CONF=$1 sinfo -h -N -p gpu -n "$2" -o %T' x "$W/slurm/slurm/slurm.conf" "node$N"
  ok "boot" "$S" boot "node$N" "$W/slurm"
  ok "slurmd" "$L" slurmd "node$N" "$W/slurm"
  ok "Slurm has it back" wait_is 30 idle bash -c 'SLURM_CONF=$1 sinfo -h -N -p gpu -n "$2" -o %T' x "$W/slurm/slurm/slurm.conf" "node$N"
  ok "slurmd and steps killed" "$L" kill node1 "$W/slurm"
  ok "Slurm sees that" wait_is 60 "down*" bash -c 'SLURM_CONF=$1 sinfo -h -N -p gpu -n node1 -o %T' x "$W/slurm/slurm/slurm.conf"
  ok "slurmd back" "$L" slurmd node1 "$W/slurm"
  ok "node1 idle again" wait_is 30 idle bash -c 'SLURM_CONF=$1 sinfo -h -N -p gpu -n node1 -o %T' x "$W/slurm/slurm/slurm.conf"
  ok "controller outage" "$L" ctld-kill "$W/slurm"
  ok "controller back" "$L" ctld-start "$W/slurm"
  ok "down" "$L" down "$W/slurm"
  ok "down again" "$L" down "$W/slurm"
  ok "nothing left" clean
done
for alert in 0 1; do
  echo "== prometheus bed, alertmanager $alert"
  export BED_ALERT=$alert
  ok "up" "$P" up "$W/prom"
  ok "up again" "$P" up "$W/prom"
  ok "targets" "$P" status "$W/prom"
  ok "recorded series" "$P" wait "$W/prom" 15 'host:bed_step_seconds:max > 0.6'
  ok "check" "$P" check "$W/prom/prom/prometheus.yml" "$W/prom/prom/demo.rules.yml"
  ok "down" "$P" down "$W/prom"
  ok "down again" "$P" down "$W/prom"
done
rm -f "$W/out"
echo "$PASS passed, $FAIL failed"
[ $FAIL = 0 ]
