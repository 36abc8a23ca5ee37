#!/usr/bin/env bash
# Train the demo preset into a run folder and say where the report lies.
set -euo pipefail
VENV=${VENV:-.venv}
run=${1:-runs/demo}
shift || true
began=$SECONDS
"$VENV/bin/agentrl" sandbox build --backend bubblewrap >/dev/null
echo "demo: sandbox image ready in $((SECONDS - began)) s"
if [ -e "$run" ]; then
    kept="$run-$(date +%Y%m%d-%H%M%S)"
    mv "$run" "$kept"
    echo "demo: an earlier run is kept in $kept"
fi
began=$SECONDS
"$VENV/bin/agentrl" train swe-gym --preset demo --run-dir "$run" "$@"
echo "demo: $(((SECONDS - began) / 60)) min $(((SECONDS - began) % 60)) s from the start of training to the report"
echo "demo: report      $run/report.html"
echo "demo: trajectories: $VENV/bin/agentrl view $run"
