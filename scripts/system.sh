#!/usr/bin/env bash
# Install the system programs named as arguments' sets: `bubblewrap` (sandboxes without a daemon and the tool that
# builds their root file system), `docker`, `browser`. Does nothing for what is there; says the command where it may not.
set -euo pipefail
declare -A programs=([bubblewrap]="bwrap mmdebstrap git" [docker]="dockerd iptables" [browser]="chromium")
declare -A packages=([bubblewrap]="bubblewrap mmdebstrap git" [docker]="docker.io iptables" [browser]="chromium")

want=()
[ "$(id -u)" -eq 0 ] || {
    # mmdebstrap maps user ids with it where it does not run as root.
    programs[bubblewrap]+=" newuidmap"
    packages[bubblewrap]+=" uidmap"
}
for set in "$@"; do
    for program in ${programs[$set]}; do
        command -v "$program" >/dev/null || { want+=(${packages[$set]}); break; }
    done
done
[ ${#want[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "system: missing programs; as root: apt-get install -y --no-install-recommends ${want[*]}" >&2
    exit 3
fi
began=$SECONDS
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null
apt-get install -y -qq --no-install-recommends "${want[@]}" >/dev/null
echo "system: installed ${want[*]} in $((SECONDS - began)) s"
