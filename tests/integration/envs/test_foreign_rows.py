"""Rows whose tree is in an image of someone else's, from prepare to grade on Docker: one of SWE-bench 5 with Django's
own runner and a script, one of SWE-smith, whose patch is the bug."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker
import pytest

from agentrl.config import SandboxConfig
from agentrl.sandbox import foreign, open_pool
from agentrl.sandbox.backend import docker_fault
from agentrl.sandbox.images import BASE_IMAGE, ensure_docker_image
from agentrl.wire import Grade, Sandbox, Task
from agentrl_envs.swe_gym import SweGymEnvironment
from agentrl_envs.swe_gym.diffs import make_patch

pytestmark = pytest.mark.docker

IMAGE = "foreign-test/rows:1"
TREE = {
    "django/calc.py": "def add(left, right):\n    return left - right\n",
    "pkg/__init__.py": "def double(number):\n    return 2 * number\n",
    "tests/app/test_app.py": (
        "import unittest\nfrom django.calc import add\n\n\nclass AddTests(unittest.TestCase):\n"
        "    def test_zero(self):\n        print('noise', end='')\n        self.assertEqual(add(2, 0), 2)\n"
    ),
    "tests/runtests.py": (
        "import os, sys, unittest\nsys.path[:0] = ['.', 'tests']\n"
        "names = [each for each in sys.argv[1:] if '.' in each]\nprint('Testing against Django', file=sys.stderr)\n"
        "suite = unittest.defaultTestLoader.loadTestsFromNames(names)\n"
        "sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())\n"
    ),
    "tests/test_pkg.py": (
        "from pkg import double\n\n\ndef test_double():\n    assert double(2) == 4\n\n\n"
        "def test_zero():\n    assert double(0) == 0\n"
    ),
}
FIX = make_patch(TREE, {**TREE, "django/calc.py": TREE["django/calc.py"].replace("-", "+")})
BUG = make_patch(TREE, {**TREE, "pkg/__init__.py": TREE["pkg/__init__.py"].replace("2 *", "3 *")})
NEW_TEST = "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n"
AT = "app.test_app.AddTests"
DJANGO = {
    "instance_id": "django__django-1",
    "repo": "django/django",
    "base_commit": "0" * 40,
    "problem_statement": "add(2, 3) gives -1",
    "patch": FIX,
    "test_patch": make_patch(TREE, {**TREE, "tests/app/test_app.py": TREE["tests/app/test_app.py"] + NEW_TEST}),
    "FAIL_TO_PASS": json.dumps([f"test_add ({AT}.test_add)"]),
    "PASS_TO_PASS": [f"test_zero ({AT}.test_zero)"],
    "image": IMAGE,
    "log_parser": "parse_log_django",
    "eval_type": "pass_and_fail",
    "eval_script": (
        "#!/bin/bash\nset -uxo pipefail\ncd /testbed\ngit checkout 0 tests/app/test_app.py\n"
        ": '>>>>> Start Test Output'\npython3 tests/runtests.py --verbosity 2 app.test_app\n"
        ": '>>>>> End Test Output'\n"
    ),
}
SMITH = {
    "instance_id": "owner__pkg.abcdef12.func__1",
    "repo": "swesmith/owner__pkg.abcdef12",
    "base_commit": "0" * 40,
    "problem_statement": "",
    "patch": BUG,
    "FAIL_TO_PASS": ["tests/test_pkg.py::test_double"],
    "PASS_TO_PASS": ["tests/test_pkg.py::test_zero"],
    "image_name": IMAGE,
}
MAKE = """
set -eu
mkdir -p /usr/local/lib/python3.11/dist-packages
cp -r /opt/agentrl/pytest/* /usr/local/lib/python3.11/dist-packages/
rm -rf /opt/agentrl /usr/local/bin/python* /usr/local/bin/pytest
ln -s /usr/bin/python3 /usr/local/bin/python
cd /testbed; git init -q .; git add -A; git -c user.name=x -c user.email=x@y commit -qm base
"""


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    if (fault := docker_fault()) is not None:
        pytest.skip(fault)
    client = docker.from_env(timeout=120)
    base = ensure_docker_image(client, BASE_IMAGE)
    recipe = f"FROM {base}\nUSER 0:0\nCOPY tree /testbed\nCOPY make.sh /tmp/make.sh\nRUN sh /tmp/make.sh\n"
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        trees = {f"tree/{path}": text for path, text in TREE.items()}
        for name, text in {"Dockerfile": recipe, "make.sh": MAKE, **trees}.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    context.seek(0)
    client.images.build(fileobj=context, custom_context=True, tag=IMAGE, network_mode="none", rm=True, forcerm=True)
    try:
        yield IMAGE
    finally:
        volume = foreign.seed_volume(client.api.inspect_image(IMAGE)["Id"])
        client.api.remove_image(IMAGE, force=True)
        with suppress(docker.errors.NotFound):
            client.api.remove_volume(volume)
        client.close()


def test_rows_in_foreign_images_are_prepared_collected_and_graded(image: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in (DJANGO, SMITH)))
    environment = SweGymEnvironment({"dataset": str(rows), "fresh_fraction": 1.0})
    config = SandboxConfig(backend="docker", size=1, starters=1, memory_mb=512, disk_mb=32, pull="never")

    async def changed(task: Task, sandbox: Sandbox) -> tuple[str, str]:
        """What is collected before and after the fix."""
        await environment.prepare(task, sandbox)
        unchanged = await environment.collect(task, sandbox)
        gold = environment.reference_patch(task).encode()
        applied = await sandbox.run("git apply -", timeout_s=30, stdin=gold)
        assert applied.exit_code == 0, applied.output
        return unchanged, await environment.collect(task, sandbox)

    async def work() -> dict[str, tuple[str, str, Grade, Grade]]:
        tasks, found = environment.every() or [], {}
        async with asyncio.timeout(300), open_pool(config, run_id="foreign-rows") as pool:
            patches = []
            for task in tasks:
                assert environment.image(task) == image
                async with pool.lease(image, timeout_s=120) as sandbox:
                    patches.append(await changed(task, sandbox))
            for task, (unchanged, patch) in zip(tasks, patches, strict=True):
                grades = []
                for each in (patch, unchanged):
                    async with pool.lease(image, timeout_s=120, grading=True) as sandbox:
                        grades.append(await environment.grade(task, sandbox, each))
                found[task.id] = (unchanged, patch, *grades)
        return found

    found: dict[str, Any] = asyncio.run(work())
    assert set(found) == {DJANGO["instance_id"], SMITH["instance_id"]}
    for unchanged, patch, gold, nothing in found.values():
        assert unchanged == ""
        assert patch.count("diff --git") == 1
        assert gold.reward == 1.0, gold.log
        assert nothing.reward == 0.0
    _, _, gold, nothing = found[DJANGO["instance_id"]]
    assert gold.tests == {f"test_add ({AT}.test_add)": "passed", f"test_zero ({AT}.test_zero)": "passed"}
    assert nothing.tests == {f"test_add ({AT}.test_add)": "failed", f"test_zero ({AT}.test_zero)": "passed"}
    assert "FAILED (failures=1)" in gold.output, "the test that must fail ran beside them"
