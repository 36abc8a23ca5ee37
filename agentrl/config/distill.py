"""Distillation: which teachers score the student's tokens, what they are asked for, and the divergence trained on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from agentrl.config.base import Model
from agentrl.errors import ConfigError

_URLS = ("http://", "https://")
_KIND = re.compile(r"[A-Za-z0-9_.-]+")
SELF = "self"
SERVED_LOGPROBS = 64
"""Most candidates per token that a policy server of ours gives."""


class TeacherConfig(Model):
    """One teacher. `model` is a folder, a hub name, the URL of a running vLLM server, or `self` (the student's own
    weights, told more than the student is)."""

    model: str = Field(min_length=1)
    name: str = Field(
        "teacher",
        pattern=r"^[^\x00-\x1f\x7f]{1,200}$",
        description="several teachers: the value of `distill.route` it serves",
    )
    kind: str = Field(
        "auto",
        description="vllm: a server that is started for it; server: one that runs; transformers: a process of ours; "
        "self; or a kind that is installed; auto: by `model`",
    )

    @model_validator(mode="after")
    def validate_secrets(self) -> TeacherConfig:
        if self.model.startswith(_URLS):
            parts = urlsplit(self.model)
            if parts.username or parts.password:
                raise ValueError(
                    "a teacher's URL holds a name or password, which the run folder would keep; remedy: the "
                    "environment variable AGENTRL_TEACHER_API_KEY"
                )
        return self

    @model_validator(mode="after")
    def validate_self(self) -> TeacherConfig:
        if self.kind == SELF and self.model != SELF:
            raise ValueError(
                f"teacher `self` is the student's own weights, and {self.model!r} has no effect; remedy: "
                f"--teacher self, or --teacher transformers:{self.model}"
            )
        return self

    @property
    def resolved_kind(self) -> str:
        """The entry point of group `agentrl.teachers` that makes this teacher."""
        if self.kind != "auto":
            return self.kind
        if self.model.startswith(_URLS):
            return "server"
        return SELF if self.model == SELF else "vllm"


def parse_teacher(text: str) -> dict[str, str]:
    """`[NAME=][KIND:]T` of the command line as the table of a `TeacherConfig`. Raises `ConfigError`."""
    name, equals, rest = text.partition("=")
    if not equals or text.startswith(_URLS) or Path(text).exists():  # these may hold an equals sign
        name, rest = "", text
    kind, colon, model = rest.partition(":")
    if not colon or rest.startswith(_URLS) or not _KIND.fullmatch(kind):
        kind, model = "", rest
    if not model:
        raise ConfigError(f"{text!r} names no teacher", where="--teacher", remedy="give [NAME=][KIND:]T")
    return {"model": model} | ({"name": name} if name else {}) | ({"kind": kind} if kind else {})


class DivergenceConfig(Model):
    """What is trained where a teacher has scored (`agentrl.train.divergence` has the formulas)."""

    name: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = Field(
        "sampled",
        description="sampled: reverse KL of the sampled token as an advantage; the others are over the candidates",
    )
    clamp: float = Field(5.0, gt=0, description="nats; a token's divergence, or its gap to the teacher, is cut at this")
    discount: float = Field(0.0, ge=0, le=1, description="sampled only: of the divergence of the tokens that follow")
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="jsd only: weight of the teacher in the mixture")

    @model_validator(mode="after")
    def validate_effects(self) -> DivergenceConfig:
        fields = type(self).model_fields
        for key, only in (("discount", "sampled"), ("jsd_beta", "jsd")):
            if self.name != only and getattr(self, key) != fields[key].default:
                raise ValueError(
                    f"train.divergence.{key} has no effect with train.divergence.name={self.name}; remedy: remove it, "
                    f"or train.divergence.name={only}"
                )
        return self


class DistillConfig(Model):
    """On-policy distillation (`agentrl distill`). Without teachers there is none."""

    teachers: tuple[TeacherConfig, ...] = ()
    route: str | None = Field(
        None,
        description="several teachers: `environment`, or the field of a task's data, whose value names the teacher",
    )
    reward_weight: float = Field(
        0.0, ge=0, description="weight of the task reward's policy gradient beside the teacher"
    )
    support: Literal["teacher", "student", "full"] = Field(
        "teacher",
        description="candidates of a divergence: the teacher's or the student's `top_k` most likely tokens, or all",
    )
    top_k: int = Field(16, ge=1, description="candidates per token")
    mask_format: bool = Field(False, description="leave out the tokens of a tool call's format")
    align: Literal["tokens", "bytes"] = Field(
        "tokens", description="bytes: teachers with another tokenizer, scored over spans that begin and end together"
    )
    privileged: Literal["patch", "tests"] = Field(
        "patch", description="what teacher `self` is told: the reference patch, or what the tests printed"
    )
    max_model_len: int | None = Field(
        None,
        ge=64,
        description="window of a teacher that is started here; None: the policy's, and room for a whole segment",
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    concurrency: int = Field(16, ge=1, description="segments being scored at once, per teacher")
    timeout_s: float = Field(120.0, gt=0, description="of one segment's scoring")
    retries: int = Field(2, ge=0, description="of one segment's scoring")
    cache: bool = Field(True, description="keep scores on disk, by the tokens scored (run folder, teacher_cache/)")
    from_run: Path | None = Field(None, description="learn from the trajectories of this run instead of new ones")

    @property
    def active(self) -> bool:
        return bool(self.teachers)

    @property
    def started_here(self) -> tuple[TeacherConfig, ...]:
        """The teachers that take a device of this machine."""
        return tuple(teacher for teacher in self.teachers if teacher.resolved_kind not in ("server", SELF))

    @property
    def asks_policy(self) -> bool:
        """The student's own servers score segments."""
        return self.support == "student" or any(teacher.resolved_kind == SELF for teacher in self.teachers)

    @model_validator(mode="after")
    def validate_effects(self) -> DistillConfig:
        fields = type(self).model_fields
        changed = [key for key in fields if key != "teachers" and getattr(self, key) != fields[key].default]
        if not self.teachers:
            if changed:
                raise ValueError(
                    f"distill.{changed[0]} has no effect without a teacher; remedy: --teacher, or remove it"
                )
            return self
        names = [teacher.name for teacher in self.teachers]
        if len(set(names)) < len(names):
            raise ValueError("two teachers have one name; remedy: --teacher NAME=T")
        if len(names) > 1 and self.route is None:
            raise ValueError(
                "several teachers and no distill.route says which one scores a task; remedy: --route environment, or "
                "a field of the tasks' data whose values are the teachers' names"
            )
        if len(names) == 1 and self.route is not None:
            raise ValueError("distill.route has no effect with one teacher; remedy: remove it")
        kinds = {teacher.resolved_kind for teacher in self.teachers}
        if SELF not in kinds and "privileged" in changed:
            raise ValueError("distill.privileged has no effect without teacher `self`; remedy: remove it")
        if kinds == {SELF} and (idle := {"dtype", "cache"} & set(changed)):
            raise ValueError(f"distill.{min(idle)} has no effect with teacher `self` alone; remedy: remove it")
        if self.from_run is not None and self.privileged == "tests":
            raise ValueError(
                "distill.privileged=tests has no meaning with distill.from_run: what tests printed is not recorded; "
                "remedy: distill.privileged=patch"
            )
        if "max_model_len" in changed and kinds <= {"server", "transformers", SELF}:
            raise ValueError("distill.max_model_len is of a server that is started here; remedy: remove it")
        if SELF in kinds and self.align == "bytes":
            raise ValueError("distill.align=bytes has no meaning with teacher `self`; remedy: remove it")
        if self.support in ("student", "full") and kinds & {"vllm", "server", SELF}:
            raise ValueError(
                f"distill.support={self.support} needs teachers that can score any token, and a server gives its own "
                "most likely ones only; remedy: --teacher transformers:MODEL, or distill.support=teacher"
            )
        if self.top_k > SERVED_LOGPROBS and (self.support == "student" or SELF in kinds):
            raise ValueError(
                f"distill.top_k ({self.top_k}) exceeds the {SERVED_LOGPROBS} most likely tokens that policy servers "
                "give; remedy: lower it"
            )
        if self.support == "full" and "cache" in changed:
            raise ValueError(
                "distill.cache has no effect with distill.support=full: nothing is kept; remedy: remove it"
            )
        if self.support == "full" and "top_k" in changed:
            raise ValueError("distill.top_k has no effect with distill.support=full; remedy: remove it")
        return self


def check_distillation(config: DistillConfig, divergence: DivergenceConfig) -> None:
    """What the two have to do with each other. Raises ValueError with the remedy."""
    fields = DistillConfig.model_fields
    if not config.teachers and divergence != DivergenceConfig():
        raise ValueError("train.divergence has no effect without a teacher; remedy: `agentrl distill`, or remove it")
    if divergence.name == "sampled":
        for key in ("support", "top_k"):
            if getattr(config, key) != fields[key].default:
                raise ValueError(
                    f"distill.{key} has no effect with train.divergence.name=sampled; remedy: remove it, or choose "
                    "another divergence"
                )
    elif config.align == "bytes":
        raise ValueError(
            f"train.divergence.name={divergence.name} compares candidates of one vocabulary, and distill.align=bytes "
            "is for teachers with another; remedy: train.divergence.name=sampled"
        )
