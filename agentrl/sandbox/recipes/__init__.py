"""Recipes of sandbox images, as package data: `base.sh` and `base.packages.txt` make the Debian root file
system, `pytest.txt` and `editor.txt` pin (version and hash) what goes into its tools tree, `tasks/` what the tests of
one version of a repository need beside it. `agentrl.sandbox.images` runs them.
"""
