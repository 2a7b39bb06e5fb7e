#!/usr/bin/env bash
# A real Slurm with two nodes, n1 and n2, on this machine; each has 4 GPUs that are not there.
#
#   eval "$(tests/cluster/slurm/cluster.sh start [DIR])"    then: srun -N2 hostname
#   tests/cluster/slurm/cluster.sh stop [DIR]               ends every job and daemon, removes DIR
#
# DIR (default: slurm-two-nodes in the temporary folder) holds every file. Needs root and
#   apt-get install slurmctld slurmd slurm-client munge
set -euo pipefail

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

fail() {
    echo "error: $*" >&2
    exit 2
}

[ $# -ge 1 ] && [ $# -le 2 ] || usage
dir=$(realpath -m "${2:-${TMPDIR:-/tmp}/slurm-two-nodes}")

# The processes of this cluster: its daemons, and what they started for jobs. They carry DIR in
# their command line or their environment; the daemons' own pid files know nothing of the latter.
members() {
    local pid
    for pid in $(pgrep '^(munged|slurm)'); do
        { tr '\0' '\n' <"/proc/$pid/cmdline"; tr '\0' '\n' <"/proc/$pid/environ"; } 2>/dev/null |
            grep -F -- "$dir/" >/dev/null && echo "$pid" # not -q: pipefail
    done
    return 0
}

stop() {
    export SLURM_CONF=$dir/slurm.conf
    local pids try
    if [ -s "$dir/slurm.conf" ]; then # a cluster that does not answer must not keep us waiting
        timeout 10 scancel --full --user=root 2>/dev/null || true
        for try in {1..50}; do
            [ -n "$(timeout 5 squeue --noheader 2>/dev/null)" ] || break
            sleep 0.2
        done
    fi
    for try in {1..60}; do
        pids=$(members)
        [ -n "$pids" ] || break
        # shellcheck disable=SC2086 # one word per process
        if [ "$try" -gt 50 ]; then kill -KILL $pids; else kill $pids; fi 2>/dev/null || true
        sleep 0.2
    done
    rm -rf "$dir"
}

case $1 in
    stop) [ ! -e "$dir" ] || [ -e "$dir/munge" ] || fail "$dir holds no cluster"; stop; exit ;;
    start) ;;
    *) usage ;;
esac

[ "$(id -u)" = 0 ] || fail "a Slurm node daemon needs root"
missing=$(for name in slurmctld slurmd srun:slurm-client munged:munge; do
    PATH=$PATH:/usr/sbin command -v "${name%:*}" >/dev/null || echo "${name#*:}"
done)
[ -z "$missing" ] || fail "apt-get install ${missing//$'\n'/ }"
PATH=$PATH:/usr/sbin
[ ! -e "$dir" ] || fail "$dir exists: tests/cluster/slurm/cluster.sh stop $dir"
unshare --mount --uts true 2>/dev/null || fail "no mount namespaces here (CAP_SYS_ADMIN)"

mkdir -p "$(dirname "$dir")"
mkdir -m 700 "$dir" "$dir/munge" "$dir/state" "$dir/n1" "$dir/n2"
trap 'exec >&3 2>&4; tail -n 40 "$dir"/*.log >&2 || true; stop' ERR

# Ports of our own, below those that the kernel gives to outgoing connections.
for base in $(seq 26800 10 28000); do
    free=1
    for port in "$base" $((base + 1)) $((base + 2)); do
        if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then free=; fi
    done
    [ -z "$free" ] || break
done

cat >"$dir/slurm.conf" <<END
ClusterName=two
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$base
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
KillWait=5
MailProg=/bin/true
ReturnToService=2
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
MinJobAge=600
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port=$((base + 1)) CPUs=8 RealMemory=1000 Gres=gpu:4
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port=$((base + 2)) CPUs=8 RealMemory=1000 Gres=gpu:4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
END
cat >"$dir/gres.conf" <<END
AutoDetect=off
NodeName=n[1-2] Name=gpu File=$dir/gpu[0-3]
END
echo "CgroupPlugin=cgroup/v1" >"$dir/cgroup.conf" # the default asks systemd
for i in 0 1 2 3; do mknod "$dir/gpu$i" c 1 3; done
{ cat /etc/hosts; echo "127.0.0.1 n1 n2"; } >"$dir/hosts"

# No daemon may keep this script's own output open: whoever reads that would wait for the daemons.
exec 3>&1 4>&2 >"$dir/start.log" 2>&1 </dev/null
start_daemon() { "$@" 3>&- 4>&-; }
(umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key")
start_daemon munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
    --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
export SLURM_CONF=$dir/slurm.conf
start_daemon slurmctld -f "$SLURM_CONF"
for node in n1 n2; do
    # Names that nobody else has to know: for a node's processes alone, they stand in /etc/hosts.
    start_daemon unshare --mount --uts bash -c "
        mount --bind '$dir/hosts' /etc/hosts && hostname $node
        exec slurmd -f '$SLURM_CONF' -N $node"
done
for _ in {1..400}; do
    [ "$(sinfo --noheader --nodes n1,n2 --format %T --states idle -N | wc -l)" = 2 ] && break
    sleep 0.2
done
sinfo -N
[ "$(sinfo --noheader --nodes n1,n2 --format %T --states idle -N | wc -l)" = 2 ]
exec >&3 2>&4
echo "export SLURM_CONF=$SLURM_CONF"
