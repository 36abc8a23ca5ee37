"""The policy servers (vLLM), their clients and router, weight delivery, and how much load they take."""

from agentrl.policy.client import VllmClient
from agentrl.policy.command import check_model, model_location
from agentrl.policy.concurrency import ConcurrencyController, ServerLoad, start_limit
from agentrl.policy.delivery import deliver
from agentrl.policy.metrics import ServerStats
from agentrl.policy.models import local_model
from agentrl.policy.payload import error_words
from agentrl.policy.replicas import open_replicas
from agentrl.policy.requirement import Device, VllmInstall, find_vllm
from agentrl.policy.router import PolicyRouter, RoutedPolicy
from agentrl.policy.scores import PromptLogprobs, ScoreFormatError, token_scores
from agentrl.policy.server import Liveness, ServerExit, VllmServer

__all__ = [
    "ConcurrencyController",
    "Device",
    "Liveness",
    "PolicyRouter",
    "PromptLogprobs",
    "RoutedPolicy",
    "ScoreFormatError",
    "ServerExit",
    "ServerLoad",
    "ServerStats",
    "VllmClient",
    "VllmInstall",
    "VllmServer",
    "check_model",
    "deliver",
    "error_words",
    "find_vllm",
    "local_model",
    "model_location",
    "open_replicas",
    "start_limit",
    "token_scores",
]
