"""The value head learns reward, discount, time and truncation right, for each agent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.agents.agent_toys import Clock, small

DISCOUNTS = np.array([0.5, 0.8], np.float32)
OPTIONS = {
    "ppo": {"num_mini_batch": 1, "num_epochs": 4},
    "a2c": {"num_steps": 8},
    "daac": {"num_mini_batch": 1, "value_epochs": 4},
    "impala": {"num_steps": 8, "rmsprop_epsilon": 1e-3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_values_are_those_that_can_be_worked_out_by_hand(name):
    agent = small(name, learning_rate=1e-2, num_envs=8, **OPTIONS[name])
    if name == "daac":
        agent = agent.replace(value_learning_rate=1e-2)
    agent = agent.replace(decay_steps=600 * agent.steps_per_iteration)

    @jax.jit
    @jax.vmap  # one compilation for all discounts
    def learned(discount):
        mine = agent.replace(discount=discount)
        state, _ = jax.lax.scan(
            lambda state, _: (mine.train_step(state)[0], None),
            mine.init(jax.random.key(0)),
            length=600,
        )
        obs = jnp.eye(4)
        return mine.policy.value(state.learner.params, (), obs, jnp.zeros(4, bool))

    expected = np.stack([Clock.values(float(g)) for g in DISCOUNTS])
    np.testing.assert_allclose(learned(jnp.asarray(DISCOUNTS)), expected, rtol=0.05)
