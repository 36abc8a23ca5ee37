#!/usr/bin/env bash
# Make the virtual environment from the pinned lock. Prints how long it took; stops with the remedy where a package
# cannot be had.
set -euo pipefail
PYTHON=${PYTHON:-python3.11} VENV=${VENV:-.venv}
began=$SECONDS

command -v "$PYTHON" >/dev/null || {
    echo "install: $PYTHON is missing. Install Python 3.11 with its venv module, or name one: make PYTHON=/path/to/python3.11" >&2
    exit 3
}
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || {
    echo "install: $("$PYTHON" --version) found, Python 3.11 or 3.12 needed: make PYTHON=python3.11" >&2
    exit 3
}
# An interpreter without pip is a half-made one: Debian's python without python3-venv leaves it behind.
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear "$VENV" || {
    rm -rf "$VENV"
    echo "install: the venv module is missing: apt-get install python3-venv" >&2
    exit 3
}
echo "install: packages of requirements-cpu.lock into $VENV (about 310 MB to fetch, 2.7 GB on disk)"
log=$(mktemp)
"$VENV/bin/python" -m pip install --quiet --no-deps -r requirements-cpu.lock 2>"$log" || {
    grep -v '^WARNING' "$log" | tail -5 >&2
    echo "install: a pinned package could not be had. torch==2.13.0+cpu is not on the default index: set PIP_FIND_LINKS" >&2
    echo "         (a folder with the wheel) or PIP_EXTRA_INDEX_URL (an index of PyTorch's CPU builds) and run again." >&2
    exit 3
}
"$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e . 2>"$log" || { cat "$log" >&2; exit 3; }
rm -f "$log"
touch "$VENV/.installed"
echo "install: done in $(((SECONDS - began) / 60)) min $(((SECONDS - began) % 60)) s"
