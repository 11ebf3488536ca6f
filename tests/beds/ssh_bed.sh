#!/bin/bash
# ssh_bed.sh: N machines-in-namespaces on one Linux host, each with its own sshd.
usage() { cat <<'EOU'
usage: ssh_bed.sh up N WORK             make nodes node1..nodeN (idempotent; N <= 250)
       ssh_bed.sh down WORK             remove everything (idempotent)
       ssh_bed.sh status WORK           one line a node; rc 0 if all answer
       ssh_bed.sh exec NODE WORK CMD..  run CMD inside a node ("head": here, with the bed's names)
       ssh_bed.sh FAULT NODE WORK [ARG] cut | linkdown | portdown | heal | power | crash | boot |
                                        freeze | thaw | rate RATE | unrate | loss P | unloss |
                                        delay MS | undelay | sshd-stop | sshd-start
       ssh_bed.sh unfence WORK          drop the fence route left by down
up writes: WORK/ssh_config (use: ssh -F WORK/ssh_config node3), WORK/id_ed25519, WORK/known_hosts,
WORK/hosts.  Environment: BED_NAME, BED_NET, BED_HOST (see bedlib.sh).
EOU
}
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
. "$HERE/bedlib.sh" || exit 1

sshd_start() {  # NODE
  local n=$1 d=$WORK/nodes/$1
  node_exec "$n" /usr/sbin/sshd -f "$d/sshd_config" -E "$d/log/sshd.log" 9>&- </dev/null >>"$d/log/sshd.out" 2>&1 ||
    die "$n: sshd did not start: $(tail -qn2 "$d/log/sshd.out" "$d/log/sshd.log")"
}

write_node_files() {  # NUMBER
  local i=$1 n d
  n=$(node_name "$i"); d=$WORK/nodes/$n
  mkdir -p "$d/log"
  [ -s "$WORK/hostkeys/$n" ] || ssh-keygen -q -t ed25519 -N '' -C "$n" -f "$WORK/hostkeys/$n" </dev/null
  cat > "$d/sshd_config" <<EOC
Port 22
ListenAddress $BED_NET.$i
HostKey $WORK/hostkeys/$n
PidFile $d/sshd.pid
AuthorizedKeysFile $WORK/authorized_keys
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
AcceptEnv LANG LC_*
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org
Subsystem sftp internal-sftp
EOC
}

write_client_files() {  # N
  local n=$1 i name
  { for ((i = 1; i <= n; i++)); do
      name=$(node_name $i)
      echo "$name,$BED_NET.$i $(cut -d' ' -f1,2 "$WORK/hostkeys/$name.pub")"
    done; } > "$WORK/known_hosts"
  local common="    User root
    IdentityFile $WORK/id_ed25519
    IdentitiesOnly yes
    UserKnownHostsFile $WORK/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10"
  { for ((i = 1; i <= n; i++)); do printf 'Host %s\n    HostName %s\n' "$(node_name $i)" "$BED_NET.$i"; done
    printf 'Host %s* %s.*\n%s\n' "$BED_HOST" "$BED_NET" "$common"; } > "$WORK/ssh_config"
  mkdir -p "$WORK/ssh_config.d"
  cp "$WORK/ssh_config" "$WORK/ssh_config.d/bed.conf"
}

node_answers() { timeout 20 ssh -n -F "$WORK/ssh_config" "$1" hostname 2>/dev/null 9>&- | grep -qx "$1"; }

status() {
  local n init st out
  [ -s "$WORK/count" ] || { echo "no bed in $WORK"; return 1; }
  out=$(for n in $(nodes_list); do
    { init=$(node_pid "$n") || init=-
      if [ "$init" != - ] && node_answers "$n"; then st=up; else st=DOWN; fi
      echo "$n $st init=$init addr=$BED_NET.$(node_idx "$n")"; } &
  done | sort -V)
  echo "$out"
  ! grep -q ' DOWN ' <<<"$out"
}

up() {
  local n=$1 i t0 k status
  count_ok "$n"
  t0=$(now)
  apt_need iproute2 util-linux procps tini openssh-server openssh-client iptables
  lock_work
  if [ "$(cat "$WORK/count" 2>/dev/null)" = "$n" ] && status >/dev/null; then
    note "already up: $n nodes in $WORK"; return 0
  fi
  bed_claim
  bed_teardown
  preflight
  mkdir -p "$WORK/hostkeys" "$WORK/nodes" /run/sshd
  chmod 700 "$WORK/hostkeys"
  [ -s "$WORK/id_ed25519" ] || ssh-keygen -q -t ed25519 -N '' -C "test bed key" -f "$WORK/id_ed25519" </dev/null || die "ssh-keygen failed"
  cp "$WORK/id_ed25519.pub" "$WORK/authorized_keys"
  hosts_file "$n" > "$WORK/hosts"
  for ((i = 1; i <= n; i++)); do write_node_files $i; done
  write_client_files "$n"
  switch_up
  for ((i = 1; i <= n; i++)); do node_net_up $i; done
  local pids=()
  for ((i = 1; i <= n; i++)); do
    { node_boot $i; sshd_start "$(node_name $i)"; } & pids+=($!)
    if [ ${#pids[@]} -ge 4 ]; then wait "${pids[0]}" || die "a node did not boot"; pids=("${pids[@]:1}"); fi
  done
  for k in "${pids[@]}"; do wait "$k" || die "a node did not boot"; done
  echo "$n" > "$WORK/count"
  for ((k = 0; k < 5; k++)); do status > "$WORK/status.txt" && break; sleep 0.5; done
  status=0; grep -q ' DOWN ' "$WORK/status.txt" && status=1
  [ $status = 0 ] || { cat "$WORK/status.txt" >&2; die "some nodes do not answer"; }
  note "up: $n nodes in $(since "$t0") s; ssh -F $WORK/ssh_config $(node_name 1)"
}

cmd=${1:-}
case $cmd in
  up)     need_root; need_work "${3:-}"; up "${2:-}" ;;
  down)   need_root; [ $# -eq 3 ] && shift; need_work "${2:-}"; lock_work; t0=$(now); bed_teardown
          rm -rf "$WORK/hostkeys" "$WORK"/{id_ed25519,id_ed25519.pub,authorized_keys,known_hosts,ssh_config,status.txt}
          bed_other >/dev/null || rm -rf "$BED_RUN"
          note "down in $(since "$t0") s" ;;
  status) need_root; need_work "${2:-}"; status ;;
  unfence) need_root; ip route del unreachable "$BED_NET.0/24" metric $BED_FENCE_METRIC 2>/dev/null; true ;;
  exec)   need_root; need_work "${3:-}"; n=$2; shift 3
          if [ "$n" = head ]; then
            # shellcheck disable=SC2016  # expands inside the new namespace
            exec unshare --mount bash -c 'mount --make-rprivate /; { grep -v "^127\|^::1" "$1/hosts"; cat /etc/hosts; } > "$1/hosts.head"
              mount --bind "$1/hosts.head" /etc/hosts; mount --bind "$1/ssh_config.d" /etc/ssh/ssh_config.d; w=$1; shift; exec "$@"' head "$WORK" "$@"
          fi
          node_exec "$n" "$@" ;;
  cut|linkdown|portdown|heal|power|crash|freeze|thaw|rate|unrate|loss|unloss|delay|undelay)
          need_root; need_work "${3:-}"; fault "$cmd" "$2" "${4:-}" ;;
  boot)   need_root; need_work "${3:-}"; lock_work; i=$(node_idx "$2") || exit 1
          node_pid "$2" >/dev/null && die "$2 is running"
          ip -n "$BED_SWITCH" link set "$(node_port "$i")" master br0 up; node_boot "$i"; sshd_start "$2"; note "$2 booted" ;;
  sshd-stop)  need_root; need_work "${3:-}"; node_pid "$2" >/dev/null || die "$2 is not running"
          p=$(cat "$WORK/nodes/$2/sshd.pid" 2>/dev/null) || die "$2: no sshd"; node_exec "$2" kill "$p" ;;
  sshd-start) need_root; need_work "${3:-}"; sshd_start "$2" ;;
  -h|--help|help) usage ;;
  *) usage >&2; exit 2 ;;
esac
