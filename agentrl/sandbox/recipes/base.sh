#!/bin/sh
# Build the base root file system as one tar: Debian 12 with Python 3.11, git and the tools that agents reach for.
#   base.sh PACKAGES_FILE OUT.tar
# Root uses chroot; anyone else needs unprivileged user namespaces, newuidmap and a range in /etc/subuid.
# AGENTRL_DEBIAN_MIRROR replaces mmdebstrap's default mirror.
set -eu
packages=$(paste -sd, "$1")
out=$2
# The essential variant leaves apt itself out: nothing can be installed inside, there is no network either.
# Python's own __pycache__ stays: the root is read-only at run time, so every start would compile again without it.
exec mmdebstrap --quiet --variant=essential --include="$packages" \
  --aptopt='Acquire::Languages "none"' \
  --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-exclude=/usr/share/info/*' \
  --dpkgopt='path-exclude=/usr/share/zoneinfo/right/*' \
  --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1"/var/cache/debconf/* "$1"/var/log/*' \
  --customize-hook='find "$1"/usr -name "__pycache__" -path "*lib2to3*" -prune -exec rm -rf {} +' \
  --customize-hook='echo "agent:x:1000:1000:agent:/tmp:/bin/bash" >> "$1"/etc/passwd' \
  --customize-hook='echo "agent:x:1000:" >> "$1"/etc/group' \
  --customize-hook='mkdir -p "$1"/testbed "$1"/opt/agentrl && chown 1000:1000 "$1"/testbed' \
  --customize-hook='ln -s /usr/bin/python3 "$1"/usr/local/bin/python' \
  --customize-hook='printf "[safe]\n\tdirectory = *\n[user]\n\tname = agent\n\temail = agent@localhost\n[init]\n\tdefaultBranch = main\n[advice]\n\tdetachedHead = false\n" > "$1"/etc/gitconfig' \
  bookworm "$out" ${AGENTRL_DEBIAN_MIRROR:-}
