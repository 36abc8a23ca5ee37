"""The server that runs inside a sandbox as PID 1 and answers JSON lines on its stdin/stdout (see `main`).

Standard library only, apart from pytest and the editor of the tools tree. Copied to /opt/agentrl/server in
the image and started by `launch.py`, so nothing in here imports anything of agentrl.
"""
