"""The kinds of `Event` a run emits, and what `data` holds for each.

| kind | data |
|---|---|
| `run.started` | `run` name, `steps` total, `resumed` bool, `resumed_from` step, `versions` by package |
| `phase.started` | `phase` (`Phase`), `step`, `total` rollouts or None |
| `rollout.finished` | `step`, `done`, `total`, `task`, `outcome`, `reward` or None |
| `step.finished` | `step`, `metrics` {public name: number}, exactly the step's line of `metrics.jsonl` |
| `eval.finished` | `step`, `split`, `solve`, `n`, `low`, `high` |
| `delivery.finished` | `step`, `version`, `paused_s`, `total_s`, `probe_max_abs` |
| `load` | a sample of what is busy: see below |
| `alarm` | `step`, `name`, `value`, `bound`, `advice` |
| `note` | `text`: one line for whoever watches (a retry, a checkpoint, a restart) |
| `run.finished` | `step`, `outcome` (`done`, `interrupted`, `failed`), `minutes`, `reason` |

`load`: `active` trajectories (in their episode), `waiting` ones (set up or being set up, not active yet), `limit` of
active ones, `running` requests and `kv` used fraction (lists, one entry per policy server), `training` bool (or
delivering), `in_flight` and `queued` groups.

A reader takes every key as optional: an event of an older or newer version is shown with what it has.
"""

from __future__ import annotations

from enum import StrEnum


class EventKind(StrEnum):
    """What happened."""

    RUN_STARTED = "run.started"
    PHASE_STARTED = "phase.started"
    ROLLOUT_FINISHED = "rollout.finished"
    STEP_FINISHED = "step.finished"
    EVAL_FINISHED = "eval.finished"
    DELIVERY_FINISHED = "delivery.finished"
    LOAD = "load"
    ALARM = "alarm"
    NOTE = "note"
    RUN_FINISHED = "run.finished"


class Phase(StrEnum):
    """What a run's loop is busy with."""

    START = "start"
    GENERATE = "generate"
    TRAIN = "train"
    DELIVER = "deliver"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
