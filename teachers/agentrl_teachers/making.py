"""Which of our teachers a source becomes."""

from __future__ import annotations

from agentrl.wire import Teacher, TeacherSpec
from agentrl_teachers.byte_teacher import ByteTeacher
from agentrl_teachers.source import Source
from agentrl_teachers.token_teacher import TokenTeacher


def teacher_over(source: Source, spec: TeacherSpec, *, identity: str) -> Teacher:
    """`identity` changes whenever the source's scores would."""
    kind = ByteTeacher if spec.align_bytes else TokenTeacher
    return kind(source, spec, identity=identity)
