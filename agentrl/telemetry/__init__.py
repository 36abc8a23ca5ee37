"""Metrics, events, live display, report and trajectory viewer. Fed with Events and files."""
