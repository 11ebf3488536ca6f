#!/bin/bash
# slurm_bed.sh: a real Slurm cluster (slurmctld + one slurmd a node) on the namespaces of ssh_bed.sh.
usage() { cat <<'EOU'
usage: slurm_bed.sh up N WORK             nodes, sshd, munged, slurmctld and N slurmds (idempotent)
       slurm_bed.sh down WORK             stop and remove everything (idempotent)
       slurm_bed.sh status WORK           sinfo; rc 0 if the controller answers and every node is usable
       slurm_bed.sh run WORK CMD..        run CMD on the head with SLURM_CONF set (sbatch, squeue, ...)
       slurm_bed.sh kill NODE WORK        SIGKILL the node's slurmd and all its step processes (sshd stays)
       slurm_bed.sh slurmd NODE WORK      (re)start slurmd on a node
       slurm_bed.sh ctld-kill WORK | ctld-start WORK     controller outage
       slurm_bed.sh ctld-stop WORK        end the controller in order: what it knows is saved first
Node faults (cut, power, crash, freeze, boot ...): use ssh_bed.sh, then "slurm_bed.sh slurmd NODE WORK".
The controller runs on a machine of its own, "ctl": ssh_bed.sh cut ctl WORK (then heal) parts it from all nodes.
Clients: source WORK/env.sh, or set SLURM_CONF=WORK/slurm/slurm.conf.  On a node it is /etc/slurm/slurm.conf.
Environment: BED_GPUS (default 8), BED_CPUS (a node, default 64), BED_ACCT=db|none (db: MariaDB and
slurmdbd, so that sacct works; default none), BED_LEAF=K (topology/tree with K nodes a leaf
switch under one spine; default none), and BED_NAME, BED_NET, BED_HOST (see bedlib.sh).
EOU
}
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
. "$HERE/bedlib.sh" || exit 1
BED_GPUS=${BED_GPUS:-8}
BED_CPUS=${BED_CPUS:-64}
BED_ACCT=${BED_ACCT:-none}
BED_LEAF=${BED_LEAF:-0}

conf_write() {  # N
  local n=$1 s=$WORK/slurm i acct
  mkdir -p "$s/state" "$s/log" "$s/dev"
  # stand-ins for the GPUs' device files: Slurm wants character devices, and the digit at the end of the name
  # becomes the index in CUDA_VISIBLE_DEVICES; each is a /dev/null
  for ((i = 0; i < BED_GPUS; i++)); do rm -f "$s/dev/nvidia$i"; mknod -m 666 "$s/dev/nvidia$i" c 1 3 || die "mknod failed in $s/dev"; done
  case $BED_ACCT in
    none) acct="AccountingStorageType=accounting_storage/none" ;;  # TRES gres/gpu would need slurmdbd
    db)   acct="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$BED_CTL_IP
AccountingStoragePass=$s/munge/socket
AccountingStorageTRES=gres/gpu" ;;
    *) die "BED_ACCT must be none or db, not '$BED_ACCT'" ;;
  esac
  cat > "$s/slurm.conf" <<EOC
ClusterName=$BED_NAME
SlurmctldHost=ctl($BED_CTL_IP)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$s/munge/socket
StateSaveLocation=$s/state
SlurmctldPidFile=$s/slurmctld.pid
SlurmctldLogFile=$s/log/slurmctld.log
SlurmdPidFile=$WORK/nodes/%n/slurmd.pid
SlurmdLogFile=$WORK/nodes/%n/log/slurmd.log
SlurmdSpoolDir=$WORK/nodes/%n/spool
# no cgroups, no CPU binding: works in any container or VM
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none
# nodes may claim more CPUs, memory and GPUs than the machine has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# short clocks, so that a node loss is seen within a test
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=10
KillWait=5
# a step that a dead controller keeps from ending is no reason to drain its node, into the next test
UnkillableStepTimeout=180
TCPTimeout=2
InactiveLimit=0
MinJobAge=86400
ReturnToService=1
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=5,batch_sched_delay=0,sched_min_interval=0
JobCompType=jobcomp/filetxt
JobCompLoc=$s/log/jobcomp.log
$acct
NodeName=${BED_HOST}[1-$n] NodeAddr=$BED_NET.[1-$n] CPUs=$BED_CPUS Sockets=2 CoresPerSocket=$((BED_CPUS / 2)) ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:h100:$BED_GPUS State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=debug Nodes=${BED_HOST}1 MaxTime=10 State=UP
EOC
  if [ "$BED_LEAF" -gt 0 ]; then
    echo "TopologyPlugin=topology/tree" >> "$s/slurm.conf"
    local leaf=0 last
    for ((i = 1; i <= n; i += BED_LEAF)); do
      leaf=$((leaf + 1)); last=$((i + BED_LEAF - 1)); [ $last -le "$n" ] || last=$n
      echo "SwitchName=leaf$leaf Nodes=${BED_HOST}[$i-$last]"
    done > "$s/topology.conf"
    echo "SwitchName=spine Switches=leaf[1-$leaf]" >> "$s/topology.conf"
  fi
  cat > "$s/gres.conf" <<EOC
AutoDetect=off
NodeName=${BED_HOST}[1-$n] Name=gpu Type=h100 File=$s/dev/nvidia[0-$((BED_GPUS - 1))]
EOC
  # slurmd 22.05 loads a cgroup plugin even where nothing uses it; "autodetect" fails without a mounted
  # /sys/fs/cgroup ("Unable to initialize cgroup plugin"), a named v1 plugin needs no mount
  echo 'CgroupPlugin=cgroup/v1' > "$s/cgroup.conf"
  printf 'export SLURM_CONF=%s\n' "$s/slurm.conf" > "$WORK/env.sh"
}

munge_up() {
  local m=$WORK/slurm/munge
  [ -n "$(pid_alive "$BED_RUN/munged.pid")" ] && return 0
  mkdir -p "$m"; chmod 755 "$m"
  [ -s "$m/key" ] || { (umask 077; dd if=/dev/urandom of="$m/key" bs=1024 count=1 status=none); }
  # --force: the work directory may lie below a world-writable one such as /tmp
  /usr/sbin/munged --force --key-file="$m/key" --socket="$m/socket" --pid-file="$m/pid" \
    --log-file="$m/log" --seed-file="$m/seed" --num-threads=4 9>&- >"$m/out" 2>&1 </dev/null || die "munged: $(tail -qn2 "$m/out" "$m/log" 2>/dev/null)"
  pid_save "$BED_RUN/munged.pid" "$(cat "$m/pid")"
  wait_for 10 munge -n -S "$m/socket" || die "munged does not answer on $m/socket"
}

wait_for() {  # wait_for SECONDS CMD...: until CMD succeeds
  local end=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do [ $SECONDS -lt $end ] || return 1; sleep 0.1; done
}
slurm() { SLURM_CONF=$WORK/slurm/slurm.conf timeout 10 "$@"; }

daemon_up() {  # NAME CMD...: a foreground daemon on the controller's machine, in the background, its pid saved
  local name=$1 s=$WORK/slurm; shift
  [ -n "$(pid_alive "$BED_RUN/$name.pid")" ] && return 0
  # shellcheck disable=SC2016  # expands inside the new namespace
  setsid ip netns exec "$BED_NAME-ctl" unshare --uts sh -c 'hostname ctl; mount --bind "$0" /etc/hosts; exec "$@"' "$WORK/hosts" "$@" </dev/null >>"$s/log/$name.out" 2>&1 9>&- &
  pid_save "$BED_RUN/$name.pid" $!
}

ctld_answers() { slurm scontrol ping 2>/dev/null | grep -q "is UP" || { [ -z "$(pid_alive "$BED_RUN/slurmctld.pid")" ] && exit 3; false; }; }
ctld_up() {
  local s=$WORK/slurm
  daemon_up slurmctld /usr/sbin/slurmctld -D -f "$s/slurm.conf"
  ( wait_for 30 ctld_answers ) ||
    die "slurmctld does not answer: $(grep -hE 'fatal|error' "$s/log/slurmctld.out" | tail -n 3)"
}

slurmd_up() {  # NODE
  local n=$1 d=$WORK/nodes/$1
  mkdir -p "$d/spool"
  if [ -s "$d/slurmd.pid" ] && node_exec "$n" kill -0 "$(cat "$d/slurmd.pid")" 2>/dev/null; then return 0; fi
  rm -f "$d/slurmd.pid"
  [ "/proc/$(node_pid "$n")/root/etc/slurm/slurm.conf" -ef "$WORK/slurm/slurm.conf" ] || node_exec "$n" mount --bind "$WORK/slurm" /etc/slurm
  # shellcheck disable=SC2016  # expands on the node
  node_exec "$n" sh -c 'ulimit -l unlimited 2>/dev/null; exec /usr/sbin/slurmd -N "$1" -f "$2"' sh "$n" "$WORK/slurm/slurm.conf" 9>&- </dev/null >>"$d/log/slurmd.out" 2>&1 ||
    die "$n: slurmd did not start: $(tail -qn3 "$d/log/slurmd.out" "$d/log/slurmd.log" 2>/dev/null)"
}

db_up() {
  local s=$WORK/slurm/db
  mkdir -p "$s"
  if [ -z "$(pid_alive "$BED_RUN/mariadbd.pid")" ]; then
    if [ ! -d "$s/data/mysql" ]; then
      mariadb-install-db --no-defaults --user=root --datadir="$s/data" --auth-root-authentication-method=normal --skip-test-db >"$s/install.log" 2>&1 9>&- ||
        die "mariadb-install-db: $(tail -qn3 "$s/install.log")"
    fi
    mkdir -p "$WORK/slurm/log"
    daemon_up mariadbd /usr/sbin/mariadbd --no-defaults --user=root --datadir="$s/data" --socket="$s/sock" --pid-file="$s/pid" \
      --skip-networking --innodb-buffer-pool-size=64M --innodb-log-file-size=64M --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0
  fi
  wait_for 60 mariadb --no-defaults -S "$s/sock" -u root -e 'CREATE DATABASE IF NOT EXISTS slurm_acct_db' ||
    die "MariaDB does not answer: $(tail -qn3 "$WORK/slurm/log/mariadbd.out")"
  cat > "$WORK/slurm/slurmdbd.conf" <<EOC
AuthType=auth/munge
AuthInfo=socket=$WORK/slurm/munge/socket
DbdHost=ctl
DbdAddr=$BED_CTL_IP
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile=$WORK/slurm/log/slurmdbd.log
PidFile=$WORK/slurm/slurmdbd.pid
EOC
  chmod 600 "$WORK/slurm/slurmdbd.conf"
  # slurmdbd reads its configuration from beside slurm.conf; MariaDB's client library finds the socket by this variable
  MYSQL_UNIX_PORT=$s/sock SLURM_CONF=$WORK/slurm/slurm.conf daemon_up slurmdbd /usr/sbin/slurmdbd -D
  wait_for 30 slurm sacctmgr -n show cluster || die "slurmdbd does not answer: $(tail -qn3 "$WORK/slurm/log/slurmdbd.out" "$WORK/slurm/log/slurmdbd.log" 2>/dev/null)"
  slurm sacctmgr -n show cluster format=cluster 2>/dev/null | grep -qw "$BED_NAME" ||
    slurm sacctmgr -i add cluster "$BED_NAME" >/dev/null || die "sacctmgr add cluster failed"
}

step_kill() {  # NODE: the daemons first, so that they cannot report what happens to the rest
  local p daemons=() tasks=()
  node_idx "$1" >/dev/null || exit 1
  node_pid "$1" >/dev/null || die "$1 is not running"
  for p in $(node_pids "$1"); do
    case $(cat "/proc/$p/comm" 2>/dev/null) in
      slurmd|slurmstepd) daemons+=("$p") ;;
      *) if tr '\0' '\n' < "/proc/$p/environ" 2>/dev/null | grep -q '^SLURM_JOB_ID='; then tasks+=("$p"); fi ;;
    esac
  done
  [ ${#daemons[@]} -gt 0 ] || note "$1: no slurmd was running"
  kill -KILL ${daemons[@]+"${daemons[@]}"} ${tasks[@]+"${tasks[@]}"} 2>/dev/null
  rm -f "$WORK/nodes/$1/slurmd.pid"
}

slurm_stop() {
  bed_other >/dev/null && return 0
  pid_stop "$BED_RUN/slurmctld.pid" 10
  pid_stop "$BED_RUN/slurmdbd.pid" 10
  pid_stop "$BED_RUN/mariadbd.pid" 20
  pid_stop "$BED_RUN/munged.pid" 5
}

status() {
  [ -s "$WORK/slurm/slurm.conf" ] || { echo "no Slurm bed in $WORK"; return 1; }
  export SLURM_CONF=$WORK/slurm/slurm.conf
  timeout 10 sinfo -N -h -p gpu -o '%N %T %G' || return 1
  [ "$(timeout 10 sinfo -N -h -p gpu -o '%T' | grep -cE '^(idle|mixed|allocated|completing)$')" = "$(cat "$WORK/count")" ]
}

up() {
  local n=$1 t0 t1 k x
  count_ok "$n"
  t0=$(now)
  apt_need iproute2 util-linux procps tini openssh-server openssh-client iptables munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins
  [ "$BED_ACCT" = db ] && apt_need slurmdbd slurm-wlm-mysql-plugin mariadb-server
  t1=$(now)
  if [ "$(cat "$WORK/count" 2>/dev/null)" = "$n" ] && [ "$(cat "$WORK/slurm/options" 2>/dev/null)" = "$BED_ACCT $BED_LEAF $BED_GPUS $BED_CPUS" ] && status >/dev/null 2>&1; then
    note "already up: $n nodes in $WORK"; return 0
  fi
  k=$(bed_other) && die "a bed named '$BED_NAME' is up in $k: run '${0##*/} down $k' first, or set BED_NAME and BED_NET"
  "$0" down "$WORK" >/dev/null 2>&1
  mkdir -p "$WORK/slurm"
  "$HERE/ssh_bed.sh" up "$n" "$WORK" || exit 1
  lock_work
  conf_write "$n"
  echo "$BED_ACCT $BED_LEAF $BED_GPUS $BED_CPUS" > "$WORK/slurm/options"
  [ -e "/run/netns/$BED_NAME-ctl" ] || node_net_up 253 ctl
  munge_up
  [ "$BED_ACCT" = db ] && db_up
  ctld_up
  local pids=()
  for x in $(nodes_list); do
    slurmd_up "$x" & pids+=($!)
    if [ ${#pids[@]} -ge 4 ]; then wait "${pids[0]}" || die "a slurmd did not start"; pids=("${pids[@]:1}"); fi
  done
  for k in "${pids[@]}"; do wait "$k" || die "a slurmd did not start"; done
  wait_for 60 status || { status >&2; die "not all nodes came up"; }
  note "up: $n Slurm nodes in $(since "$t1") s (packages $(awk -v a="$t0" -v b="$t1" 'BEGIN{printf "%.1f", b-a}') s); source $WORK/env.sh"
}

cmd=${1:-}
case $cmd in
  up)     need_root; need_work "${3:-}"; up "${2:-}" ;;
  down)   need_root; [ $# -eq 3 ] && shift; need_work "${2:-}"; t0=$(now)
          # daemons in the nodes die with the nodes
          ( lock_work; slurm_stop )
          "$HERE/ssh_bed.sh" down "$WORK" || exit 1
          rm -rf "$WORK/slurm" "$WORK/env.sh"
          note "down in $(since "$t0") s" ;;
  status) need_root; need_work "${2:-}"; status ;;
  run)    need_root; need_work "${2:-}"; shift 2; SLURM_CONF=$WORK/slurm/slurm.conf exec "$@" ;;
  slurmd) need_root; need_work "${3:-}"; slurmd_up "$2" ;;
  kill)   need_root; need_work "${3:-}"; step_kill "$2" ;;
  ctld-kill)  need_root; need_work "${2:-}"; p=$(pid_alive "$BED_RUN/slurmctld.pid") || die "no slurmctld"; kill -KILL "$p"; sleep 0.3 ;;
  ctld-stop)  need_root; need_work "${2:-}"; pid_stop "$BED_RUN/slurmctld.pid" 20 ;;
  ctld-start) need_root; need_work "${2:-}"; ctld_up ;;
  -h|--help|help) usage ;;
  *) usage >&2; exit 2 ;;
esac
