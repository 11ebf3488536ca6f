# shellcheck shell=bash
# bedlib.sh: what the test beds share (sourced, not run).
#
# A "node" is one network + mount + UTS + IPC + PID namespace set, with its own
# hostname, address, /dev/shm, /var/tmp and /etc/hosts.  The file system is
# otherwise shared (like an NFS home).  All nodes hang on one bridge that lives
# in a namespace of its own (the "switch"); the root namespace (the "head", the
# login host) is joined to it by one veth pair.
#
#   root ns (head, .254) --veth-- [switch ns: bridge] --veth-- [node1 ns, .1]
#                                                     --veth-- [node2 ns, .2] ...
#                                                     --veth-- [ctl ns, .253] (Slurm's controller)
#
# No namespace has a default route, and the root namespace gets an
# "unreachable" fence route for the bed's subnet, so that nothing addressed to
# a node can leave the machine, neither while the bed is up nor after it is down.
#
# Environment (all optional):
#   BED_NAME  short tag for namespaces and interfaces   (default bed, max 6 chars)
#   BED_NET   first three octets of the bed's /24       (default 10.77.0)
#   BED_HOST  node host name stem                       (default node)
#   BED_BASHRC=keep  let logins on a node read root's .bashrc

BED_NAME=${BED_NAME:-bed}
BED_NET=${BED_NET:-10.77.0}
BED_HOST=${BED_HOST:-node}
BED_HEAD_IP=$BED_NET.254
BED_CTL_IP=$BED_NET.253
BED_SWITCH=$BED_NAME-switch
BED_FENCE_METRIC=4000000000
BED_RUN=/run/bed-$BED_NAME      # which work directory holds the bed, and the pids of its daemons on the head

die()  { echo "${0##*/}: error: $*" >&2; exit 1; }
note() { echo "${0##*/}: $*" >&2; }
now()  { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN{printf "%.2f", b-a}'; }

need_root() {
  [ "$(id -u)" = 0 ] || die "must run as root (namespaces, veth, sshd)"
}

need_work() {  # need_work DIR: sets WORK to an absolute path
  [ -n "${1:-}" ] || die "no work directory given; see --help"
  case $1 in /|/etc|/var|/run|/usr|/tmp|/root|/home) die "refusing to use $1 as a work directory";; esac
  mkdir -p "$1" || die "cannot create work directory $1"
  WORK=$(cd "$1" && pwd -P)
  [ "${#BED_NAME}" -le 6 ] || die "BED_NAME '$BED_NAME' is longer than 6 characters"
  # UNIX socket names hold 107 characters, and Slurm's sockets add some 40 to the work directory
  [ "${#WORK}" -le 60 ] || die "work directory is longer than 60 characters (UNIX socket limit): $WORK"
  case $WORK in *[[:space:]]*) die "work directory must not contain spaces: $WORK";; esac
}

count_ok() {  # count_ok N: dies unless N is a number of nodes that the /24 holds
  [[ $1 =~ ^[0-9]+$ ]] || die "N must be 1..250, not '$1'"
  if [ "$1" -lt 1 ] || [ "$1" -gt 250 ]; then die "N must be 1..250, not '$1'"; fi
}

lock_work() {  # one bed command at a time per work dir; the lock dies with this shell
  exec 9>"$WORK/.lock"
  flock -w 120 9 || die "another bed command holds $WORK/.lock"
}

# bed_other: prints the work directory of a live bed of this BED_NAME other than ours
bed_other() {
  local other f
  other=$(cat "$BED_RUN/work" 2>/dev/null)
  [ -n "$other" ] && [ "$other" != "$WORK" ] || return 1
  for f in "$other"/nodes/*/init.pid; do
    if [ -e "$f" ] && pid_alive "$f" >/dev/null; then echo "$other"; return 0; fi
  done
  return 1
}
# bed_claim: one bed a BED_NAME on this machine, whatever its work directory
bed_claim() {
  local other
  if other=$(bed_other); then
    die "a bed named '$BED_NAME' is up in $other: run '${0##*/} down $other' first, or set BED_NAME and BED_NET"
  fi
  mkdir -p "$BED_RUN"
  echo "$WORK" > "$BED_RUN/work"
}

# apt_need PKG...: install what is missing, quietly, with the log in $WORK/apt.log
apt_need() {
  local p missing=()
  for p in "$@"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q '^install ok installed' || missing+=("$p")
  done
  [ ${#missing[@]} = 0 ] && return 0
  note "installing ${missing[*]}"
  # Services that a package would start are never wanted here: the bed starts its own.
  local policy=/usr/sbin/policy-rc.d made=0
  if [ ! -e $policy ]; then printf '#!/bin/sh\nexit 101\n' > $policy; chmod 755 $policy; made=1; fi
  local rc=0
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${missing[@]}" \
      >>"$WORK/apt.log" 2>&1 9>&- </dev/null ||
    { apt-get -o DPkg::Lock::Timeout=300 update >>"$WORK/apt.log" 2>&1 &&
      DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${missing[@]}" \
        >>"$WORK/apt.log" 2>&1 9>&- </dev/null; } || rc=$?
  [ $made = 1 ] && rm -f $policy
  [ $rc = 0 ] || { tail -qn5 "$WORK/apt.log" >&2; die "apt-get could not install: ${missing[*]} (log: $WORK/apt.log)"; }
}

preflight() {
  local c
  for c in ip unshare nsenter flock awk tini; do
    command -v $c >/dev/null || die "command '$c' not found"
  done
  local t=$BED_NAME-probe
  ip netns del "$t" 2>/dev/null
  ip netns add "$t" 2>/dev/null || die "cannot create a network namespace (no CAP_SYS_ADMIN, or no CONFIG_NET_NS)"
  if ! ip -n "$t" link add pv0 type veth peer name pv1 2>/dev/null ||
     ! ip -n "$t" link add pb0 type bridge 2>/dev/null; then
    ip netns del "$t"; die "the kernel has no veth or bridge support"
  fi
  ip netns del "$t"
  # Someone else's route to the subnet would send bed traffic out of this machine, or theirs here.
  if ip -4 route show "$BED_NET.0/24" | grep -v '^unreachable' | grep -qv " dev ${BED_NAME}head "; then
    die "$BED_NET.0/24 is already routed on this machine; set BED_NET to another /24"
  fi
}

# ---- process book-keeping: a pid counts as ours only while its start time matches
proc_start() { awk '{sub(/^.*\) /,""); print $20}' "/proc/$1/stat" 2>/dev/null; }
pid_save()  { echo "$2 $(proc_start "$2")" > "$1"; }            # pid_save FILE PID
pid_alive() {                                                   # pid_alive FILE -> prints pid
  local p s
  [ -s "$1" ] || return 1
  read -r p s < "$1" || return 1
  [ -n "$p" ] && [ "$(proc_start "$p")" = "$s" ] || return 1
  case $(awk '{sub(/^.*\) /,""); print $1}' "/proc/$p/stat" 2>/dev/null) in Z|X|'') return 1;; esac
  echo "$p"
}
pid_stop() {                                                    # pid_stop FILE [SECONDS]: TERM, then KILL
  local p i n=$(( ${2:-5} * 10 ))
  p=$(pid_alive "$1") || { rm -f "$1"; return 0; }
  kill -TERM "$p" 2>/dev/null
  for ((i = 0; i < n; i++)); do pid_alive "$1" >/dev/null || break; sleep 0.1; done
  if pid_alive "$1" >/dev/null; then kill -KILL "$p" 2>/dev/null; sleep 0.2; fi
  rm -f "$1"
}

# ---- nodes
node_name() { echo "$BED_HOST$1"; }
node_idx() {
  local i=${1#"$BED_HOST"}
  if [ "$1" = ctl ] && [ -e "/run/netns/$BED_NAME-ctl" ]; then echo 253; return; fi   # the Slurm controller's machine
  if [ "$1" = "$i" ] || [ ! -d "$WORK/nodes/$1" ]; then
    die "no such node: $1 (bed has $(cat "$WORK/count" 2>/dev/null || echo 0) nodes named ${BED_HOST}1..)"
  fi
  echo "$i"
}
node_ns()  { echo "$BED_NAME-$1"; }
node_port() { echo "$BED_NAME-p$1"; }                           # switch-side interface of node number $1
node_pid() { pid_alive "$WORK/nodes/$1/init.pid"; }

# node_exec NODE CMD...: run inside all namespaces of a node (PID namespace included)
node_exec() {
  local n=$1 p; shift
  p=$(node_pid "$n") || die "$n is not running"
  nsenter -t "$p" -m -u -i -n -p -- "$@"
}

hosts_file() {
  local i
  echo "127.0.0.1 localhost"
  echo "$BED_HEAD_IP head"
  echo "$BED_CTL_IP ctl"
  for ((i = 1; i <= $1; i++)); do echo "$BED_NET.$i $(node_name $i)"; done
}

switch_up() {
  ip netns add "$BED_SWITCH" || die "cannot create namespace $BED_SWITCH"
  ip -n "$BED_SWITCH" link set lo up
  ip -n "$BED_SWITCH" link add br0 type bridge forward_delay 0 mcast_snooping 0
  ip -n "$BED_SWITCH" link set br0 up
  ip link add "${BED_NAME}head" type veth peer name head netns "$BED_SWITCH" || die "cannot create veth ${BED_NAME}head"
  ip -n "$BED_SWITCH" link set head master br0 up
  ip route replace unreachable "$BED_NET.0/24" metric $BED_FENCE_METRIC
  ip addr replace "$BED_HEAD_IP/24" dev "${BED_NAME}head"
  ip link set "${BED_NAME}head" up
}

node_net_up() {  # NUMBER [NAME]
  local i=$1 n ns port
  n=${2:-$(node_name "$i")}; ns=$(node_ns "$n"); port=$(node_port "$i")
  ip netns add "$ns" || die "cannot create namespace $ns"
  ip -n "$BED_SWITCH" -batch - <<EOB || die "cannot wire $n"
link add $port type veth peer name eth0 netns $ns
link set $port master br0 up
EOB
  ip -n "$ns" -batch - <<EOB || die "cannot configure $n"
link set lo up
addr add $BED_NET.$i/24 dev eth0
link set eth0 up
EOB
}

# node_boot NUMBER: start the node's init (tini) in new mount/uts/ipc/pid namespaces
node_boot() {
  local i=$1 n d up p k
  n=$(node_name "$i"); d=$WORK/nodes/$n
  mkdir -p "$d/vartmp" "$d/log" "$WORK/ssh_config.d"
  echo "$n" > "$d/hostname"
  rm -f "$d/ready"
  ip netns exec "$(node_ns "$n")" setsid unshare --mount --uts --ipc --pid --fork --kill-child --mount-proc \
    bash "$HERE/node_init.sh" "$WORK" "$n" </dev/null >"$d/log/init.log" 2>&1 9>&- &
  up=$!
  disown $up 2>/dev/null
  for ((k = 0; k < 400; k++)); do
    [ -e "$d/ready" ] && break
    kill -0 $up 2>/dev/null || [ -e "$d/ready" ] || die "$n: init failed: $(tail -qn2 "$d/log/init.log")"
    sleep 0.05
  done
  [ -e "$d/ready" ] || die "$n: init did not become ready in 20 s: $(tail -qn2 "$d/log/init.log")"
  # setsid may fork (when it is a group leader), so walk down to the process that is PID 1 of its namespace
  p=$up
  for ((k = 0; k < 5; k++)); do
    if [ "$(awk '/^NSpid:/{print $NF}' "/proc/$p/status" 2>/dev/null)" = 1 ] &&
       [ "$(awk '/^NSpid:/{print NF}' "/proc/$p/status")" -gt 2 ]; then break; fi
    p=$(ps -o pid= --ppid "$p" | head -1 | tr -d ' ')
    [ -n "$p" ] || die "$n: lost track of its init"
  done
  pid_save "$d/init.pid" "$p"
}

# node_kill NODE: SIGKILL the node's PID 1; the kernel kills everything else in the PID namespace
node_kill() {
  local p k
  p=$(pid_alive "$WORK/nodes/$1/init.pid") || { rm -f "$WORK/nodes/$1/init.pid"; return 0; }
  kill -KILL "$p"
  for ((k = 0; k < 100; k++)); do pid_alive "$WORK/nodes/$1/init.pid" >/dev/null || break; sleep 0.02; done
  rm -f "$WORK/nodes/$1/init.pid"
}

# host pids of every process in a node except its init
node_pids() {
  local init ns
  init=$(node_pid "$1") || return 1
  ns=$(readlink "/proc/$init/ns/pid"); ns=${ns//[^0-9]/}
  ps -eo pid=,pidns= | awk -v ns="$ns" -v init="$init" '$2 == ns && $1 != init {print $1}'
}

node_signal() {  # NODE SIGNAL: to every process of a node but its init
  local p
  p=$(node_pids "$1") || die "$1 is not running"
  # one of them may have ended since; kill signals the others all the same
  [ -z "$p" ] || xargs kill "-$2" <<<"$p" 2>/dev/null || node_pid "$1" >/dev/null || die "$1 is not running"
}

nodes_list() { local i c; c=$(cat "$WORK/count" 2>/dev/null || echo 0); for ((i = 1; i <= c; i++)); do node_name $i; done; }

bed_teardown() {
  local n ns p
  if p=$(bed_other); then note "bed '$BED_NAME' belongs to $p: left alone"; return 0; fi
  if [ -d "$WORK/nodes" ]; then
    for n in "$WORK"/nodes/*/; do
      [ -d "$n" ] || continue
      n=${n%/}; n=${n##*/}
      [ -e "$WORK/nodes/$n/delay.pid" ] && pid_stop "$WORK/nodes/$n/delay.pid" 2
      node_kill "$n"
    done
  fi
  for ns in $(ip -o netns list 2>/dev/null | awk '{print $1}'); do
    case $ns in "$BED_NAME-$BED_HOST"[0-9]*|"$BED_SWITCH"|"$BED_NAME-ctl"|"$BED_NAME-probe") ;; *) continue;; esac
    # whatever still runs in a namespace of this bed was started by it (a lost work directory, say)
    for p in $(ip netns pids "$ns" 2>/dev/null); do kill -KILL "$p" 2>/dev/null; done
    ip netns del "$ns" || die "cannot delete namespace $ns"
  done
  ip link del "${BED_NAME}head" 2>/dev/null
  rm -rf "$WORK/nodes" "$WORK/hosts" "$WORK/hosts.head" "$WORK/ssh_config.d" "$WORK/count"
  # The fence route stays on purpose: a test that still aims at a dead node's
  # address fails at once instead of reaching out through the default route.
  return 0
}

# ---- delay: tapdelay.py holds the frames, the wiring is done here
delay_on() {  # NODE MS
  local n=$1 ms=$2 i ns port k mac d=$WORK/nodes/$1
  i=$(node_idx "$n") || exit 1
  ns=$(node_ns "$n"); port=$(node_port "$i")
  [ -c /dev/net/tun ] || die "delay needs /dev/net/tun (CONFIG_TUN)"
  command -v python3 >/dev/null || die "delay needs python3"
  delay_off "$n"
  mkdir -p "$d/log"
  : > "$d/log/delay.log"
  setsid python3 "$HERE/tapdelay.py" --node-ns "$ns" --node-if tapd0 --switch-ns "$BED_SWITCH" --switch-if "${port}d" \
    --ms "$ms" </dev/null >>"$d/log/delay.log" 2>&1 9>&- &
  pid_save "$d/delay.pid" $!
  for ((k = 0; k < 100; k++)); do grep -q ready "$d/log/delay.log" && break; sleep 0.05; done
  grep -q ready "$d/log/delay.log" || die "delay did not start: $(tail -qn2 "$d/log/delay.log")"
  # the TAP takes over the veth's name, address and MAC, so that connections and ARP caches go on
  mac=$(ip -n "$ns" -o link show eth0 | sed -n 's/.*link\/ether \([0-9a-f:]*\).*/\1/p')
  ip -n "$ns" -batch - <<EOB || die "cannot rewire $n"
link set eth0 down
link set eth0 name veth0
addr flush dev veth0
link set tapd0 name eth0 address $mac txqueuelen 4000
addr replace $BED_NET.$i/24 dev eth0
link set eth0 up
EOB
  ip -n "$BED_SWITCH" link set "$port" nomaster
  ip -n "$BED_SWITCH" link set "${port}d" txqueuelen 4000 master br0 up
}
delay_off() {  # NODE
  local n=$1 i ns
  i=$(node_idx "$n") || exit 1
  ns=$(node_ns "$n")
  [ -e "$WORK/nodes/$n/delay.pid" ] && pid_stop "$WORK/nodes/$n/delay.pid" 3
  if ip -n "$ns" link show veth0 >/dev/null 2>&1; then
    ip -n "$ns" -batch - <<EOB || die "cannot rewire $n"
link set veth0 name eth0
addr replace $BED_NET.$i/24 dev eth0
link set eth0 up
EOB
    ip -n "$BED_SWITCH" link set "$(node_port "$i")" master br0 up
  fi
}

# ---- faults
fault() {  # fault KIND NODE [ARG]
  local kind=$1 n=$2 arg=${3:-} i ns port p
  i=$(node_idx "$n") || exit 1
  ns=$(node_ns "$n"); port=$(node_port "$i")
  if [ "$n" = ctl ]; then
    case $kind in power|crash|freeze|thaw) die "ctl knows network faults only; see slurm_bed.sh ctld-kill";; esac
  fi
  case $kind in
    cut)      ip -n "$BED_SWITCH" link set "$port" nomaster ;;              # silent: carrier stays, frames vanish
    linkdown) ip -n "$ns" link set eth0 down ;;                            # NIC down on the node's own side
    portdown) ip -n "$BED_SWITCH" link set "$port" down ;;                 # switch port down: node loses carrier
    heal)     delay_off "$n"
              ip -n "$BED_SWITCH" link set "$port" master br0 up
              ip -n "$ns" link set eth0 up
              ip -n "$ns" addr replace "$BED_NET.$i/24" dev eth0
              fault unloss "$n" 2>/dev/null
              ip netns exec "$BED_SWITCH" tc qdisc del dev "$port" root 2>/dev/null
              ip netns exec "$ns" tc qdisc del dev eth0 root 2>/dev/null; true ;;
    power)    ip -n "$BED_SWITCH" link set "$port" nomaster; node_kill "$n" ;;  # silence, then everything dead
    crash)    node_kill "$n" ;;                                            # all processes die, kernel still answers: FIN/RST
    freeze)   node_signal "$n" STOP ;;
    thaw)     node_signal "$n" CONT ;;
    rate)     [ -n "$arg" ] || die "rate needs a value such as 100mbit"    # both directions
              ip netns exec "$BED_SWITCH" tc qdisc replace dev "$port" root tbf rate "$arg" burst 64kb latency 200ms
              ip netns exec "$ns" tc qdisc replace dev eth0 root tbf rate "$arg" burst 64kb latency 200ms ;;
    unrate)   ip netns exec "$BED_SWITCH" tc qdisc del dev "$port" root 2>/dev/null
              ip netns exec "$ns" tc qdisc del dev eth0 root 2>/dev/null; true ;;
    loss)     [ -n "$arg" ] || die "loss needs a probability such as 0.05"  # both directions, in the node's own firewall
              command -v iptables >/dev/null || die "loss needs the package iptables"
              fault unloss "$n"
              ip netns exec "$ns" iptables -A INPUT  -i eth0 -m statistic --mode random --probability "$arg" -j DROP
              ip netns exec "$ns" iptables -A OUTPUT -o eth0 -m statistic --mode random --probability "$arg" -j DROP ;;
    unloss)   ip netns exec "$ns" iptables -F INPUT 2>/dev/null; ip netns exec "$ns" iptables -F OUTPUT 2>/dev/null; true ;;
    delay)    [ -n "$arg" ] || die "delay needs milliseconds (one way)"; delay_on "$n" "$arg" ;;
    undelay)  delay_off "$n" ;;
    *) die "unknown fault: $kind" ;;
  esac
}
