"""Settings: models, presets, TOML and dotted overrides."""

from agentrl.config.correction import CorrectionConfig, RejectionRule, correction_preset, preset_names
from agentrl.config.models import (
    AdvantageConfig,
    AgentConfig,
    AlarmConfig,
    CheckpointConfig,
    EnvironmentConfig,
    EvalConfig,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SandboxConfig,
    ToolsConfig,
    TrainConfig,
)

__all__ = [
    "AdvantageConfig",
    "AgentConfig",
    "AlarmConfig",
    "CheckpointConfig",
    "CorrectionConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "LossConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RejectionRule",
    "RolloutConfig",
    "RunConfig",
    "SandboxConfig",
    "ToolsConfig",
    "TrainConfig",
    "correction_preset",
    "preset_names",
]
