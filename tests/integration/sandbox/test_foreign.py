"""Images that were not built here, as SWE-Gym and SWE-bench publish them, are sandboxes on Docker: hardened as ours,
with their own Python, and with nothing of what came after the base commit (K46)."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import docker
import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import ImageUnfitError
from agentrl.sandbox import Pool, foreign, open_pool
from agentrl.sandbox.backend import docker_fault
from agentrl.sandbox.images import BASE_IMAGE, ensure_docker_image
from agentrl.sandbox.limits import Limits
from agentrl.wire.protocols import Sandbox

pytestmark = pytest.mark.docker
T = TypeVar("T")

PYTEST = "7.4.4"
LIKE_SWE_GYM = "foreign-test/like-swe-gym:1"
WITHOUT_HISTORY = "foreign-test/without-history:1"
EMPTY = "foreign-test/empty:1"
CONFIG = SandboxConfig(
    backend="docker", size=1, starters=1, memory_mb=512, pids=64, disk_mb=32, start_timeout_s=120, pull="never"
)

# Python is moved into the conda environment: there is none outside.
_MAKE_LIKE_SWE_GYM = r"""
set -eu
conda=/opt/miniconda3; env=$conda/envs/testbed
mkdir -p $env/bin $env/lib $conda/bin /opt/extra
mv /usr/lib/python3.11 $env/lib/python3.11
mv /usr/bin/python3.11 $env/bin/python3.11
ln -s python3.11 $env/bin/python
rm -rf /usr/bin/python3* /usr/local/bin/python* /usr/local/bin/pytest /opt/agentrl /usr/local/lib/python3.11
mkdir -p $env/lib/python3.11/dist-packages
mv /tmp/site/* $env/lib/python3.11/dist-packages/
echo /testbed/src > $env/lib/python3.11/dist-packages/editable.pth
cat > $conda/bin/activate <<'A'
echo "a line on stdout"
conda() {
    [ "$1 $2" = "activate testbed" ] || return 1
    export PATH="/opt/miniconda3/envs/testbed/bin:$PATH"
    export CONDA_PREFIX=/opt/miniconda3/envs/testbed CONDA_DEFAULT_ENV=testbed
}
A
mkdir -p /testbed/src/pkg /testbed/tests; cd /testbed
git init -q -b trunk .; git config user.name x; git config user.email x@y
printf 'def f(x):\n    return x + 2\n' > src/pkg/__init__.py
printf 'build/\n' > .gitignore
printf 'from pkg import f\ndef test_good(): assert f(1) == 3\ndef test_bad(): assert f(1) == 2\n' > tests/test_f.py
git add -A; git commit -qm base; base=$(git rev-parse HEAD)
printf 'def f(x):\n    return x + 1  # THE-LATER-FIX\n' > src/pkg/__init__.py; git commit -qam later; git branch future
printf '# THE-LATEST-FIX\n' >> src/pkg/__init__.py; git commit -qam latest
git update-ref refs/remotes/origin/main HEAD; git remote add origin https://example.invalid/x.git
git gc -q; git reset -q --hard $base
mkdir build; echo compiled > build/x.so; chmod 0400 build/x.so; touch -d 2001-02-03T04:05:06Z build/x.so
ln -s ../src build/link; chmod 700 /root
"""
_MAKE_WITHOUT_HISTORY = """
set -eu
mkdir -p /testbed; echo 'print("hello")' > /testbed/a.py
rm -rf /opt/agentrl
"""


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    if (fault := docker_fault()) is not None:
        pytest.skip(fault)
    client = docker.from_env(timeout=120)
    try:
        yield client
    finally:
        for image in (LIKE_SWE_GYM, WITHOUT_HISTORY, EMPTY):
            remove(client, image)
        client.close()


def remove(client: Any, image: str) -> None:
    """The image and the volume with its work tree."""
    try:
        image_id = client.api.inspect_image(image)["Id"]
    except docker.errors.ImageNotFound:
        return
    client.api.remove_image(image, force=True)
    if image_id not in {each["Id"] for each in client.api.images()}:
        with suppress(docker.errors.NotFound):
            client.api.remove_volume(foreign.seed_volume(image_id))


def build(client: Any, image: str, script: str, files: Path | None = None, *, folder_on_disk: str = "/var/data") -> str:
    """An image from the base image by `script`, run as root without a network, with `files` in /tmp/site; it declares
    `folder_on_disk` as a volume."""
    base = ensure_docker_image(client, BASE_IMAGE)
    copy = "" if files is None else "COPY site /tmp/site\n"
    variables = "ENV PYTHONPATH=/opt/extra API_TOKEN=secret BASH_ENV=/root/.bashrc\n"
    volume = f"VOLUME {folder_on_disk}\n" if folder_on_disk else ""
    recipe = f"FROM {base}\nUSER 0:0\n{copy}COPY make.sh /tmp/make.sh\nRUN sh /tmp/make.sh\n{variables}{volume}"
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, text in (("Dockerfile", recipe), ("make.sh", script)):
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        if files is not None:
            tar.add(files, "site")
    context.seek(0)
    client.images.build(fileobj=context, custom_context=True, tag=image, network_mode="none", rm=True, forcerm=True)
    return image


@pytest.fixture(scope="module")
def like_swe_gym(client: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(site), f"pytest=={PYTEST}"]
    fetched = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if fetched.returncode != 0:
        pytest.skip(f"pytest {PYTEST} cannot be had: {fetched.stderr[-300:]}")
    return build(client, LIKE_SWE_GYM, _MAKE_LIKE_SWE_GYM, site)


class ForeignHouse:
    """A pool of one sandbox and the loop it lives in."""

    def __init__(self, image: str) -> None:
        self.image = image
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        config = CONFIG.model_copy(update={"image": image})
        self.pool: Pool = self.runner.run(self.stack.enter_async_context(open_pool(config, run_id="foreign")))

    def lease(self, body: Callable[[Sandbox], Awaitable[T]]) -> T:
        async def main() -> T:
            async with asyncio.timeout(120), self.pool.lease(self.image, timeout_s=100) as sandbox:
                return await body(sandbox)

        return self.runner.run(main())

    def output(self, command: str) -> str:
        """What the command says in a sandbox that is as new."""

        async def body(sandbox: Sandbox) -> str:
            return (await sandbox.run(command, timeout_s=30)).output

        return self.lease(body)

    def close(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()


@pytest.fixture(scope="module")
def swe_gym_house(like_swe_gym: str) -> Iterator[ForeignHouse]:
    house = ForeignHouse(like_swe_gym)
    yield house
    house.close()


def test_k46_nothing_of_later_commits_can_be_found(swe_gym_house: ForeignHouse) -> None:
    said = swe_gym_house.output(
        "git log --all --format='%s %D'; git status --porcelain; git remote; git reflog; "
        "for each in /testbed /opt/agentrl-seed/tree; do cd $each; "
        "git -c safe.directory='*' cat-file --batch-all-objects --batch --buffer | grep -ac -e THE-LAT -e later; "
        "grep -rlac THE-LAT . ; done; find / -xdev -name '*.pack' 2>/dev/null | wc -l"
    )
    assert said.splitlines() == ["base HEAD -> main", "0", "0", "0"]  # / itself has no repository left to look into


def test_k41_commands_find_the_images_python_and_no_secret(swe_gym_house: ForeignHouse) -> None:
    said = swe_gym_house.output(
        "which python pytest; python -m pytest --version; echo $CONDA_DEFAULT_ENV $PYTHONPATH $HOME; "
        "env | grep -ci secret"
    )
    assert said.splitlines() == [
        "/opt/miniconda3/envs/testbed/bin/python",
        f"pytest {PYTEST}",
        "testbed /opt/extra /tmp",
        "0",
    ]


def test_tests_run_in_the_images_python(swe_gym_house: ForeignHouse) -> None:
    async def body(sandbox: Sandbox) -> None:
        report = await sandbox.run_tests(["-v"], canary=True, timeout_s=60)
        assert report.results == {"tests/test_f.py::test_good": "passed", "tests/test_f.py::test_bad": "failed"}
        assert report.canary_failed is True
        assert report.exit_code == 1
        assert f"pytest-{PYTEST}" in report.output
        assert "/opt/miniconda3/envs/testbed/bin/python" in report.output
        spoil = "import pytest\npytest.Function.runtest = lambda self: None\n"
        await sandbox.write_files({"src/pkg/__init__.py": spoil.encode()})
        report = await sandbox.run_tests(["-q"], canary=True, timeout_s=60)
        assert report.canary_failed is False

    swe_gym_house.lease(body)


_LISTING = (
    "find . -path ./.git/index -o -printf '%P %y %m %s %T@ %l %n %U\\n' | sort; "
    "find . -type f ! -path ./.git/index | sort | xargs sha1sum"
)


def test_k47_a_reset_brings_the_tree_back(swe_gym_house: ForeignHouse) -> None:
    async def spoil(sandbox: Sandbox) -> tuple[str, str]:
        before = await sandbox.run(_LISTING, timeout_s=30)
        await sandbox.edit("create", path="/testbed/new.py", file_text="x", timeout_s=30)
        await sandbox.run("git rm -rqf tests; rm build/x.so; chmod 0 src; rm -rf .git/objects", timeout_s=30)
        return sandbox.id, before.output

    async def look(sandbox: Sandbox) -> tuple[str, str]:
        return sandbox.id, (await sandbox.run(_LISTING, timeout_s=30)).output

    before, after = swe_gym_house.lease(spoil), swe_gym_house.lease(look)
    assert after == before  # the same sandbox, too
    assert "build/x.so f 600 9 981173106.0" in after[1]
    assert " 0\n" not in after[1]


def test_k46_it_is_as_hard_as_an_image_of_ours(swe_gym_house: ForeignHouse) -> None:
    said = swe_gym_house.output(
        "id -u; for each in / /opt/agentrl /opt/agentrl-seed/tree /opt/miniconda3; do touch $each/x 2>&- && echo $each;"
        "done; umount /testbed 2>&- && echo unmounted; "
        "grep -E '^Cap(Prm|Eff|Bnd)' /proc/self/status | cut -f2 | uniq; ls /sys/class/net; "
        "touch /var/data/x 2>&- && echo written; grep ' /var/data ' /proc/mounts | cut -d, -f1"
    )
    assert said.splitlines() == ["1000", "0000000000000000", "lo", "tmpfs /var/data tmpfs ro"]


def test_a_volume_in_the_work_tree_is_refused(client: Any) -> None:
    image = build(client, "agentrl-test-volume:1", "mkdir -p /testbed/data", folder_on_disk="/testbed/data")
    try:
        with pytest.raises(ImageUnfitError, match="declares a volume in its work tree, /testbed/data"):
            foreign.equip(client, image, limits=Limits.of(CONFIG))
    finally:
        remove(client, image)


def test_a_bundle_can_be_unpacked_over_the_images_tree(swe_gym_house: ForeignHouse) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("only.txt")
        tar.addfile(member, io.BytesIO())

    async def body(sandbox: Sandbox) -> str:
        await sandbox.unpack(packed.getvalue())
        return (await sandbox.run("ls -A", timeout_s=30)).output

    assert swe_gym_house.lease(body) == "only.txt\n"
    assert "tests\n" in swe_gym_house.output("ls")


# --- equipping ----------------------------------------------------------------------------------------------


def test_a_tree_that_is_too_large_names_the_setting(client: Any, like_swe_gym: str) -> None:
    narrow = replace(Limits.of(CONFIG), disk_bytes=8192)
    with pytest.raises(ImageUnfitError, match=r"has 1 MB, a sandbox has room for 0 MB") as caught:
        foreign.equip(client, like_swe_gym, limits=narrow)
    assert "sandbox.disk-mb" in caught.value.remedy


def test_k43_a_half_filled_volume_is_filled_again_by_one_of_many(client: Any) -> None:
    image = build(client, WITHOUT_HISTORY, _MAKE_WITHOUT_HISTORY)
    limits = Limits.of(CONFIG)
    volume = foreign.seed_volume(client.api.inspect_image(image)["Id"])
    client.api.create_volume(volume, labels={foreign.LABEL_VOLUME: "seed"})
    half = "mkdir /mnt/tree; touch /mnt/tree/half /mnt/complete.json.new"
    bind = {volume: {"bind": "/mnt", "mode": "rw"}}
    base = ensure_docker_image(client, BASE_IMAGE)
    client.containers.run(base, ["sh", "-c", half], user="0:0", volumes=bind, network_mode="none", remove=True)
    with ThreadPoolExecutor(3) as threads:
        made = [
            each.result() for each in [threads.submit(foreign.equip, client, image, limits=limits) for _ in range(3)]
        ]
    assert made[0] == made[1] == made[2]
    assert made[0].volumes[volume] == "/opt/agentrl-seed"
    assert not client.containers.list(all=True, filters={"name": volume})
    house = ForeignHouse(image)
    try:
        assert house.output(
            "git log --all --format='%s %D'; ls; python3 a.py; git status --porcelain"
        ).splitlines() == [
            "base HEAD -> main",
            "a.py",
            "hello",
        ]
    finally:
        house.close()


def test_an_image_without_bash_is_refused(client: Any) -> None:
    """It has no C library either: the interpreter that says so is our own."""
    root = io.BytesIO()
    with tarfile.open(fileobj=root, mode="w") as tar:
        member = tarfile.TarInfo("etc/motd")
        tar.addfile(member, io.BytesIO())
    repository, _, tag = EMPTY.partition(":")
    client.api.import_image_from_data(root.getvalue(), repository=repository, tag=tag)
    with pytest.raises(ImageUnfitError, match="it has no /bin/bash"):
        foreign.equip(client, EMPTY, limits=Limits.of(CONFIG))


def test_volumes_of_images_that_are_gone_are_stale(client: Any, like_swe_gym: str) -> None:
    equipment = foreign.equip(client, like_swe_gym, limits=Limits.of(CONFIG))
    gone = client.api.create_volume(
        "agentrl-seed-of-a-test", labels={foreign.LABEL_VOLUME: "seed", foreign.LABEL_VOLUME_IMAGE: "sha256:0"}
    )["Name"]
    try:
        stale = foreign.stale_volumes(client)
        assert gone in stale
        assert not set(equipment.volumes) & set(stale)
    finally:
        client.api.remove_volume(gone)
