"""`agentrl.wire.TaskFactory` for SWE-Gym rows."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.wire import FactoryReport, InjectRequest, MineRequest, SandboxPool
from agentrl_envs.swe_gym.factory.inject import inject
from agentrl_envs.swe_gym.factory.mine import mine


class SweGymFactory:
    """Satisfies `agentrl.wire.TaskFactory`."""

    async def mine(self, request: MineRequest, *, pool: SandboxPool, tell: Callable[[str], None]) -> FactoryReport:
        return await mine(request, pool=pool, tell=tell)

    async def inject(self, request: InjectRequest, *, pool: SandboxPool, tell: Callable[[str], None]) -> FactoryReport:
        return await inject(request, pool=pool, tell=tell)
