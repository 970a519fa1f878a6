#!/usr/bin/env bash
# Three hosts on one machine, for the tests of targets: network namespaces where they are allowed, else addresses of the
# loopback interface, named in /etc/hosts. Needs root, iproute2, openssh-server; for `slurm` also slurmctld, slurmd and munge.
#   lab.sh up FOLDER        makes the hosts; FOLDER/kind says of which kind they are
#   lab.sh sshd FOLDER      starts an sshd on each; FOLDER/ssh_config reaches them as h1, h2, h3
#   lab.sh slurm FOLDER     starts Slurm; FOLDER/slurm.conf is its configuration
#   lab.sh cut FOLDER h2    ends every process of a host, as where it loses its power
#   lab.sh down FOLDER      ends and removes everything
# LAB_KIND=loopback takes addresses where namespaces are allowed, too.
# A host of a namespace has its own network, its own host name and its own FOLDER/own; files else are shared.
set -euo pipefail
what=$1 folder=$(realpath -m "$2")
HOSTS="1 2 3"
ID=$(($(printf %s "$folder" | cksum | tr ' ' '\n' | head -n 1) % 200 + 20)) # two labs may be there at the same time
NET=10.77.$ID

address() { [ "$(cat "$folder/kind")" = namespaces ] && echo "$NET.1$1" || echo "127.$ID.0.$(($1 + 1))"; }

# Runs a command on a host, in the background, and notes its process.
on_host() {
    local n=$1
    shift
    if [ "$(cat "$folder/kind")" = namespaces ]; then
        # Not `ip netns exec`, which remounts /sys, without the control groups that slurmd looks for.
        nsenter --net="/run/netns/stk$ID-h$n" unshare --uts --mount sh -c '
            hostname "h$1" && mount --bind "$2/hosts" /etc/hosts && mount --bind "$2/own-$1" "$2/own"
            shift 2; exec "$@"' sh "$n" "$folder" "$@" </dev/null >>"$folder/host-$n.log" 2>&1 &
    else
        "$@" </dev/null >>"$folder/host-$n.log" 2>&1 &
    fi
    echo $! >>"$folder/host-$n.pids"
}

up() {
    mkdir -p "$folder/own"
    echo loopback >"$folder/kind"
    printf '127.0.0.1 localhost\n' >"$folder/hosts"
    if [ "${LAB_KIND:-}" != loopback ] && ip netns add "stk$ID-probe" 2>/dev/null; then
        ip netns del "stk$ID-probe"
        if ip link add "stk$ID" type bridge 2>/dev/null; then echo namespaces >"$folder/kind"; fi
    fi
    for n in $HOSTS; do echo "$(address "$n") h$n" >>"$folder/hosts" && mkdir -p "$folder/own-$n"; done
    if [ "$(cat "$folder/kind")" = loopback ]; then # names must mean addresses here, until `down`
        sed -n 's/ h\([1-3]\)$/ h\1 # stoker-lab-'"$ID"'/p' "$folder/hosts" >>/etc/hosts
        return 0
    fi
    ip addr add "$NET.1/24" dev "stk$ID" && ip link set "stk$ID" up
    for n in $HOSTS; do
        ip netns add "stk$ID-h$n"
        ip link add "stk$ID-v$n" type veth peer name eth0 netns "stk$ID-h$n"
        ip link set "stk$ID-v$n" master "stk$ID" up
        ip -n "stk$ID-h$n" addr add "$(address "$n")/24" dev eth0
        ip -n "stk$ID-h$n" link set eth0 up && ip -n "stk$ID-h$n" link set lo up
    done
}

sshd() {
    mkdir -p /run/sshd
    ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
    ssh-keygen -q -t ed25519 -N '' -f "$folder/host_key"
    cp "$folder/key.pub" "$folder/authorized_keys"
    chmod 600 "$folder/authorized_keys"
    for n in $HOSTS; do
        port=22
        [ "$(cat "$folder/kind")" = namespaces ] || port=2222
        printf '%s\n' "ListenAddress $(address "$n"):$port" "HostKey $folder/host_key" \
            "AuthorizedKeysFile $folder/authorized_keys" "StrictModes no" "UsePAM no" "PermitRootLogin yes" \
            "PasswordAuthentication no" "AcceptEnv SLURM_CONF" "PidFile none" "PrintMotd no" "MaxStartups 100" >"$folder/sshd-$n.conf"
        printf '%s\n' "Host h$n" "    HostName $(address "$n")" "    Port $port" "    IdentityFile $folder/key" \
            "    IdentitiesOnly yes" "    UserKnownHostsFile $folder/known_hosts" "    LogLevel ERROR" \
            "    StrictHostKeyChecking accept-new" >>"$folder/ssh_config"
        on_host "$n" /usr/sbin/sshd -D -e -f "$folder/sshd-$n.conf"
    done
    for n in $HOSTS; do
        for _ in $(seq 100); do
            ssh -F "$folder/ssh_config" -o BatchMode=yes "h$n" true 2>/dev/null && continue 2
            sleep 0.1
        done
        echo "the sshd of h$n does not answer; see $folder/host-$n.log" >&2
        exit 1
    done
}

slurm() {
    mkdir -p "$folder/state" "$folder/spool" "$folder/munge"
    chmod 700 "$folder/munge"
    dd if=/dev/urandom of="$folder/munge/key" bs=32 count=1 status=none
    chmod 600 "$folder/munge/key"
    munged --force --foreground --socket="$folder/munge/socket" --key-file="$folder/munge/key" \
        --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" \
        >"$folder/munged.log" 2>&1 </dev/null &
    echo $! >>"$folder/control.pids"
    control=127.0.0.1
    [ "$(cat "$folder/kind")" = namespaces ] && control=$NET.1
    {
        printf '%s\n' "ClusterName=lab" "SlurmctldHost=$(hostname)($control)" "SlurmUser=root" "SlurmdUser=root" \
            "AuthType=auth/munge" "AuthInfo=socket=$folder/munge/socket" "CryptoType=crypto/munge" \
            "StateSaveLocation=$folder/state" "SlurmdSpoolDir=$folder/spool/%n" \
            "SlurmctldPidFile=$folder/slurmctld.pid" "SlurmdPidFile=$folder/slurmd-%n.pid" \
            "SlurmctldPort=$((16000 + ID * 10))" "SlurmdPort=$((16001 + ID * 10))" "ProctrackType=proctrack/linuxproc" "TaskPlugin=task/none" \
            "SelectType=select/cons_tres" "SelectTypeParameters=CR_Core" "GresTypes=gpu" "ReturnToService=2" \
            "SlurmdParameters=config_overrides" "MpiDefault=none" "KillWait=5" "SchedulerParameters=sched_interval=1" \
            "AccountingStorageType=accounting_storage/none" "JobAcctGatherType=jobacct_gather/none" \
            "PartitionName=lab Nodes=h1,h2,h3 Default=YES MaxTime=60 State=UP OverSubscribe=NO"
        for n in $HOSTS; do
            port=$((16001 + ID * 10))
            [ "$(cat "$folder/kind")" = namespaces ] || port=$((port + n))
            where="NodeAddr=$(address "$n") Port=$port"
            [ "$(cat "$folder/kind")" = namespaces ] || where="$where NodeHostname=$(hostname)"
            echo "NodeName=h$n $where CPUs=4 RealMemory=1000 Gres=gpu:2 State=UNKNOWN"
        done
    } >"$folder/slurm.conf"
    for n in 0 1; do [ -e "$folder/gpu$n" ] || mknod "$folder/gpu$n" c 1 3; done # `Count=` alone drains the node
    echo "Name=gpu File=$folder/gpu[0-1]" >"$folder/gres.conf"
    echo "CgroupPlugin=cgroup/v1" >"$folder/cgroup.conf"
    export SLURM_CONF="$folder/slurm.conf"
    slurmctld -D -c -f "$folder/slurm.conf" >"$folder/slurmctld.log" 2>&1 </dev/null &
    echo $! >>"$folder/control.pids"
    for n in $HOSTS; do on_host "$n" slurmd -D -N "h$n" -f "$folder/slurm.conf"; done
    for _ in $(seq 300); do
        [ "$(sinfo --noheader --format='%D %T' 2>/dev/null)" = "3 idle" ] && return 0
        sleep 0.1
    done
    echo "Slurm has not come up; see $folder/slurmctld.log and $folder/host-1.log" >&2
    exit 1
}

# Ends processes and all that they have started.
end() {
    for pid in "$@"; do
        local children
        children=$(pgrep -P "$pid" || :)
        kill -KILL "$pid" 2>/dev/null || :
        # shellcheck disable=SC2086 # one word for each process
        end $children
    done
}

cut() {
    local n=${1#h}
    if [ "$(cat "$folder/kind")" = namespaces ]; then
        ip netns pids "stk$ID-h$n" | xargs -r kill -KILL || :
    fi
    # shellcheck disable=SC2046
    end $(cat "$folder/host-$n.pids")
}

down() {
    for n in $HOSTS; do [ -e "$folder/host-$n.pids" ] && cut "h$n"; done
    # shellcheck disable=SC2046
    [ ! -e "$folder/control.pids" ] || end $(cat "$folder/control.pids")
    if [ "$(cat "$folder/kind")" = namespaces ]; then
        for n in $HOSTS; do ip netns del "stk$ID-h$n" || :; done
        ip link del "stk$ID" || :
    else
        grep -v "# stoker-lab-$ID\$" /etc/hosts >"$folder/etc-hosts" || :
        cat "$folder/etc-hosts" >/etc/hosts # in a container it cannot be replaced
    fi
}

shift 2
$what "$@"
