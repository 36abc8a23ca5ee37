"""Rollouts: groups, sampling, schedule, and the devices they are spread over."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.base import Model


class RolloutConfig(Model):
    """Groups, their sampling and their schedule. P = `groups` groups of `group_size` rollouts per delivery."""

    schedule: Literal["sync", "async"] = Field(
        "sync",
        description="sync: generate, then train, on the same devices; async: both at once, on devices of their own",
    )
    max_staleness: int = Field(
        1, ge=0, description="S, async only: a trained token is at most this many deliveries behind; sync is 0"
    )
    window: int | None = Field(
        None, ge=1, description="a batch takes groups among this many oldest ones only; None: among all in flight"
    )
    oversample: float = Field(
        1.0,
        ge=1,
        le=4,
        description="groups submitted per group trained: the first to finish are trained, the others are dropped; "
        "1 waits for slow groups, so that slow tasks keep their share",
    )
    replace_filtered: bool = Field(
        False, description="a group that teaches nothing or failed is replaced by a new one before its delivery"
    )
    groups: int = Field(16, ge=1)
    group_size: int = Field(8, ge=1)
    concurrency: int = Field(64, ge=1, description="most trajectories active (in their episode) at once")
    adaptive: bool = Field(
        True,
        description="fewer than `concurrency` trajectories are active where the servers' KV room is short: raised to "
        "the saturation point, lowered on preemptions",
    )
    ready_ahead: int = Field(
        2, ge=0, description="sandboxes set up ahead of a free slot, beyond `concurrency`; none of them holds KV room"
    )
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    infrastructure_retries: int = Field(2, ge=0, description="fresh tries of one rollout after a machine failed")
    grade_timeout_s: float = Field(300.0, gt=0)
    group_timeout_s: float = Field(3600.0, gt=0)
    stuck_timeout_s: float = Field(
        900.0,
        gt=0,
        description="a rollout that stays in one phase and turn for so long is named, failed and tried again",
    )
    stall_timeout_s: float = Field(
        1800.0, gt=0, description="the run ends with the reason where no rollout at all makes progress for so long"
    )
    zero_variance_warn: int = Field(3, ge=1, description="steps in a row with nothing to learn from before a warning")
    zero_variance_stop: int = Field(20, ge=1, description="… before the run stops with the reason")

    @property
    def staleness_bound(self) -> int:
        """S of the schedule: 0 in `sync`."""
        return self.max_staleness if self.schedule == "async" else 0

    @model_validator(mode="after")
    def validate_effects(self) -> RolloutConfig:
        if self.top_p < 1 or self.top_k > 0:
            raise ValueError(
                "rollout.top_p < 1 and rollout.top_k > 0 cut the sampled distribution, so that the trainer's "
                "log-probabilities are of another one; remedy: train at top_p 1 and top_k 0 (use `eval.top_p`)"
            )
        if self.schedule == "sync" and self.max_staleness != type(self).model_fields["max_staleness"].default:
            raise ValueError(
                "rollout.max_staleness has no effect with rollout.schedule=sync, which is on-policy; remedy: remove "
                "it, or rollout.schedule=async"
            )
        if self.stall_timeout_s < self.stuck_timeout_s:
            raise ValueError(
                f"rollout.stall_timeout_s ({self.stall_timeout_s:g}) is below rollout.stuck_timeout_s "
                f"({self.stuck_timeout_s:g}): the run would end before a stuck rollout is tried again; remedy: raise "
                "the first or lower the second"
            )
        if self.window is not None and self.window < self.groups:
            raise ValueError(
                f"rollout.window ({self.window}) is below rollout.groups ({self.groups}): no batch could ever be "
                "full; remedy: raise the first or lower the second"
            )
        return self


class PlacementConfig(Model):
    """Which devices serve and which train: CPU cores here, CUDA devices with vLLM's CUDA build.

    `sync` puts server i and rank i on the same device (they take turns), `async` gives each a device of its own.
    """

    replicas: int = Field(1, ge=1, description="policy servers")
    ranks: int = Field(1, ge=1, description="trainer processes; each trains a share of every batch")
    pin: bool = Field(
        False, description="CPU: bind each server and each rank to one core; CUDA devices are always bound"
    )
    devices: tuple[int, ...] = Field(
        (), description="cores or CUDA devices to use, in this order; empty: all that this process may use"
    )

    @model_validator(mode="after")
    def validate_devices(self) -> PlacementConfig:
        if len(set(self.devices)) < len(self.devices) or any(device < 0 for device in self.devices):
            raise ValueError("placement.devices names a device twice or below 0; remedy: name each once")
        return self
