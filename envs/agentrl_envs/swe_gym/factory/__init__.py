"""The task factory: SWE-Gym rows from a git repository's bug fixes, or by breaking a tested repository."""

from agentrl_envs.swe_gym.factory.factory import SweGymFactory

__all__ = ["SweGymFactory"]
