"""Settings: order of sources, round trip, and errors that name the key and the remedy (K52)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import LossConfig, RunConfig, correction_preset, preset_names
from agentrl.config.load import (
    build,
    dump_toml,
    known_keys,
    list_presets,
    load_config,
    merge,
    parse_overrides,
    read_preset,
)
from agentrl.errors import ConfigError


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("steps = 7\n[rollout]\ngroups = 4\ngroup_size = 3\n")
    config = load_config(preset="demo", file=file, overrides=["--rollout.group-size", "5"], seed=9)
    assert (config.steps, config.rollout.groups, config.rollout.group_size, config.seed) == (7, 4, 5, 9)
    assert config.agent.max_turns == read_preset("demo")["agent"]["max_turns"]


def test_one_source_of_defaults() -> None:
    """A preset names only what it changes: no value in it repeats a default."""
    defaults = RunConfig().model_dump()

    def repeats(tables: dict, base: dict, prefix: str) -> list[str]:
        out: list[str] = []
        for key, value in tables.items():
            if isinstance(value, dict):
                out += repeats(value, base.get(key, {}), f"{prefix}{key}.")
            elif key in base and base[key] == value:
                out.append(prefix + key)
        return out

    for name in list_presets():
        tables = {k: v for k, v in read_preset(name).items() if k not in ("environment", "policy")}
        assert repeats(tables, defaults, "") == [], name


@pytest.mark.parametrize("preset", list_presets())
def test_resolved_config_reads_back_equal(preset: str, tmp_path: Path) -> None:
    config = load_config(preset=preset)
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(config))
    assert load_config(file=file) == config


@pytest.mark.parametrize("name", preset_names())
def test_every_correction_preset_builds_and_reads_back(name: str, tmp_path: Path) -> None:
    config = load_config(preset="demo", overrides=["--train.correction", name])
    assert config.train.correction == correction_preset(name)
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(config))
    assert load_config(file=file).train.correction == correction_preset(name)


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo", "reinforce"])
def test_every_loss_reads_back(name: str, tmp_path: Path) -> None:
    config = load_config(preset="demo", overrides=["--train.loss.name", name])
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(config))
    assert load_config(file=file) == config


@pytest.mark.parametrize(
    ("overrides", "what", "remedy"),
    [
        (["--rollout.group-sise", "3"], "unknown key `rollout.group_sise`", "rollout.group_size"),
        (["--sandbox.bakend", "docker"], "unknown key `sandbox.bakend`", "sandbox.backend"),
        (["--rollout.groups", "many"], "`rollout.groups`", "--dry-run"),
        (["--sandbox.backend", "podman"], "`sandbox.backend`", "--dry-run"),
        (["--rollout.top-p", "0.9"], "rollout.top_p < 1", ""),
        (["--train.loss.name", "reinforce", "--train.loss.clip-low", "0.1"], "no effect with loss `reinforce`", ""),
        (["--train.updates-per-step", "99"], "exceeds rollout.groups", ""),
        (["--agent.max-tokens", "5000"], "exceeds policy.max_model_len", ""),
        (["--rollout.group-size", "1"], "nothing to compare", ""),
        (["--train.correction", "token-clamp-3"], "no correction preset", ""),
        (["--train.correction.action", "none", "--train.correction.upper", "3"], "no effect with action", ""),
        (["--agent.episode-timeout-s", "7200"], "rollout.group_timeout_s (3600) is below what it contains", ""),
        (["--rollout.grade-timeout-s", "1000"], "exceeds rollout.stuck_timeout_s (900)", ""),
        (["--agent.tools.command-timeout-s", "1000"], "exceeds rollout.stuck_timeout_s (900)", ""),
        (["stray"], "unexpected argument 'stray'", "--KEY VALUE"),
        (["--seed"], "lacks its value", "--seed VALUE"),
    ],
)
def test_mistakes_name_the_key_and_the_remedy(overrides: list[str], what: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(preset="demo", overrides=overrides)
    assert what in caught.value.what
    assert remedy in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("steps = = 3\n")
    with pytest.raises(ConfigError, match="not TOML") as caught:
        load_config(file=file)
    assert str(file) in caught.value.where
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="no preset"):
        load_config(preset="dmeo")


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError):
        build(LossConfig, {"name": "reinforce", "clip_high": 0.5}, where="test")
    assert build(LossConfig, {"name": "reinforce", "clip_high": 0.2}, where="test").name == "reinforce"


def test_every_known_key_is_an_override() -> None:
    keys = known_keys(RunConfig)
    assert "rollout.group_size" in keys
    assert "train.optimizer.learning_rate" in keys
    for key in keys:
        assert parse_overrides([f"--{key.replace('_', '-')}", "1"])


tables = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), max_leaves=8
)


@given(a=st.dictionaries(st.sampled_from("abcd"), tables), b=st.dictionaries(st.sampled_from("abcd"), tables))
def test_merge_keeps_the_later_and_all_keys(a: dict, b: dict) -> None:
    merged = merge(a, b)
    assert set(merged) == set(a) | set(b)
    assert merge(merged, b) == merged
    for key, value in b.items():
        if not isinstance(value, dict):
            assert merged[key] == value


def test_a_setting_over_a_correction_preset_changes_that_value_alone() -> None:
    preset = correction_preset("token-mask-3")
    changed = load_config(preset="demo", overrides=["--train.correction.upper", "4"]).train.correction
    assert changed == preset.model_copy(update={"upper": 4.0, "name": "custom"})
    same = load_config(preset="demo", overrides=["--train.correction.upper", "3"]).train.correction
    assert same == preset


def test_rejection_without_an_action_reads_back(tmp_path: Path) -> None:
    rule = '[{stat = "k3", level = "token", upper = 0.2}]'
    file = tmp_path / "mine.toml"
    file.write_text(f'[train]\ncorrection = {{action = "none", reject = {rule}}}\n')
    config = load_config(file=file)
    assert config.train.correction.reject[0].upper == 0.2
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(file=tmp_path / "config.toml") == config


def test_the_probes_tolerance_follows_the_servers_dtype() -> None:
    assert load_config(preset="demo").policy.probe_limit == 1e-3
    assert load_config(preset="demo", overrides=["--policy.dtype", "bfloat16"]).policy.probe_limit == 0.3
    assert load_config(preset="demo", overrides=["--policy.probe-tolerance", "0.5"]).policy.probe_limit == 0.5
