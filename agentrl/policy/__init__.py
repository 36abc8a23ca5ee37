"""The policy server (vLLM), its client, and weight delivery."""

from agentrl.policy.client import VllmClient
from agentrl.policy.command import model_location
from agentrl.policy.delivery import deliver
from agentrl.policy.metrics import ServerStats
from agentrl.policy.requirement import Device, VllmInstall, find_vllm
from agentrl.policy.server import ServerExit, VllmServer

__all__ = [
    "Device",
    "ServerExit",
    "ServerStats",
    "VllmClient",
    "VllmInstall",
    "VllmServer",
    "deliver",
    "find_vllm",
    "model_location",
]
