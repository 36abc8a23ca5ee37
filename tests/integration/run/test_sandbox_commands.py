"""`agentrl sandbox …` as people use it, on bubblewrap: real processes, real sandboxes, a recorded run."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.agent import run_episode
from agentrl.chat import ChatFormat, render_call
from agentrl.config import RunConfig
from agentrl.config.load import dump_toml, load_config
from agentrl.policy import local_model
from agentrl.run.environments import load_environment
from agentrl.run.folder import open_run_folder
from agentrl.run.recorder import keep_tokenizer
from agentrl.sandbox import open_pool
from agentrl.sandbox.backend import bubblewrap_fault
from agentrl.trajectory import FinishReason, Outcome, OutcomeKind, Split, Trajectory, write_rows
from agentrl.wire import Generation, SamplingParams, ToolCall

pytestmark = [pytest.mark.bubblewrap]

ROOT = Path(__file__).parents[3]
MINED = ROOT / "tests/data/mined/instances.jsonl"
INSTANCE = "mahmoud__boltons-ec1ff9f672"
GENERATED = "generated-fresh-0"
COMMAND = [sys.executable, "-m", "agentrl.cli.main", "sandbox"]


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    if fault := bubblewrap_fault():
        pytest.skip(str(fault))


def sandbox(*words: str, cwd: Path, stdin: bytes = b"", timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """`agentrl sandbox` on bubblewrap; text that is no UTF-8 is kept."""
    name, *rest = words
    options = [] if name in ("ps", "stats", "reap") else ["--backend", "bubblewrap"]
    done = subprocess.run(
        [*COMMAND, name, *options, *rest], input=stdin, capture_output=True, timeout=timeout_s, cwd=cwd, check=False
    )
    out, err = (data.decode("utf-8", "surrogateescape") for data in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


# --- run ----------------------------------------------------------------------------------------------------------


def test_run_gives_output_and_exit_code(tmp_path: Path) -> None:
    done = sandbox("run", GENERATED, "--", "ls; echo oops >&2; exit 7", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert {"pytest.ini", "oops"} <= set(done.stdout.split())
    words = sandbox("run", INSTANCE, "--data", str(MINED), "--", "printf", "%s|", "a b", "$HOME", cwd=tmp_path)
    assert (words.returncode, words.stdout) == (0, "a b|$HOME|")


def test_run_stops_at_its_time_limit(tmp_path: Path) -> None:
    done = sandbox("run", GENERATED, "--timeout-s", "1", "--", "echo begun; sleep 60", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (124, "begun\n")
    assert "stopped after 1 s" in done.stderr


def test_ctrl_c_ends_the_command_and_shows_its_output(tmp_path: Path) -> None:
    words = [*COMMAND, "run", "--backend", "bubblewrap", GENERATED, "--", "echo begun; touch /tmp/x; sleep 60"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    end = time.monotonic() + 60
    while not sleeping(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "begun\n")
    assert "interrupted" in err


def sleeping(pid: int) -> bool:
    """Whether a process below `pid` is the command's `sleep 60`."""
    below = [pid]
    while below:
        for task in Path(f"/proc/{below.pop()}/task").glob("*/children"):
            try:
                children = [int(word) for word in task.read_text().split()]
                found = any(Path(f"/proc/{child}/cmdline").read_bytes() == b"sleep\x0060\0" for child in children)
            except OSError:
                continue
            if found:
                return True
            below += children
    return False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "generated-fresh-zero", "--", "ls"], "generated-fresh-zero"),
        (["run", GENERATED], "no command is given"),
        (["run", GENERATED, "--rollout.groups", "3", "--", "ls"], "rollout.groups"),
        (["grade", GENERATED], "--patch FILE or --reference"),
        (["grade", GENERATED, "--patch", "/nowhere.patch"], "/nowhere.patch"),
        (["grade", "nobody__nothing-1", "--reference", "--data", str(MINED)], "nobody__nothing-1"),
        (["verify", "swe-gym"], "--tasks N"),
        (["replay", "/nowhere/train-1"], "no run folder"),
    ],
)
def test_what_cannot_be_meant_is_exit_2(words: list[str], says: str, tmp_path: Path) -> None:
    done = sandbox(*words, cwd=tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_no_backend_is_an_infrastructure_failure(tmp_path: Path) -> None:
    """Exit code 1 would say `not resolved`."""
    words = [*COMMAND, "grade", GENERATED, "--reference", "--backend", "docker"]
    environment = os.environ | {"DOCKER_HOST": "unix:///nowhere.sock"}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "Docker" in done.stderr


# --- grade --------------------------------------------------------------------------------------------------------


def test_grade_a_reference_and_an_empty_patch(tmp_path: Path) -> None:
    good = sandbox("grade", INSTANCE, "--data", str(MINED), "--reference", cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith(f"{INSTANCE}: resolved (reward 1)")
    (log,) = (tmp_path / "runs/sandbox").glob("grade-*.log")
    assert f"log: {log.relative_to(tmp_path)}" in good.stdout
    assert "resolved: True" in log.read_text()

    (tmp_path / "empty.patch").write_bytes(b"")
    kept = tmp_path / "kept.log"
    words = ["--data", str(MINED), "--patch", "empty.patch", "--log", str(kept)]
    bad = sandbox("grade", INSTANCE, *words, cwd=tmp_path)
    assert bad.returncode == 1, bad.stderr
    assert "not resolved (reward 0)" in bad.stdout
    row = next(row for line in MINED.read_text().splitlines() if (row := json.loads(line))["instance_id"] == INSTANCE)
    failing = row["FAIL_TO_PASS"] if isinstance(row["FAIL_TO_PASS"], list) else json.loads(row["FAIL_TO_PASS"])
    assert failing[0] in bad.stdout
    assert "AssertionError" in kept.read_text() or "Error" in kept.read_text()


def test_grade_a_patch_from_stdin(tmp_path: Path) -> None:
    row = next(row for line in MINED.read_text().splitlines() if (row := json.loads(line))["instance_id"] == INSTANCE)
    words = ["grade", INSTANCE, "--data", str(MINED), "--patch", "-"]
    done = sandbox(*words, stdin=row["patch"].encode(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


# --- shell --------------------------------------------------------------------------------------------------------

SESSION = rb"""
mkdir -p sub && cd sub && export FOO='a
b'
echo "$PWD|$FOO"; (exit 3)
unset HOME
echo "${HOME-none}"; cd ..; rmdir sub
for n in 1 2
do echo n$n
done
cd /nowhere; exit 9
echo still here in $PWD
:view pytest.ini 1 1
:task
:nope
:reference
:diff
:grade
"""


def test_a_shell_from_stdin(tmp_path: Path) -> None:
    """Folder and exported variables stay, `exit` in a line is the line's, the tools are the agent's."""
    done = sandbox("shell", GENERATED, stdin=SESSION, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("/testbed/sub|a\nb\n", "\nnone\n", "\nn1\nn2\n"):
        assert part in done.stdout
    assert "cat -n" in done.stdout
    assert "--- user\n" in done.stdout
    assert "\n+    return bonus * high\n" in done.stdout
    assert "resolved (reward 1)" in done.stdout
    assert f"task {GENERATED}" in done.stderr
    assert "no command :nope" in done.stderr
    assert "hidden" not in done.stderr


def test_exit_leaves_a_shell_and_a_dead_sandbox_does_not(tmp_path: Path) -> None:
    lines = b"touch here\n:timeout 1\nsleep 30\nls here\n:reset\nls here\nexit 4\necho never\n"
    done = sandbox("shell", GENERATED, stdin=lines, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "stopped after 1 s" in done.stderr
    assert done.stdout.count("\nhere\n") == 1
    assert "No such file" in done.stdout
    assert "never" not in done.stdout


def test_ctrl_c_at_the_terminal_ends_a_line_and_not_the_shell(tmp_path: Path) -> None:
    words = [*COMMAND, "shell", "--backend", "bubblewrap", GENERATED]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(words[0], words, os.environ | {"TERM": "dumb", "XDG_STATE_HOME": str(tmp_path)})
    seen = typed(terminal, b"", 60)
    seen += typed(terminal, b"printf 'be%s' gun; sleep 60\n", 2, wait=False)
    seen += typed(terminal, b"\x03", 30)
    seen += typed(terminal, b"printf '\\033]0;t\\007al%s\\n' ive\n", 30)
    seen += typed(terminal, b"exit 5\n", 10, wait=False)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert "sleep 60" in (tmp_path / "agentrl/shell_history").read_text()
    assert b"begun" in seen
    assert b"interrupted" in seen
    assert rb"\x1b]0;t\x07alive" in seen, "what the sandbox says does not reach the terminal as it is"


def typed(terminal: int, text: bytes, timeout_s: float, *, wait: bool = True) -> bytes:
    """Type `text`; what the terminal then shows until the prompt comes back, or for `timeout_s`."""
    os.write(terminal, text)
    shown, end = b"", time.monotonic() + timeout_s
    while (left_s := end - time.monotonic()) > 0 and not (wait and shown.endswith(b"$ ")):
        if select.select([terminal], [], [], left_s)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the shell is gone
                break
    return shown


# --- replay -------------------------------------------------------------------------------------------------------


class Scripted:
    """A `PolicyClient` that says one text after another."""

    max_model_len = 4096

    def __init__(self, chat: ChatFormat, texts: list[str]) -> None:
        self._chat, self._texts = chat, texts

    async def generate(
        self, prompt_ids: Any, params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        ids = self._chat.tokenizer.encode(self._texts.pop(0) + "<|im_end|>")
        return Generation(
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish_reason=FinishReason.STOP,
            prompt_tokens=len(prompt_ids),
        )


def call(name: str, **arguments: str) -> str:
    return render_call(ToolCall(name=name, arguments=arguments), "qwen3_coder")


FIX = ("str_replace", {"path": "ber.py", "old_str": "high * high", "new_str": "bonus * high"})
EPISODES = {
    "train-000000-0": [
        call("view", path="ber.py"),
        "no call at all",
        call("bash", command="pytest -q 2>&1 | tail -1"),
        call(FIX[0], **FIX[1]),
        call("submit"),
    ],
    "train-000000-1": [
        call("bash", command="cat /proc/uptime"),
        call("bash", command="uuidgen || cat /proc/sys/kernel/random/uuid"),
        call("submit"),
    ],
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two scripted episodes, recorded as a run records."""
    path = tmp_path_factory.mktemp("runs") / "mine"
    config = load_config(
        preset="demo", overrides=[f"--run-dir={path}", "--agent.max-tokens=2000", "--policy.max-model-len=2000"]
    )
    folder = open_run_folder(path, resume=False)
    folder.write_config(dump_toml(config))
    keep_tokenizer(local_model("tiny"), folder)
    items = asyncio.run(episodes(config))
    write_rows(folder.trajectories / "step_000001-train.parquet", [(each, None) for each in items], run="mine")
    folder.close()
    return path


async def episodes(config: RunConfig) -> list[Trajectory]:
    environment = load_environment(config.environment)
    task = environment.tasks(Split.FRESH, start=0, count=1, seed=0)[0]
    chat = ChatFormat.load(local_model("tiny"))
    found = []
    async with open_pool(config.sandbox.model_copy(update={"size": 1, "starters": 1}), run_id="record") as pool:
        for name, texts in EPISODES.items():
            async with pool.lease("agentrl/base", timeout_s=60) as box:
                await environment.prepare(task, box)
                result = await run_episode(
                    task=task,
                    environment=environment,
                    sandbox=box,
                    policy=Scripted(chat, list(texts)),
                    chat=chat,
                    config=config.agent,
                    sampling=SamplingParams(max_tokens=90),
                    request_id=name,
                )
                assert result.submitted
                patch = await environment.collect(task, box)
            found.append(
                Trajectory(
                    trajectory_id=name,
                    group_id=name[:-2],
                    task_id=task.id,
                    environment=environment.name,
                    split=Split.TRAIN,
                    segments=result.segments,
                    outcome=Outcome(OutcomeKind.SOLVED),
                    reward=1.0,
                    turns=result.turns,
                    info=dict(result.info),
                    patch=patch,
                )
            )
    return found


def test_replay_of_what_repeats(run_folder: Path, tmp_path: Path) -> None:
    done = sandbox("replay", f"{run_folder}/train-000000-0", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert [line.split()[2] for line in lines if line.startswith("turn")] == ["same", "same", "same", "same", "not"]
    assert "change   same" in lines
    assert lines[-1].endswith("4 same, 1 not recorded; the change is the same")
    assert done.returncode == 0, done.stdout + done.stderr


def test_replay_of_what_differs(run_folder: Path, tmp_path: Path) -> None:
    done = sandbox("replay", f"{run_folder}/train-000000-1", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    turns = [line for line in done.stdout.splitlines() if line.startswith("turn")]
    assert "numbers differ" in turns[0]
    assert "differs  " in turns[1]
    assert "      --- recorded" in done.stdout


def test_replay_to_a_turn_and_a_shell_there(run_folder: Path, tmp_path: Path) -> None:
    words = ["replay", f"{run_folder}/train-000000-0", "--to", "2", "--shell"]
    done = sandbox(*words, stdin=b"grep return ber.py\n:diff\n", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "high * high" in done.stdout
    assert "(no change)" in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("turn")]) == 3
    ambiguous = sandbox("replay", f"{run_folder}/train", cwd=tmp_path)
    assert ambiguous.returncode == 2
    assert "train-000000-0, train-000000-1" in ambiguous.stderr
    late = sandbox("replay", f"{run_folder}/train-000000-1", "--to", "9", cwd=tmp_path)
    assert late.returncode == 2
    assert "0 to 2" in late.stderr


# --- verify -------------------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    identity = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", *words], cwd=folder, check=True, capture_output=True, text=True, timeout=60, env=os.environ | identity
    )
    return done.stdout.strip()


RANDOM = "import random\n" + "\n".join(
    f"def test_{n}():\n    assert random.SystemRandom().random() < 0.5\n" for n in range(24)
)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """One good task and one of each kind of bad ones, over one small repository."""
    repository = tmp_path / "repository"
    (repository / "tests").mkdir(parents=True)
    (repository / "calc.py").write_text("def double(x):\n    return x + 2\n\n\ndef half(x):\n    return x / 2\n")
    tests = "from calc import double, half\n\ndef test_double():\n    assert double(5) == 10\n\n"
    tests += "def test_half():\n    assert half(4) == 2\n"
    (repository / "tests/test_calc.py").write_text(tests)
    (repository / "tests/test_luck.py").write_text(RANDOM)
    git(repository, "init", "-q", "-b", "main")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "base")
    git(repository, "bundle", "create", "-q", str(tmp_path / "me__calc.bundle"), "main")
    tree = {"bundle": "me__calc.bundle", "ref": "main", "tree_sha": git(repository, "rev-parse", "main^{tree}")}

    def change(old: str, new: str) -> str:
        source = repository / "calc.py"
        source.write_text(source.read_text().replace(old, new))
        patch = git(repository, "diff") + "\n"
        git(repository, "checkout", "-q", "calc.py")
        return patch

    fix = change("x + 2", "x * 2")
    broken, passing = "tests/test_calc.py::test_double", "tests/test_calc.py::test_half"
    base = {"repo": "me/calc", "base_commit": git(repository, "rev-parse", "main"), "problem_statement": "double adds"}
    base |= {"FAIL_TO_PASS": [broken], "PASS_TO_PASS": [passing], "patch": fix, "x_tree": tree}
    rows = [
        base | {"instance_id": "me__calc-good"},
        base | {"instance_id": "me__calc-unchanged", "FAIL_TO_PASS": [passing], "PASS_TO_PASS": []},
        base | {"instance_id": "me__calc-nofix", "patch": change("x / 2", "x / 2.0")},
        base | {"instance_id": "me__calc-luck", "PASS_TO_PASS": [f"tests/test_luck.py::test_{n}" for n in range(24)]},
        base | {"instance_id": "me__calc-hangs", "patch": change("def half", "while True:\n    pass\n\n\ndef half")},
        base | {"instance_id": "me__calc-treeless", "x_tree": tree | {"bundle": "gone.bundle"}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_planted_bad_tasks_are_found(planted: Path) -> None:
    """K46."""
    words = ["verify", "swe-gym", "--data", "rows.jsonl", "--out", "out.jsonl", "--jobs", "2"]
    limits = ["--environment.test-timeout-s", "4", "--environment.fresh-fraction", "0"]
    done = sandbox(*words, *limits, cwd=planted)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [json.loads(line) for line in (planted / "out.jsonl").read_text().splitlines()]
    assert {line["task"].removeprefix("me__calc-"): line["verdict"] for line in lines} == {
        "good": "valid",
        "unchanged": "passes unchanged",
        "nofix": "reference fails",
        "luck": "flaky",
        "hangs": "timeout",
        "treeless": "error",
    }
    reasons = {line["task"].removeprefix("me__calc-"): line for line in lines}
    assert "gone.bundle" in reasons["treeless"]["reason"]
    assert "test_double" in reasons["nofix"]["reason"]
    assert all("test_luck" in name for name in reasons["luck"]["differ"])
    assert "6 of 6 tasks" in done.stdout
    assert "flaky: me__calc-luck" in done.stdout

    used = sandbox(*words, *limits, cwd=planted)
    assert used.returncode == 2
    assert "--resume" in used.stderr
    data = (planted / "out.jsonl").read_bytes()
    (planted / "out.jsonl").write_bytes(data[:-20])
    again = sandbox(*words, *limits, "--resume", cwd=planted)
    assert again.returncode == 1, again.stderr
    names = [json.loads(line)["task"] for line in (planted / "out.jsonl").read_text().splitlines()]
    assert sorted(names) == sorted(line["task"] for line in lines)
    assert "5 of 6 tasks have their verdict" in again.stderr


def test_a_verification_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    words = [*COMMAND, "verify", "swe-gym", "--backend", "bubblewrap", "--jobs", "1", "--out", "out.jsonl"]
    process = subprocess.Popen(
        [*words, "--tasks", "500"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stderr is not None
    assert "valid" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "--resume --out out.jsonl" in err
    done = len((tmp_path / "out.jsonl").read_text().splitlines())
    assert f"{done} of 500 tasks" in out
    again = subprocess.run(
        [*words, "--tasks", str(done + 1), "--resume"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == done + 1


# --- the machine --------------------------------------------------------------------------------------------------


def test_ps_and_stats_answer(tmp_path: Path) -> None:
    for name in ("ps", "stats", "reap"):
        done = sandbox(name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
