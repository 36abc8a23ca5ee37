"""The loop of a run, told top to bottom; what starts and watches its processes; the run folder; resume."""
