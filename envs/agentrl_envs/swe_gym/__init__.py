"""SWE-Gym: real rows from a data set, and generated repositories with injected bugs."""

from agentrl_envs.swe_gym.environment import SweGymEnvironment

__all__ = ["SweGymEnvironment"]
