"""Teachers that are vLLM servers: one that is started here and stays frozen, and one that runs already."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.config import PolicyConfig
from agentrl.config.distill import SERVED_LOGPROBS
from agentrl.errors import ConfigError, PolicyStartError, TeacherStartError, TeacherUnfitError
from agentrl.policy import VllmClient, VllmServer, local_model
from agentrl.wire import Teacher, TeacherSpec
from agentrl_teachers.folder_text import FolderText, folder_identity, positions_of
from agentrl_teachers.making import teacher_over
from agentrl_teachers.openai_source import API_KEY, OpenAISource
from agentrl_teachers.vllm_source import VllmSource

_ASK_TIMEOUT_S = 30.0


@asynccontextmanager
async def open_vllm(spec: TeacherSpec) -> AsyncIterator[Teacher]:
    """Kind `vllm`: a server for the model folder or hub name, with the weights it has and no others."""
    folder = await asyncio.to_thread(_folder, spec)
    text = await asyncio.to_thread(FolderText, folder)
    config = PolicyConfig(
        model=str(folder),
        dtype="float32" if spec.dtype == "float32" else "bfloat16",
        max_model_len=_window(folder, spec),
        max_num_seqs=spec.concurrency,
        start_timeout_s=spec.start_timeout_s,
    )
    # Scoring never reads cached keys: a prompt's own log-probabilities need every position computed.
    arguments = ["--no-enable-prefix-caching", "--max-logprobs", str(max(SERVED_LOGPROBS, spec.top_k or 0))]
    try:
        server = await VllmServer.start(config, log_path=spec.log_path, extra_arguments=arguments, device=spec.device)
    except PolicyStartError as error:
        raise TeacherStartError(
            f"teacher {spec.name} did not start",
            where=error.where,
            remedy="read its log; `agentrl doctor` checks this machine; distill.max_model_len lowers what it needs",
        ) from error
    async with (
        server,
        VllmClient(
            server.url, max_model_len=config.max_model_len, server=server, called=f"teacher {spec.name}"
        ) as client,
    ):
        source = VllmSource(client, text, name=spec.name, log=spec.log_path)
        yield teacher_over(source, spec, identity=folder_identity(folder, "vllm", spec.dtype))


@asynccontextmanager
async def open_server(spec: TeacherSpec) -> AsyncIterator[Teacher]:
    """Kind `server`: the vLLM server at the URL `spec.model`, whoever started it."""
    own = f"{API_KEY}_{re.sub('[^A-Za-z0-9]', '_', spec.name).upper()}"  # of several teachers, each its own
    key = os.environ.get(own) or os.environ.get(API_KEY)
    source = await OpenAISource.open(spec.model, name=spec.name, api_key=key, timeout_s=_ASK_TIMEOUT_S)
    try:
        yield teacher_over(source, spec, identity=source.identity)
    finally:
        await source.aclose()


def _folder(spec: TeacherSpec) -> Path:
    """The model as a folder; a hub name is downloaded."""
    try:
        return local_model(spec.model)
    except ConfigError as error:
        raise ConfigError(
            f"teacher {spec.name}: {error.what}", where=f"distill.teachers, {spec.model}", remedy=error.remedy
        ) from error


def _window(folder: Path, spec: TeacherSpec) -> int:
    """The server's window: as configured, or what the model has where a segment still fits."""
    positions = positions_of(folder) or spec.max_model_len
    if positions < spec.longest + 1:
        raise TeacherUnfitError(
            f"teacher {spec.name} has {positions} positions, and a segment has up to {spec.longest} tokens",
            where=f"distill.teachers, {spec.model}",
            remedy=f"agent.max_tokens={positions - 1}, or a teacher with a longer window",
        )
    return min(positions, spec.max_model_len)
