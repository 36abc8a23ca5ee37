"""Every setting of agentrl, with its one default. No torch, no vllm: this module answers at once.

Classes are named after the room that reads them. A field that has no effect in the chosen mode is refused by the
validators here (`validate_effects` in each class), never ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.config.base import Model
from agentrl.config.correction import CorrectionConfig, correction_preset, expand_preset, named
from agentrl.config.distill import DistillConfig, DivergenceConfig, check_distillation
from agentrl.config.rollout import PlacementConfig, RolloutConfig


class EnvironmentConfig(BaseModel):
    """Which environment, and its own options (any further key; the environment's class validates them)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "swe-gym"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class SandboxConfig(Model):
    """Sandboxes: which backend and what each may use."""

    backend: Literal["auto", "docker", "bubblewrap"] = "auto"
    image: str = "agentrl/base"
    size: int = Field(80, ge=1, le=4096, description="most sandboxes alive at once")
    starters: int = Field(4, ge=1, le=64, description="most sandboxes starting at once")
    reuse: int = Field(64, ge=1, description="leases of one sandbox, wiped between; 1 starts one per lease")
    memory_mb: int = Field(1024, ge=64)
    pids: int = Field(256, ge=16)
    disk_mb: int = Field(256, ge=8, description="size of the work tree's and /tmp's file systems")
    cpus: float = Field(1.0, gt=0)
    start_timeout_s: float = Field(60.0, gt=0)
    recipes: Path | None = Field(None, description="folder of further image recipes, beside the shipped ones")
    hosts: tuple[str, ...] = Field(
        (), description="addresses of the Docker daemons to use; empty: DOCKER_HOST, or this machine's"
    )
    host_size: int | None = Field(
        None, ge=1, description="most sandboxes of one of `hosts`; None: `size` in equal shares"
    )
    channel: Literal["auto", "socket", "stdio"] = Field(
        "auto", description="to a container's server; auto: a Unix socket where the daemon shares our files, else stdio"
    )
    pull: Literal["missing", "never"] = Field("missing", description="whether Docker pulls an image that is not there")
    disk_watermark: float = Field(
        0.9,
        gt=0,
        le=1,
        description="used fraction of a daemon's disk above which images that agentrl built or pulled and no container "
        "uses are removed, the longest unused first; 1 never removes",
    )
    daemon_patience_s: float = Field(
        120.0, ge=0, description="how long starts wait for a Docker daemon that does not answer to come back"
    )

    @model_validator(mode="after")
    def validate_docker_settings(self) -> SandboxConfig:
        docker_only = ("hosts", "host_size", "channel", "pull", "disk_watermark", "daemon_patience_s")
        if self.backend == "bubblewrap":
            for name in docker_only:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"sandbox.{name} has no effect with sandbox.backend=bubblewrap; remedy: leave it out, or "
                        "sandbox.backend=docker"
                    )
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError("sandbox.hosts names a daemon twice; remedy: name each once")
        if self.host_size is not None:
            if not self.hosts:
                raise ValueError("sandbox.host_size has no effect without sandbox.hosts; remedy: set sandbox.size")
            if self.host_size * len(self.hosts) < self.size:
                raise ValueError(
                    f"sandbox.size ({self.size}) exceeds what {len(self.hosts)} hosts of sandbox.host_size "
                    f"({self.host_size}) hold; remedy: raise the second or lower the first"
                )
        return self


class ToolsConfig(Model):
    """The agent's tools and how their results read."""

    call_format: Literal["qwen3_coder", "hermes"] = "qwen3_coder"
    chat_template: Literal["model", "chatml"] = Field(
        "model", description="model: the tokenizer's own; chatml: agentrl's, for ChatML models without tools"
    )
    described_by: Literal["prompt", "template"] = Field(
        "prompt", description="prompt: the environment's prompt names the tools; template: JSON schemas by the template"
    )
    calls: Literal["free", "required"] = Field(
        "free",
        description="required: the server's grammar makes each turn one call with one-line values; "
        "for models that were never taught tools, evaluation only",
    )
    observations: Literal["full", "compact"] = Field(
        "full", description="full: the editor's own words with line numbers; compact: file content and short replies"
    )
    command_timeout_s: float = Field(60.0, gt=0)
    output_limit_chars: int = Field(10_000, ge=200, description="an observation keeps this much of head and tail")


class AgentConfig(Model):
    """One episode's limits."""

    max_turns: int = Field(30, ge=1)
    max_turn_tokens: int = Field(512, ge=1, description="most tokens sampled in one turn")
    max_tokens: int = Field(2048, ge=16, description="most tokens in one context window")
    episode_timeout_s: float = Field(1800.0, gt=0)
    tools: ToolsConfig = ToolsConfig()


class PolicyConfig(Model):
    """The policy and its server. `model` is a folder, a hub name, or `tiny` (the shipped policy)."""

    model: str = "tiny"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int = Field(2048, ge=64)
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int = Field(2048, ge=64)
    kv_cache_mb: int | None = Field(None, ge=16, description="KV room on a CPU; None: 256 there, vLLM's own on a GPU")
    block_size: int = Field(32, ge=8)
    enforce_eager: bool = True
    start_timeout_s: float = Field(300.0, gt=0)
    delivery_timeout_s: float = Field(120.0, gt=0)
    kv_on_delivery: Literal["recompute", "keep"] = Field(
        "recompute",
        description="keys and values of requests in flight when weights change: computed again under the new weights, "
        "or kept as they are",
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest probe difference in nats after a delivery; None: 0.001 in float32, 0.3 in bfloat16",
    )

    @property
    def probe_limit(self) -> float:
        """The probe's tolerance in nats. The trainer's probe is in float32, whatever the server computes in."""
        return self.probe_tolerance or {"float32": 1e-3, "bfloat16": 0.3}[self.dtype]


class AdvantageConfig(Model):
    """How a group's rewards become advantages."""

    name: Literal["group_std", "group_mean", "rloo", "reward"] = "group_std"


class LossConfig(Model):
    """The policy-gradient loss."""

    name: Literal["ppo_clip", "cispo", "gspo", "reinforce"] = "ppo_clip"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    mode: Literal["decoupled", "bypass"] = Field(
        "decoupled", description="decoupled: π_old recomputed by the trainer; bypass: π_old := the server's"
    )

    @model_validator(mode="after")
    def validate_effects(self) -> LossConfig:
        fields = type(self).model_fields
        if self.name == "reinforce" and any(getattr(self, k) != fields[k].default for k in ("clip_low", "clip_high")):
            raise ValueError("train.loss.clip_low/high have no effect with loss `reinforce`; remedy: remove them")
        return self


class OptimizerConfig(Model):
    """AdamW with linear warm-up (constant after), and global-norm clipping."""

    learning_rate: float = Field(2e-4, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_updates: int = Field(5, ge=0)
    grad_clip: float = Field(1.0, gt=0)


class TrainConfig(Model):
    """The trainer."""

    updates_per_step: int = Field(1, ge=1, description="optimizer steps per delivery")
    tokens_per_microbatch: int = Field(4096, ge=64, description="padded tokens in one forward pass")
    dtype: Literal["float32", "bfloat16"] = "float32"
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = Field(default_factory=lambda: correction_preset("token-clamp-2"))
    divergence: DivergenceConfig = DivergenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    threads: int = Field(1, ge=1, description="torch threads of the trainer")
    step_timeout_s: float = Field(3600.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def read_correction(cls, data: Any) -> Any:
        """`correction = "token-mask-2"` names a preset; a changed preset is `custom`."""
        if isinstance(data, dict) and isinstance(data.get("correction"), str | dict):
            return {**data, "correction": named(expand_preset(data["correction"]))}
        return data


class SftConfig(Model):
    """Supervised warm start: `muon` (weight matrices by Muon, the rest by AdamW) or `adamw` alone."""

    steps: int = Field(600, ge=1)
    sequences_per_batch: int = Field(8, ge=1)
    tokens_per_microbatch: int = Field(4096, ge=64, description="padded tokens in one forward pass")
    optimizer: Literal["muon", "adamw"] = "muon"
    matrix_learning_rate: float = Field(0.02, gt=0, description="Muon's, for weight matrices")
    learning_rate: float = Field(3e-3, gt=0, description="AdamW's: embeddings and norms beside Muon, all without it")
    warmup_steps: int = Field(40, ge=0)
    decay_fraction: float = Field(0.4, ge=0, le=1, description="last part of the steps, of linear decay to 0")
    grad_clip: float = Field(1.0, gt=0)
    agent_weight: float = Field(1.0, ge=0, description="cross-entropy weight of the agent's tokens")
    observation_weight: float = Field(0.3, ge=0, description="… of prompt and environment tokens")

    @model_validator(mode="after")
    def validate_effects(self) -> SftConfig:
        default = type(self).model_fields["matrix_learning_rate"].default
        if self.optimizer == "adamw" and self.matrix_learning_rate != default:
            raise ValueError("sft.matrix_learning_rate has no effect with optimizer `adamw`; remedy: remove it")
        if self.agent_weight == 0 and self.observation_weight == 0:
            raise ValueError("sft.agent_weight and sft.observation_weight are both 0: nothing is trained")
        return self


class EvalConfig(Model):
    """Evaluation during training and by `agentrl eval`."""

    every_steps: int = Field(8, ge=0, description="0: only at the start and the end")
    fresh_tasks: int = Field(128, ge=0)
    unseen_tasks: int = Field(64, ge=0)
    samples_per_task: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)


class AlarmConfig(Model):
    """Bounds that raise an alarm in the live table, the report and `events.jsonl`."""

    submit_rate_min: float = 0.8
    bad_calls_max: float = 1.5
    ess_min: float = 0.5
    entropy_min: float = 0.02
    kl_abs_max: float = 0.1


class CheckpointConfig(Model):
    """Checkpoints."""

    every_steps: int = Field(4, ge=1)
    keep: int = Field(2, ge=1, description="newest checkpoints kept; the best is kept besides")


class RunConfig(Model):
    """A whole run."""

    run_dir: Path = Path("runs/latest")
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=1)
    environment: EnvironmentConfig = EnvironmentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    agent: AgentConfig = AgentConfig()
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig = RolloutConfig()
    placement: PlacementConfig = PlacementConfig()
    train: TrainConfig = TrainConfig()
    distill: DistillConfig = DistillConfig()
    eval: EvalConfig = EvalConfig()
    alarms: AlarmConfig = AlarmConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def teacher_window(self) -> int:
        """The window of a teacher that is started here."""
        return self.distill.max_model_len or max(self.policy.max_model_len, self.agent.max_tokens + 1)

    @model_validator(mode="after")
    def validate_combinations(self) -> RunConfig:
        if self.agent.max_tokens > self.policy.max_model_len:
            raise ValueError(
                f"agent.max_tokens ({self.agent.max_tokens}) exceeds policy.max_model_len "
                f"({self.policy.max_model_len}); remedy: lower the first or raise the second"
            )
        held = self.rollout.concurrency + self.rollout.ready_ahead
        if held > self.sandbox.size:
            raise ValueError(
                f"rollout.concurrency + rollout.ready_ahead ({held}) exceeds sandbox.size ({self.sandbox.size}): every "
                "rollout holds a sandbox; remedy: lower the first two or raise the last"
            )
        needed_s = self.agent.episode_timeout_s + self.rollout.grade_timeout_s + 2 * self.sandbox.start_timeout_s
        if self.rollout.group_timeout_s < needed_s:
            raise ValueError(
                f"rollout.group_timeout_s ({self.rollout.group_timeout_s:g}) is below what it contains: "
                f"agent.episode_timeout_s + rollout.grade_timeout_s + 2 · sandbox.start_timeout_s = {needed_s:g}; "
                "remedy: raise the first or lower one of the others"
            )
        limits_s = {
            "rollout.grade_timeout_s": self.rollout.grade_timeout_s,
            "agent.tools.command_timeout_s": self.agent.tools.command_timeout_s,
        }
        if self.distill.active and self.distill.from_run is None:
            limits_s["distill.timeout_s"] = self.distill.timeout_s
        for key, limit_s in limits_s.items():
            if limit_s > self.rollout.stuck_timeout_s:
                raise ValueError(
                    f"{key} ({limit_s:g}) exceeds rollout.stuck_timeout_s ({self.rollout.stuck_timeout_s:g}), after "
                    "which a rollout counts as stuck; remedy: lower the first or raise the second"
                )
        if self.train.updates_per_step > self.rollout.groups:
            raise ValueError(
                f"train.updates_per_step ({self.train.updates_per_step}) exceeds rollout.groups "
                f"({self.rollout.groups}): a group is never split; remedy: lower the first or raise the second"
            )
        check_distillation(self.distill, self.train.divergence)
        if self.distill.active:
            self._validate_distillation()
        rewarded = not self.distill.active or self.distill.reward_weight > 0
        if rewarded and self.rollout.group_size == 1 and self.train.advantage.name != "reward":
            raise ValueError(
                "rollout.group_size 1 leaves nothing to compare within a group; remedy: "
                "train.advantage.name=reward or a larger group"
            )
        return self

    def _validate_distillation(self) -> None:
        if self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature ({self.rollout.temperature:g}) is not 1, at which teachers score: the divergence "
                "would be between different things; remedy: rollout.temperature=1"
            )
        if self.agent.max_tokens >= self.teacher_window:
            raise ValueError(
                f"agent.max_tokens ({self.agent.max_tokens}) is not below distill.max_model_len "
                f"({self.teacher_window}), which must hold a whole segment and one token more; remedy: lower the first "
                "or raise the second"
            )
        if self.distill.asks_policy and self.agent.max_tokens >= self.policy.max_model_len:
            what = "teacher `self`" if self.distill.support != "student" else "distill.support=student"
            raise ValueError(
                f"{what} asks the policy servers about whole segments, and agent.max_tokens "
                f"({self.agent.max_tokens}) is not below policy.max_model_len ({self.policy.max_model_len}); remedy: "
                "lower the first or raise the second"
            )
        if self.distill.reward_weight == 0 and self.train.advantage != AdvantageConfig():
            raise ValueError("train.advantage has no effect with distill.reward_weight=0; remedy: remove it")
        if self.distill.reward_weight == 0 and self.train.divergence.name != "sampled":
            plain = LossConfig(mode=self.train.loss.mode)
            if self.train.loss != plain:
                raise ValueError(
                    "train.loss.name and its clips are of a policy gradient, and with distill.reward_weight=0 and "
                    f"train.divergence.name={self.train.divergence.name} there is none; remedy: remove them"
                )


class DemonstrationConfig(Model):
    """Expert trajectories made in real sandboxes: how many, by which profile of the environment's expert."""

    count: int = Field(ge=1)
    profile: str = "careful"


class WarmStartStage(SftConfig):
    """One stage of a warm start: its demonstrations, and how it trains on them."""

    demonstrations: DemonstrationConfig


class WarmStartConfig(Model):
    """`agentrl sft`: a policy trained stage by stage; tokenizer and tiny policy are made from nothing, or `start`'s."""

    seed: int = Field(0, ge=0)
    start: str | None = Field(
        None, min_length=1, description="model whose tokenizer and weights it goes on from; None: from nothing"
    )
    vocab_size: int = Field(1024, ge=300)
    tokenizer_demonstrations: int = Field(2000, ge=1, description="the first stage's, that the tokenizer is trained on")
    concurrency: int = Field(16, ge=1, description="demonstrations played at once")
    threads: int = Field(1, ge=1, description="torch threads of the training")
    environment: EnvironmentConfig = EnvironmentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    agent: AgentConfig = AgentConfig()
    stages: tuple[WarmStartStage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def validate_effects(self) -> WarmStartConfig:
        if self.start is not None:
            fields = type(self).model_fields
            for key in ("vocab_size", "tokenizer_demonstrations"):
                if getattr(self, key) != fields[key].default:
                    raise ValueError(f"{key} has no effect with start: its tokenizer is kept; remedy: remove it")
        return self
