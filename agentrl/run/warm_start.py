"""`agentrl sft`: a policy from nothing, taught by a scripted expert whose every observation is a real sandbox's.

    demonstrations of stage 1 ─▶ tokenizer ─▶ model with the hand-built circuit ─▶ stage 1 ─▶ stage 2 … ─▶ folder
                  `start`'s tokenizer, and its weights ──────────────────────────┘

Demonstrations are played before there is a tokenizer, so they are recorded with a byte-level one and tokenised once
the tokenizer exists; span by span, which gives the ids that an episode of the finished policy would hold.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.agent import run_demonstration
from agentrl.chat import ChatFormat
from agentrl.chat.tiny_tokenizer import save_tiny_tokenizer, train_tiny_tokenizer
from agentrl.config import AgentConfig, WarmStartConfig, WarmStartStage
from agentrl.config.load import dump_toml
from agentrl.errors import ConfigError, RunFailedError, SandboxError, SetupFailedError
from agentrl.policy import local_model
from agentrl.run.recorder import copy_tokenizer, installed_versions
from agentrl.sandbox import open_pool
from agentrl.trajectory import Segment, Source, Span, Split
from agentrl.wire import Environment, Expert, SandboxPool, Task

_BYTE_WINDOW = 100_000
_TRIES = 3
_PREPARE_S = 120.0
_SAY_EVERY_S = 20.0
# Training tasks of the warm start are those of seeds that no run trains on by default.
_SEED_BASE = 1000


async def warm_start(config: WarmStartConfig, environment: Environment, out: Path) -> None:
    """Build the policy into `out` (Hugging Face format). Raises ConfigError where the environment has no expert, or
    `start` is no model."""
    start = _start_folder(config)
    expert: Expert | None = getattr(environment, "expert", None)
    if expert is None:
        raise ConfigError(
            "this environment's tasks have no scripted expert",
            where=f"environment.{config.environment.name}",
            remedy="use the generated tasks (--environment.dataset generated)",
        )
    for stage in config.stages:
        if stage.demonstrations.profile not in expert.profiles:
            raise ConfigError(
                f"the expert has no profile {stage.demonstrations.profile!r}",
                where="stages.demonstrations.profile",
                remedy=f"one of: {', '.join(expert.profiles)}",
            )
    began = time.monotonic()
    recorded = await _record_all(config, environment, expert)
    print(f"sft: {sum(map(len, recorded))} demonstrations in {time.monotonic() - began:.0f} s", flush=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    stop = threading.Event()
    try:
        await asyncio.to_thread(_build, config, start, recorded, partial, stop)
        partial.replace(out)
    finally:
        stop.set()  # a thread cannot be cancelled: it looks at this after every optimizer step
        shutil.rmtree(partial, ignore_errors=True)


def _start_folder(config: WarmStartConfig) -> Path | None:
    """The folder of the model to go on from."""
    if config.start is None:
        return None
    try:
        return local_model(config.start)
    except ConfigError as error:
        raise ConfigError(error.what, where="start", remedy=error.remedy) from error


async def _record_all(
    config: WarmStartConfig, environment: Environment, expert: Expert
) -> list[list[list[tuple[Span, str]]]]:
    """Per stage, per demonstration: spans and their text."""
    with tempfile.TemporaryDirectory() as scratch:
        save_tiny_tokenizer(train_tiny_tokenizer([], vocab_size=_smallest_vocabulary()), scratch)
        chat = ChatFormat.load(scratch, call_format=config.agent.tools.call_format)
    agent = config.agent.model_copy(update={"max_tokens": _BYTE_WINDOW})
    async with open_pool(config.sandbox, run_id="sft") as pool:
        return [
            await _record_stage(number, stage, config, agent, environment, expert, chat, pool)
            for number, stage in enumerate(config.stages)
        ]


def _smallest_vocabulary() -> int:
    from agentrl.chat.tiny_tokenizer import SPECIAL_TOKENS

    return len(SPECIAL_TOKENS) + 256


async def _record_stage(
    number: int,
    stage: WarmStartStage,
    config: WarmStartConfig,
    agent: AgentConfig,
    environment: Environment,
    expert: Expert,
    chat: ChatFormat,
    pool: SandboxPool,
) -> list[list[tuple[Span, str]]]:
    """The stage's demonstrations in the order of its tasks, however they finished."""
    wanted = stage.demonstrations
    seed = _SEED_BASE + config.seed * len(config.stages) + number
    tasks = environment.tasks(Split.TRAIN, start=0, count=wanted.count, seed=seed)
    slots = asyncio.Semaphore(config.concurrency)
    done, said = 0, time.monotonic()

    async def one(index: int, task: Task) -> list[tuple[Span, str]]:
        nonlocal done, said
        async with slots:
            segment = await _play(task, index, seed, wanted.profile, agent, environment, expert, chat, pool)
        done += 1
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            print(f"sft: stage {number + 1}: {done} of {wanted.count} demonstrations", flush=True)
        return [(span, chat.decode(segment.token_ids[span.start : span.stop].tolist())) for span in segment.spans]

    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(one(index, task)) for index, task in enumerate(tasks)]
    return [job.result() for job in jobs]


async def _play(
    task: Task,
    index: int,
    seed: int,
    profile: str,
    agent: AgentConfig,
    environment: Environment,
    expert: Expert,
    chat: ChatFormat,
    pool: SandboxPool,
) -> Segment:
    """One demonstration; a sandbox that fails is replaced, a few times."""
    for last in (*(False,) * (_TRIES - 1), True):
        turns = expert.turns(task, rng=random.Random(f"{seed}-{index}"), profile=profile)
        try:
            async with pool.lease(environment.image(task), timeout_s=120.0, label=f"sft {task.id}") as sandbox:
                async with asyncio.timeout(_PREPARE_S):
                    await environment.prepare(task, sandbox)
                result = await run_demonstration(
                    task=task,
                    environment=environment,
                    sandbox=sandbox,
                    expert_turns=turns,
                    chat=chat,
                    config=agent,
                )
                return result.segments[0]
        except (SandboxError, TimeoutError) as error:
            if last and isinstance(error, TimeoutError):
                raise SetupFailedError(
                    f"the work tree was not ready within {_PREPARE_S:.0f} s",
                    where=f"task {task.id}",
                    remedy="lower --concurrency, or try again on a quieter machine",
                ) from error
            if last:
                raise
    raise AssertionError("unreachable: the last try returns or raises")


class _Stopped(Exception):
    """The work was cancelled while a stage was training."""


def _build(
    config: WarmStartConfig,
    start: Path | None,
    recorded: Sequence[Sequence[Sequence[tuple[Span, str]]]],
    out: Path,
    stop: threading.Event,
) -> None:
    """Tokenizer, model, stages, folder."""
    import torch

    torch.set_num_threads(config.threads)
    out.mkdir(parents=True, exist_ok=True)
    model = _made(config, recorded[0], out) if start is None else _gone_on_from(start, out)
    chat = ChatFormat.load(out, call_format=config.agent.tools.call_format)
    told = [_train_stage(model, n, config, chat, recorded[n], stop) for n in range(len(config.stages))]
    model.save_pretrained(out)
    (out / "warm_start.json").write_text(
        json.dumps(
            {
                "config": dump_toml(config),
                "stages": told,
                "versions": installed_versions(),
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )


def _made(config: WarmStartConfig, recorded: Sequence[Sequence[tuple[Span, str]]], out: Path) -> Any:
    """A tiny model from nothing; its tokenizer, trained on what was recorded, lies in `out`."""
    from agentrl.train.tiny import build_tiny_model

    texts = ("".join(text for _, text in demo) for demo in recorded[: config.tokenizer_demonstrations])
    tokenizer = train_tiny_tokenizer(texts, vocab_size=config.vocab_size)
    save_tiny_tokenizer(tokenizer, out)
    return build_tiny_model(tokenizer.get_vocab_size(), config.seed)


def _gone_on_from(start: Path, out: Path) -> Any:
    """The model in folder `start`, as float32; its tokenizer lies in `out`, file by file the same."""
    import torch
    from transformers import AutoModelForCausalLM

    copy_tokenizer(start, out)
    return AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)


def _train_stage(
    model: Any,
    number: int,
    config: WarmStartConfig,
    chat: ChatFormat,
    demonstrations: Sequence[Sequence[tuple[Span, str]]],
    stop: threading.Event,
) -> dict[str, Any]:
    from agentrl.train.sft import SftStep, segment_batches, train_supervised

    stage, began = config.stages[number], time.process_time()
    segments = [tokenised(demonstration, chat) for demonstration in demonstrations]
    fitting = [segment for segment in segments if len(segment) <= config.agent.max_tokens]
    if not fitting:
        raise RunFailedError(
            "no demonstration fits the window", where="agent.max_tokens", remedy="raise it, or shorten observations"
        )
    lengths = np.array([len(segment) for segment in fitting])
    agent_share = float(sum(int(s.agent_mask.sum()) for s in fitting) / lengths.sum())
    print(
        f"sft: stage {number + 1}: {len(fitting)} of {len(segments)} demonstrations fit, "
        f"{lengths.mean():.0f} tokens each, {agent_share:.0%} the agent's",
        flush=True,
    )

    def say(step: SftStep) -> None:
        if stop.is_set():
            raise _Stopped
        if step.step % 100 == 0 or step.step == stage.steps:
            others = f", {step.observation_loss:.3f} on the others" if stage.observation_weight > 0 else ""
            print(
                f"sft: stage {number + 1}: step {step.step}/{stage.steps}, loss {step.agent_loss:.3f} on the agent's "
                f"tokens{others}, {time.process_time() - began:.0f} CPU-s",
                flush=True,
            )

    batches = segment_batches(fitting, sequences_per_batch=stage.sequences_per_batch, seed=config.seed)
    result = train_supervised(model=model, batches=batches, config=stage, on_step=say)
    return {
        "demonstrations": len(fitting),
        "profile": stage.demonstrations.profile,
        "steps": len(result.steps),
        "tokens": result.tokens,
        "tokens_per_demonstration": float(lengths.mean()),
        "agent_token_share": agent_share,
        "agent_loss": result.steps[-1].agent_loss,
        "cpu_s": round(time.process_time() - began, 1),
    }


def tokenised(demonstration: Sequence[tuple[Span, str]], chat: ChatFormat) -> Segment:
    """A recorded demonstration in the tokens of `chat`. Spans begin and end at control tokens, where no tokenizer
    merges across, so the ids are those of the whole text."""
    ids: list[int] = []
    spans: list[Span] = []
    for span, text in demonstration:
        found = chat.tokenizer.encode(text)
        spans.append(
            Span(kind=span.kind, start=len(ids), stop=len(ids) + len(found), turn=span.turn, purpose=span.purpose)
        )
        ids += found
    length = len(ids)
    return Segment(
        token_ids=np.array(ids, np.int32),
        spans=tuple(spans),
        logprobs=np.full(length, np.nan, np.float32),
        versions=np.full(length, -1, np.int32),
        source=Source.DEMONSTRATION,
    )
