"""Teachers by entry point, and whether every task finds one. Light: asked before anything starts."""

from __future__ import annotations

from agentrl.config import RunConfig, TeacherConfig
from agentrl.errors import ConfigError
from agentrl.rollout.scoring import routed
from agentrl.run.environments import entry_point
from agentrl.trajectory import Split
from agentrl.wire import Environment, OpenTeacher

GROUP = "agentrl.teachers"


def find_opener(teacher: TeacherConfig) -> OpenTeacher:
    """What opens a teacher of this kind. Raises `ConfigError` where it is not installed or does not import."""
    kind = teacher.resolved_kind
    point = entry_point(GROUP, kind, what=f"kind of teacher {kind!r}")
    try:
        opener: OpenTeacher = point.load()
    except ImportError as error:
        raise ConfigError(
            f"teacher {teacher.name} ({kind}) does not import: {error}",
            where=point.value,
            remedy="install what it needs",
        ) from error
    return opener


def check_teachers(config: RunConfig, environment: Environment) -> list[str]:
    """Before anything starts: whether every kind is installed and every task of a first step finds its teacher.

    Returns lines about teachers that serve none of those tasks. Raises `UnknownEnvironmentError` for a kind,
    `NoTeacherError` for a task.
    """
    for teacher in config.distill.teachers:
        entry_point(GROUP, teacher.resolved_kind, what=f"kind of teacher {teacher.resolved_kind!r}")
    route = config.distill.route
    if route is None or config.distill.from_run is not None:  # recorded tasks: `recorded.check_tasks`
        return []
    names = [teacher.name for teacher in config.distill.teachers]
    tasks = environment.tasks(Split.TRAIN, start=0, count=config.rollout.groups, seed=config.seed)
    found = {routed(task, route, names) for task in tasks}
    return [f"teacher {name} serves none of the first {len(tasks)} tasks" for name in names if name not in found]
