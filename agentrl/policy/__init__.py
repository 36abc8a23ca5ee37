"""The policy server (vLLM), its client, and weight delivery."""

from agentrl.policy.client import VllmClient
from agentrl.policy.command import check_model, model_location
from agentrl.policy.delivery import deliver
from agentrl.policy.metrics import ServerStats
from agentrl.policy.models import local_model
from agentrl.policy.requirement import Device, VllmInstall, find_vllm
from agentrl.policy.server import ServerExit, VllmServer

__all__ = [
    "Device",
    "ServerExit",
    "ServerStats",
    "VllmClient",
    "VllmInstall",
    "VllmServer",
    "check_model",
    "deliver",
    "find_vllm",
    "local_model",
    "model_location",
]
