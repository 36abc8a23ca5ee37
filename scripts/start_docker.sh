#!/usr/bin/env bash
# Install (Debian packages) and start a Docker daemon, unless one answers already. Needs root.
# Exit 0: a daemon answers. Exit 1: none does, with the reason on stderr.
set -u

LOG="${DOCKERD_LOG:-${TMPDIR:-/tmp}/dockerd.log}"
WAIT_S="${DOCKERD_WAIT_S:-60}"

# `docker version` asks the daemon; `docker --version` would not.
answers() { timeout "$1" docker version >/dev/null 2>&1; }
fail() { echo "start_docker: $*" >&2; exit 1; }

answers 5 && { echo "start_docker: a daemon answers already"; exit 0; }
[ "$(id -u)" = 0 ] || fail "needs root to install and start a daemon; remedy: sudo $0"

bash "$(dirname "$0")/system.sh" docker >&2 || fail "docker.io could not be installed"
if ! mountpoint -q /sys/fs/cgroup; then
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq cgroupfs-mount >&2 && cgroupfs-mount \
    || fail "no cgroup file system could be mounted"
fi

# Pid files of a killed daemon hang the next one; they may go only where no daemon lives.
if ! pgrep -x dockerd >/dev/null; then
  rm -f /var/run/docker.pid /var/run/docker/containerd/containerd.pid
  setsid nohup dockerd --live-restore --log-level warn >"$LOG" 2>&1 </dev/null &
fi

end=$((SECONDS + WAIT_S))
while [ "$SECONDS" -lt "$end" ]; do
  answers 2 && { echo "start_docker: daemon started, log $LOG"; exit 0; }
  sleep 0.2
done
tail -20 "$LOG" >&2
fail "no daemon answered within ${WAIT_S} s"
