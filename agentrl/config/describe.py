"""Every setting as a page: key, values, default, meaning, read from the models themselves.

    python -m agentrl.config.describe > docs/configuration.md

A test holds the page against the models, so neither can change alone. A field's meaning is its `description`, or
its line in `MEANINGS` where name, unit and section do not say it all.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentrl.config.correction import CorrectionConfig, RejectionRule, preset_names
from agentrl.config.distill import DistillConfig, TeacherConfig
from agentrl.config.load import list_presets
from agentrl.config.models import RunConfig, WarmStartConfig, WarmStartStage

MEANINGS = {
    "run_dir": "the run folder; `--run-dir`",
    "seed": "of tasks and their order (and, for `sft`, of weights and demonstrations)",
    "steps": "batches to train on",
    "environment.name": "the environment; the command's argument",
    "sandbox.backend": "`auto` takes Docker where a daemon answers, else bubblewrap",
    "sandbox.image": "image whose sandboxes are started ahead; a task may name another",
    "sandbox.memory_mb": "memory of one sandbox",
    "sandbox.pids": "processes in one sandbox",
    "sandbox.cpus": "share of the machine's processors one sandbox may use",
    "sandbox.start_timeout_s": "for one sandbox to come up",
    "agent.max_turns": "turns in one episode",
    "agent.episode_timeout_s": "for one episode, from the first turn",
    "agent.tools.call_format": "how calls are written: `qwen3_coder` XML or `hermes` JSON",
    "agent.tools.command_timeout_s": "for one tool call; what is left of the episode where that is less",
    "policy.model": "`tiny`, a folder in Hugging Face format, or a hub name (downloaded once)",
    "policy.dtype": "of the server's weights and sums",
    "policy.max_model_len": "the server's context window",
    "policy.max_num_seqs": "requests that the server computes at once",
    "policy.max_num_batched_tokens": "tokens in one pass of the server",
    "policy.block_size": "tokens in one block of the server's cache",
    "policy.enforce_eager": "no compilation, no CUDA graphs",
    "policy.start_timeout_s": "for the server to come up",
    "policy.delivery_timeout_s": "for each part of a weight delivery",
    "rollout.groups": "groups in a step, each of one task",
    "rollout.group_size": "rollouts of one task",
    "rollout.temperature": "of sampling; the trainer divides by it too",
    "rollout.top_p": "1 is the only value that training accepts",
    "rollout.top_k": "0 (off) is the only value that training accepts",
    "rollout.grade_timeout_s": "for grading one rollout",
    "rollout.group_timeout_s": "for one rollout as a whole, retries included",
    "distill.teachers": "see below; `--teacher`",
    "distill.teachers.model": "a folder, a hub name, the URL of a running vLLM server, or `self`",
    "distill.dtype": "of the teachers that are started here; how exactly a server must repeat itself",
    "train.dtype": "of the passes' matrix products; weights stay float32",
    "train.advantage.name": "see [environments](environments.md#an-advantage-in-ten-lines)",
    "train.loss.name": "the policy-gradient loss",
    "train.loss.clip_low": "the ratio is clipped below 1 − this",
    "train.loss.clip_high": "the ratio is clipped above 1 + this",
    "train.correction.name": "a preset sets its own",
    "train.correction.level": "what an importance weight is taken over",
    "train.correction.action": "what is done to weights outside [lower, upper]",
    "train.correction.lower": "lower bound; none where unset",
    "train.correction.reject": "rules that drop tokens or sequences, see below",
    "train.optimizer.learning_rate": "after the warm-up",
    "train.optimizer.beta1": "AdamW's",
    "train.optimizer.beta2": "AdamW's",
    "train.optimizer.eps": "AdamW's",
    "train.optimizer.weight_decay": "AdamW's",
    "train.optimizer.warmup_updates": "optimizer steps of linear warm-up",
    "train.optimizer.grad_clip": "largest norm of the whole gradient",
    "train.step_timeout_s": "for the trainer to train one batch",
    "eval.fresh_tasks": "tasks of split fresh; 0: none",
    "eval.unseen_tasks": "tasks of split unseen; 0: none",
    "eval.samples_per_task": "episodes per task",
    "eval.temperature": "of sampling in evaluation; 0 is greedy",
    "eval.top_p": "of sampling in evaluation",
    "alarms.submit_rate_min": "least `agent/submit_rate`",
    "alarms.bad_calls_max": "largest `agent/bad_calls`, per episode",
    "alarms.ess_min": "least `correction/ess`",
    "alarms.entropy_min": "least `entropy`, in nats",
    "alarms.kl_abs_max": "largest absolute `correction/kl`, in nats",
    "checkpoint.every_steps": "steps between checkpoints; the last step writes one besides",
    "vocab_size": "of the tokenizer",
    "stages": "in order; see below",
    "stages.steps": "optimizer steps",
    "stages.sequences_per_batch": "demonstrations in one step",
    "stages.optimizer": "`muon`: weight matrices by Muon, the rest by AdamW; `adamw`: all by AdamW",
    "stages.warmup_steps": "steps of linear warm-up",
    "stages.grad_clip": "largest norm of the whole gradient",
    "stages.demonstrations.count": "expert trajectories to play",
    "stages.demonstrations.profile": "the expert's way of working, see [environments](environments.md#the-expert)",
    "train.correction.reject.stat": "of the ratio: itself, or an estimator of the divergence",
    "train.correction.reject.level": "drop tokens, or whole sequences",
    "train.correction.reject.lower": "keep from here",
    "train.correction.reject.upper": "keep up to here",
}

_HEAD = """\
# Every setting

<!-- Written by `python -m agentrl.config.describe`; a test compares it with the code. -->

Order, the later wins: defaults < `--preset` < `--config FILE.toml` < dotted options. A key `a.b_c` is the dotted option
`--a.b-c VALUE` (or `--a.b_c=VALUE`), and in a file key `b_c` of table `[a]`. `--dry-run` prints the result. An unknown
key, a value out of range, a key without effect and an impossible combination are errors that name key and remedy.
"""


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[type[BaseModel], str, FieldInfo]]:
    """(model, dotted key, field) of every setting, in the models' order."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from leaves(section, f"{prefix}{name}.")
        else:
            yield model, prefix + name, field


def describe_values(field: FieldInfo) -> str:
    """The values that a field takes, in a few words."""
    bounds = []
    for rule in field.metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if (bound := getattr(rule, attribute, None)) is not None:
                bounds.append(f"{sign} {bound}")
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation: Any) -> str:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return " / ".join(f"`{choice}`" for choice in arguments)
    if type(None) in arguments:
        return " / ".join(_kind(each) for each in arguments if each is not type(None)) + " / unset"
    if typing.get_origin(annotation) is tuple:
        item = arguments[0]
        tables = isinstance(item, type) and issubclass(item, BaseModel)
        return "list of tables" if tables else f"list of {_kind(item)}"
    return {int: "integer", float: "number", bool: "true / false", str: "text", Path: "path"}[annotation]


def describe_default(default: Any) -> str:
    """A default as TOML would have it."""
    if default is None:
        return "unset"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return f"`{json.dumps(default)}`"
    return f"`{json.dumps(str(default))}`" if isinstance(default, str | Path) else f"`{default}`"


def table(model: type[BaseModel], prefix: str = "", *, only: type[BaseModel] | None = None) -> str:
    """A Markdown table of the settings of `model`; with `only`, of those that this class itself holds."""
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for owner, key, field in leaves(model, prefix):
        if only is not None and owner is not only:
            continue
        default = "needed" if field.is_required() else describe_default(field.get_default(call_default_factory=True))
        meaning = field.description or MEANINGS[key]
        lines.append(f"| `{key}` | {describe_values(field)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _section(title: str, model: type[BaseModel], prefix: str) -> str:
    """A heading, the class's own words, its table, and the sections inside it."""
    said = re.sub(r"\s+", " ", model.__doc__ or "").strip()
    text = f"\n## {title}\n\n{said}\n\n{table(model, prefix, only=model)}"
    return text + _sections(model, prefix)


def _sections(model: type[BaseModel], prefix: str) -> str:
    text = ""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            text += _section(f"`{prefix}{name}`", kind, f"{prefix}{name}.")
            if kind is CorrectionConfig:
                text += _correction_notes(f"{prefix}{name}")
            if kind is DistillConfig:
                text += f"\nEach table of `distill.teachers`:\n\n{table(TeacherConfig, 'distill.teachers.')}"
    return text


def _correction_notes(key: str) -> str:
    names = ", ".join(f"`{name}`" for name in preset_names())
    return (
        f'\nThe whole table may be a preset\'s name: `{key} = "token-mask-2"`; presets: {names}. '
        "A single key set over a preset changes that value alone; the name then reads `custom`. "
        "See [rollout correction](rollout_correction.md).\n\n"
        f"Each table of `{key}.reject`:\n\n{table(RejectionRule, f'{key}.reject.')}"
    )


def page() -> str:
    """docs/configuration.md."""
    presets = {kind: ", ".join(f"`{name}`" for name in list_presets(kind)) for kind in ("train", "sft")}
    parts = [
        _HEAD,
        f"\nPresets of `train`, `distill` and `eval`: {presets['train']}. Of `sft`: {presets['sft']}.\n",
        f"\n# `agentrl train`, `agentrl distill` and `agentrl eval`\n\n{table(RunConfig, only=RunConfig)}",
        _sections(RunConfig, ""),
        "\n# `agentrl sft`\n\n`environment`, `sandbox` and `agent` as above, and:\n\n",
        table(WarmStartConfig, only=WarmStartConfig),
        f"\nEach table of `stages`:\n\n{table(WarmStartStage, 'stages.')}",
    ]
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
