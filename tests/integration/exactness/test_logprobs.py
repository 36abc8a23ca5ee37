"""Behaviour log-probabilities of real episodes equal the trainer's recompute, at every temperature and after
every delivery."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.bubblewrap]

TOLERANCE = 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_the_trainers(loop: Any, temperature: float) -> None:
    """K9: of the distribution after temperature, so that the mean ratio is 1 at T ≠ 1 too."""
    loop.play(2, 4, temperature=temperature)
    batch = loop.batch(1, version=loop.version)
    assert batch.temperature == temperature
    errors = loop.errors(batch)
    assert len(errors) > 200
    assert np.abs(errors).max() < TOLERANCE
    assert np.exp(errors).mean() == pytest.approx(1.0, abs=1e-5)
    # The other temperature's log-probabilities would not pass for these.
    other = loop.errors(batch, temperature=1.7 - temperature)
    assert np.abs(other).max() > 0.05
    assert np.abs(other).mean() > 100 * np.abs(errors).mean()


def test_ten_deliveries_of_trained_weights(loop: Any) -> None:
    """K25: train, deliver, sample; every token carries the delivered version and the new weights' log-probability,
    which is not the old weights'."""
    loop.play(2, 4)
    worst, moved = [], []
    for step in range(1, 11):
        old = copy.deepcopy(loop.trainer.model.state_dict())
        result = loop.trainer.train(loop.batch(step, version=loop.version))
        assert result.updates == 1
        delivery = loop.deliver()
        assert delivery.version == loop.version
        assert delivery.probe_max_abs < TOLERANCE
        # Enough of them that some token was in doubt: of one that is all but certain no update moves the probability.
        played = loop.play(2, 4, temperature=(1.0, 0.7)[step % 2])
        found = [t.segments[0].versions[t.segments[0].agent_mask] for t in played]
        assert all((versions == loop.version).all() for versions in found)
        batch = loop.batch(step + 1, version=loop.version)
        worst.append(np.abs(loop.errors(batch)).max())
        new = copy.deepcopy(loop.trainer.model.state_dict())
        loop.trainer.model.load_state_dict(old)
        moved.append(np.abs(loop.errors(batch)).max())
        loop.trainer.model.load_state_dict(new)
    assert max(worst) < TOLERANCE
    # A policy that has become certain of its tokens moves none of them; that may happen after a few such steps.
    assert sum(one > 100 * TOLERANCE for one in moved) >= 3


def test_no_cached_prefix_outlives_a_delivery(loop: Any) -> None:
    """K26: the prompt is warm in the server's cache; after a delivery it is computed anew."""
    policy: Any = None

    def recording(client: Any) -> Any:
        nonlocal policy
        policy = recorder(client)
        return policy

    recorder = importlib.import_module(type(loop).__module__).RecordingPolicy
    cached: dict[str, list[int]] = {}
    for name in ("cold", "warm", "delivered"):
        if name == "delivered":
            loop.trainer.train(loop.batch(1, version=loop.version))
            loop.deliver()
        played = loop.play(1, 1, policy=recording, again=name != "cold")
        cached[name] = [generation.cached_tokens for _, generation in policy.of(played[0].trajectory_id)]
        prompt = played[0].segments[0].spans[0].stop
        assert np.abs(loop.errors(loop.batch(1, version=loop.version))).max() < TOLERANCE
    assert prompt >= 64
    assert cached["cold"][0] <= prompt // 2  # at most the system prompt that earlier tasks share
    assert cached["warm"][0] >= prompt - 32
    assert cached["delivered"][0] == 0
    assert all(hits > 0 for hits in cached["delivered"][1:])  # within the episode the cache works on


def test_one_other_token_moves_one_logprob(loop: Any) -> None:
    """K6: position t of every stream speaks of token t, in the record, the trainer and the server alike."""
    loop.play(1, 2)
    sequence = max(loop.batch(1, version=loop.version).sequences, key=lambda s: int(s.pg_mask.sum()))
    trained = np.flatnonzero(sequence.pg_mask)
    at = int(trained[len(trained) // 2])
    ids = sequence.token_ids[: at + 1].copy()
    other = ids.copy()
    other[at] = (other[at] + 1) % loop.shared.vocabulary

    async def scores(client: Any) -> tuple[np.ndarray, np.ndarray]:
        return tuple([await client.prompt_logprobs(x.tolist(), timeout_s=60) for x in (ids, other)])

    before, changed = loop.run(scores)
    recorded = loop.groups[0].trajectories[0].temperature
    assert recorded == 1.0
    assert before[at - 1] == pytest.approx(sequence.behaviour_logprobs[at], abs=TOLERANCE)
    assert np.abs(before - changed)[: at - 1].max() < TOLERANCE
    assert abs(float(before[at - 1] - changed[at - 1])) > 0.01


def test_training_one_token_raises_that_token(loop: Any) -> None:
    """K6, through the whole loop: of a batch in which a single token is trained, that token's log-probability rises
    most at the server once the weights are delivered; its neighbours are not what was trained."""
    loop.play(1, 2)
    batch = loop.batch(1, version=loop.version)
    sequence = max(batch.sequences, key=lambda s: int(s.pg_mask.sum()))
    trained = np.flatnonzero(sequence.pg_mask)
    at = int(trained[np.argmin(sequence.behaviour_logprobs[trained])])  # the least likely one
    replace = importlib.import_module("msgspec").structs.replace
    mask = np.zeros_like(sequence.pg_mask)
    mask[at] = True
    one = replace(
        sequence,
        pg_mask=mask,
        advantages=mask.astype(np.float32),
        behaviour_logprobs=np.where(mask, sequence.behaviour_logprobs, np.float32(0)),
    )
    ids = sequence.token_ids.tolist()

    async def scores(client: Any) -> np.ndarray:
        return await client.prompt_logprobs(ids, timeout_s=60)

    before = loop.run(scores)
    result = loop.trainer.train(replace(batch, sequences=(one,)))
    loop.deliver()
    after = loop.run(scores)
    assert result.sequences[0].mask.tolist() == mask.tolist()
    rise = after - before
    assert rise[at - 1] > 0.1
    assert rise[at - 1] > rise[[at - 2, at]].max()
