"""Settings: models, presets, TOML and dotted overrides."""

from agentrl.config.correction import CorrectionConfig, RejectionRule, correction_preset, preset_names
from agentrl.config.distill import DistillConfig, DivergenceConfig, TeacherConfig
from agentrl.config.models import (
    AdvantageConfig,
    AgentConfig,
    AlarmConfig,
    CheckpointConfig,
    DemonstrationConfig,
    EnvironmentConfig,
    EvalConfig,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    RunConfig,
    SandboxConfig,
    SftConfig,
    ToolsConfig,
    TrainConfig,
    WarmStartConfig,
    WarmStartStage,
)
from agentrl.config.rollout import PlacementConfig, RolloutConfig

__all__ = [
    "AdvantageConfig",
    "AgentConfig",
    "AlarmConfig",
    "CheckpointConfig",
    "CorrectionConfig",
    "DemonstrationConfig",
    "DistillConfig",
    "DivergenceConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "LossConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PolicyConfig",
    "RejectionRule",
    "RolloutConfig",
    "RunConfig",
    "SandboxConfig",
    "SftConfig",
    "TeacherConfig",
    "ToolsConfig",
    "TrainConfig",
    "WarmStartConfig",
    "WarmStartStage",
    "correction_preset",
    "preset_names",
]
