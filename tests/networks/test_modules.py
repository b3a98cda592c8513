"""Modules of network libraries and distributions of others, where a policy is expected."""

import textwrap
from typing import Any

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jaxroll
from jaxroll.collectors import collect, evaluate, init_actor
from jaxroll.distributions import Categorical
from jaxroll.envs import make_env
from jaxroll.networks import as_policy

ENV = make_env("CartPole-v1", max_steps_in_episode=5)
OBS = jnp.linspace(-1, 1, 12).reshape(3, 4)
SIZES = {"num_envs": 2, "num_steps": 4}


class Model(nn.Module):
    """As purejaxrl has it: a distribution and a value."""

    distribution: type = Categorical

    @nn.compact
    def __call__(self, obs):
        return self.distribution(nn.Dense(2)(obs)), nn.Dense(1)(obs)[:, 0]


@pytest.mark.parametrize("distribution", [Categorical, distrax.Categorical])
def test_a_linen_module_collects_and_evaluates_with_its_own_params(distribution):
    model = Model(distribution)
    actor = init_actor(ENV, model, jax.random.key(0), 2)
    params = model.init(jax.random.key(1), actor.obs)
    _, rollout = jax.jit(collect, static_argnums=(0, 1, 4))(ENV, model, params, actor, 6)
    step = jax.tree.map(lambda x: x.reshape(12, *x.shape[2:]), rollout.transition)
    own, value = Model().apply(params, step.obs)
    np.testing.assert_allclose(step.log_prob, own.log_prob(step.action), rtol=1e-5)
    np.testing.assert_allclose(step.value, value, rtol=1e-5)
    assert len(np.unique(step.action)) == 2
    for deterministic in (True, False):
        options = {"num_episodes": 2, "deterministic": deterministic}
        result = evaluate(ENV, model, params, jax.random.key(2), **options)
        assert result.episode_length.tolist() == [5, 5]


@pytest.mark.parametrize("agent", [jaxroll.PPO, jaxroll.A2C, jaxroll.IMPALA])
@pytest.mark.parametrize("distribution", [Categorical, distrax.Categorical])
def test_agents_take_a_linen_module(agent, distribution):
    sizes = SIZES | ({"batch_size": 2, "num_storages": 2} if agent is jaxroll.IMPALA else {})
    made = agent.create(ENV, policy=Model(distribution), **sizes)
    state = jax.eval_shape(made.init, jax.random.key(0))
    after, metrics = jax.eval_shape(made.train_step, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert "entropy" in metrics
    assert set(state.learner.params) == {"params"}


class TwoArguments(nn.Module):
    def __call__(self, carry, obs):
        return carry


class Remembers(nn.Module):
    @nn.compact
    def __call__(self, obs):
        x = nn.BatchNorm(use_running_average=True)(obs)
        return Categorical(nn.Dense(2)(x)), x[:, 0]


class Logits(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.Dense(2)(obs), nn.Dense(1)(obs)[:, 0]


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.logits, self.critic = nnx.Linear(4, 2, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, obs):
        return Categorical(self.logits(obs)), self.critic(obs)[..., 0]


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (Model, TypeError, "an instance, got the class Model"),
        (TwoArguments(), TypeError, "takes carry, obs.*initial_carry"),
        (Remembers(), ValueError, r"has \['batch_stats', 'params'\]"),
        (Logits(), TypeError, r"must return \(distribution, value\).*Categorical\(logits\)"),
        (lambda params, obs: obs, TypeError, "got function. Use jaxroll.Policy.from_functions"),
        (Nnx(nnx.Rngs(0)), TypeError, "Nnx of flax.nnx holds its arrays"),
    ],
)
def test_what_is_no_policy_is_named_with_the_way(policy, error, message):
    with pytest.raises(error, match=message):
        jaxroll.PPO.create(ENV, policy=policy, **SIZES)


def made_as_the_error_says(module, **names):
    """The policy that the error for this module suggests."""
    with pytest.raises(TypeError) as caught:
        as_policy(module)
    code = str(caught.value).partition("\n")[2]
    scope = names | {"jaxroll": jaxroll, "jax": jax}
    exec(textwrap.dedent(code), scope)
    return jaxroll.Policy.from_functions(scope["init"], scope["apply"])


def test_the_code_for_nnx_works():
    policy = made_as_the_error_says(Nnx(nnx.Rngs(0)), nnx=nnx, Model=Nnx)
    params = policy.init(jax.random.key(0), OBS)
    same = Nnx(nnx.Rngs(jax.random.key(0)))
    _, output = jax.jit(policy.apply)(params, (), OBS, jnp.zeros(3, bool))
    np.testing.assert_allclose(output.value, same(OBS)[1], rtol=1e-6)
    agent = jaxroll.PPO.create(ENV, policy=policy, **SIZES)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    assert jax.eval_shape(agent.train_step, state)[0].learner.params.keys() == params.keys()


def test_the_code_for_equinox_works():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        logits: Any
        critic: Any

        def __init__(self, key):
            self.logits = eqx.nn.Linear(4, 2, key=key)
            self.critic = eqx.nn.Linear(4, "scalar", key=key)

        def __call__(self, obs):
            return Categorical(self.logits(obs)), self.critic(obs)

    policy = made_as_the_error_says(Model(jax.random.key(0)), eqx=eqx, Model=Model)
    params = policy.init(jax.random.key(0), OBS)
    _, output = jax.jit(policy.apply)(params, (), OBS, jnp.zeros(3, bool))
    expected = jax.vmap(Model(jax.random.key(0)))(OBS)[1]
    np.testing.assert_allclose(output.value, expected, rtol=1e-6)
    agent = jaxroll.PPO.create(ENV, policy=policy, **SIZES)
    jax.eval_shape(agent.train_step, jax.eval_shape(agent.init, jax.random.key(0)))


def test_host_environments_and_a_missing_autoreset_are_named_by_collect_and_init_actor():
    class Stops:
        observation_space, action_space = ENV.observation_space, ENV.action_space

        def reset(self, key):
            return jnp.float32(0), jnp.zeros(4)

        def step(self, key, state, action):
            return state, jnp.zeros(4), 1.0, False

    policy = as_policy(Model())
    for env, message in ((Stops(), "autoreset"), ("gymnasium:CartPole-v1", "HostCollector")):
        with pytest.raises(TypeError, match=message):
            init_actor(env, policy, jax.random.key(0), 2)
        actor = init_actor(ENV, policy, jax.random.key(0), 2)
        with pytest.raises(TypeError, match=message):
            collect(env, policy, {}, actor, 4)
