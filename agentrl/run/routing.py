"""Teachers by entry point, and whether every task finds one. Light: asked before anything starts."""

from __future__ import annotations

from agentrl.config import RunConfig, TeacherConfig
from agentrl.errors import ConfigError
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


def check_teachers(config: RunConfig, environment: Environment) -> None:
    """Raise `ConfigError` for a kind that is not installed, or tasks that no teacher serves; before anything starts."""
    for teacher in config.distill.teachers:
        entry_point(GROUP, teacher.resolved_kind, what=f"kind of teacher {teacher.resolved_kind!r}")
    route = config.distill.route
    if route is None or config.distill.from_run is not None:  # recorded tasks: `recorded.check_tasks`
        return
    names = {teacher.name for teacher in config.distill.teachers}
    tasks = environment.tasks(Split.TRAIN, start=0, count=config.rollout.groups, seed=config.seed)
    found = {str(task.environment if route == "environment" else task.data.get(route)) for task in tasks}
    if strangers := sorted(found - names):
        raise ConfigError(
            f"no teacher is named {strangers[0]!r}, which tasks have as {route}",
            where="distill.route",
            remedy=f"name a teacher for each: {', '.join(f'--teacher {name}=T' for name in sorted(found))}",
        )
