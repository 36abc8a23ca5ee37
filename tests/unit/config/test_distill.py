"""Settings of distillation: how teachers are named, and what has no effect or no meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.config import RunConfig
from agentrl.config.distill import TeacherConfig, parse_teacher
from agentrl.errors import ConfigError

T = {"model": "t", "kind": "transformers"}


@pytest.mark.parametrize(
    ("text", "table", "kind"),
    [
        ("runs/teacher", {"model": "runs/teacher"}, "vllm"),
        ("org/name", {"model": "org/name"}, "vllm"),
        ("self", {"model": "self"}, "self"),
        ("http://host:8000/v1?a=b", {"model": "http://host:8000/v1?a=b"}, "server"),
        ("code=https://host", {"model": "https://host", "name": "code"}, "server"),
        ("transformers:runs/t", {"model": "runs/t", "kind": "transformers"}, "transformers"),
        ("a.b-1=mine:x:y", {"model": "x:y", "name": "a.b-1", "kind": "mine"}, "mine"),
        ("django/django=t", {"model": "t", "name": "django/django"}, "vllm"),
    ],
)
def test_a_teacher_on_the_command_line(text: str, table: dict[str, str], kind: str) -> None:
    assert parse_teacher(text) == table
    assert TeacherConfig(**table).resolved_kind == kind


def test_a_folder_whose_name_holds_an_equals_sign_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert parse_teacher(str(folder)) == {"model": str(folder)}


@pytest.mark.parametrize("url", ["http://me:secret@host/v1", "https://key@host"])
def test_no_secret_gets_into_the_run_folder(url: str) -> None:
    with pytest.raises(ValidationError, match="AGENTRL_TEACHER_API_KEY") as caught:
        RunConfig.model_validate({"distill": {"teachers": [{"model": url}]}})
    assert "remedy:" in str(caught.value)


@pytest.mark.parametrize("text", ["", "name=", "kind:", "name=kind:"])
def test_nothing_is_no_teacher(text: str) -> None:
    with pytest.raises(ConfigError, match="names no teacher"):
        parse_teacher(text)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"distill": {"top_k": 4}}, "distill.top_k has no effect without a teacher"),
        ({"train": {"divergence": {"clamp": 2.0}}}, "train.divergence has no effect without a teacher"),
        ({"distill": {"teachers": [T, T]}}, "two teachers have one name"),
        ({"distill": {"teachers": [T, {**T, "name": "b"}]}}, "no distill.route says"),
        ({"distill": {"teachers": [T], "route": "family"}}, "distill.route has no effect with one teacher"),
        ({"distill": {"teachers": [T], "top_k": 4}}, "distill.top_k has no effect with train.divergence.name=sampled"),
        ({"distill": {"teachers": [T], "privileged": "tests"}}, "has no effect without teacher `self`"),
        ({"distill": {"teachers": [{"model": "self"}], "cache": False}}, "distill.cache has no effect with teacher"),
        ({"distill": {"teachers": [{"model": "http://h"}], "max_model_len": 4096}}, "a server that is started here"),
        ({"distill": {"teachers": [{"model": "self"}], "align": "bytes"}}, "no meaning with teacher `self`"),
        ({"distill": {"teachers": [{"model": "big", "kind": "self"}]}}, "'big' has no effect"),
        ({"distill": {"teachers": [{"model": "self"}]}}, "teacher `self` asks the policy servers about whole segments"),
        (
            {"distill": {"teachers": [T], "timeout_s": 901}},
            "distill.timeout_s \\(901\\) exceeds rollout.stuck_timeout_s",
        ),
        (
            {
                "distill": {"teachers": [{"model": "t"}], "support": "student"},
                "train": {"divergence": {"name": "jsd"}},
            },
            "transformers:MODEL",
        ),
        (
            {
                "distill": {"teachers": [T], "support": "full", "top_k": 3},
                "train": {"divergence": {"name": "jsd"}},
            },
            "distill.top_k has no effect with distill.support=full",
        ),
        (
            {
                "distill": {"teachers": [T], "support": "student", "top_k": 65},
                "train": {"divergence": {"name": "jsd"}},
            },
            "exceeds the 64 most likely tokens",
        ),
        (
            {
                "distill": {"teachers": [T], "support": "student"},
                "train": {"divergence": {"name": "jsd"}},
            },
            "asks the policy servers about whole segments",
        ),
        (
            {"distill": {"teachers": [T], "support": "full", "cache": False}, "train": {"divergence": {"name": "jsd"}}},
            "nothing is kept",
        ),
        (
            {"distill": {"teachers": [T], "align": "bytes"}, "train": {"divergence": {"name": "reverse_kl"}}},
            "candidates of one vocabulary",
        ),
        ({"distill": {"teachers": [T]}, "train": {"divergence": {"jsd_beta": 0.1}}}, "jsd_beta has no effect"),
        (
            {"distill": {"teachers": [T]}, "train": {"divergence": {"name": "jsd", "discount": 0.5}}},
            "discount has no effect",
        ),
        ({"distill": {"teachers": [T]}, "rollout": {"temperature": 0.8}}, "at which teachers score"),
        (
            {"distill": {"teachers": [{"model": "t"}], "max_model_len": 512}},
            "must hold a whole segment and one token more",
        ),
        ({"distill": {"teachers": [T]}, "train": {"advantage": {"name": "rloo"}}}, "distill.reward_weight=0"),
        (
            {"distill": {"teachers": [T]}, "train": {"divergence": {"name": "jsd"}, "loss": {"clip_low": 0.1}}},
            "there is none",
        ),
        ({"distill": {"teachers": [T], "reward_weight": 1}, "rollout": {"group_size": 1}}, "group_size 1 leaves"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what) as caught:
        RunConfig.model_validate(changes)
    assert "remedy:" in str(caught.value)


@pytest.mark.parametrize("name", ["", "a\nb", "a\x00"])
def test_a_teachers_name_is_a_line_of_text(name: str) -> None:
    with pytest.raises(ValidationError, match="should match pattern"):
        RunConfig.model_validate({"distill": {"teachers": [{**T, "name": name}]}})


def test_a_teacher_alone_needs_no_group_and_its_window_holds_a_segment() -> None:
    config = RunConfig.model_validate({"distill": {"teachers": [T]}, "rollout": {"group_size": 1}})
    assert config.teacher_window == config.agent.max_tokens + 1 == 2049
    wider = RunConfig.model_validate({"distill": {"teachers": [{"model": "t"}], "max_model_len": 4096}})
    assert wider.teacher_window == 4096
