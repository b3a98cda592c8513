"""A storage in one's own loop: collect, targets, minibatches and optimiser in a single jit.

Only the storage and the environment are jaxroll's; policy, loss and optimiser are written here.
Run it: `python examples/own_loop.py --steps 200000`.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import jaxroll
from jaxroll.distributions import Categorical

NUM_ENVS, NUM_STEPS = 32, 64
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
env = jaxroll.make_env("CartPole-v1")


def init(key):
    """A hidden layer each for the policy and for the value."""
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (4, 128)),
        "policy": jnp.zeros((64, 2)),
        "value": 0.1 * jax.random.normal(second, (64,)),
    }


def policy_and_value(params, obs):
    """(distribution, V) of observations [..., 4]."""
    hidden = jnp.tanh(obs @ params["hidden"])
    return Categorical(hidden[..., :64] @ params["policy"]), hidden[..., 64:] @ params["value"]


def loss(params, batch):
    """PPO's, in plain means."""
    seen, targets = batch.transition, batch.targets
    distribution, value = policy_and_value(params, seen.obs)
    ratio = jnp.exp(distribution.log_prob(seen.action) - seen.log_prob)
    advantage = jaxroll.normalize(targets.advantages)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    entropy = distribution.entropy()
    return jnp.mean(-gain + 0.5 * (value - targets.returns) ** 2 - 0.01 * entropy)


def act(params, env_state, obs, key):
    """One step of all environments: (their states, the next observations, a Transition)."""
    action_key, env_key = jax.random.split(key)
    distribution, value = policy_and_value(params, obs)
    action = distribution.sample(action_key)
    env_keys = jax.random.split(env_key, NUM_ENVS)
    env_state, after = jax.vmap(env.step)(env_keys, env_state, action)
    transition = jaxroll.Transition(
        obs=obs,
        action=action,
        reward=after.reward,
        terminated=after.terminated,
        truncated=after.truncated,
        log_prob=distribution.log_prob(action),
        value=value,
        bootstrap_value=policy_and_value(params, after.final_obs)[1],  # read where truncated
    )
    return env_state, after.obs, transition


@jax.jit
def update(storage, params, opt_state, env_state, obs, key):
    """One rollout and four epochs of four minibatches."""
    collect_key, sample_key = jax.random.split(key)

    def step(carry, key):
        storage, env_state, obs = carry
        env_state, obs, transition = act(params, env_state, obs, key)
        return (storage.add(transition), env_state, obs), None

    keys = jax.random.split(collect_key, storage.num_steps)
    (storage, env_state, obs), _ = jax.lax.scan(step, (storage, env_state, obs), keys)
    storage = storage.compute_returns_and_advantages(policy_and_value(params, obs)[1])

    def sgd(carry, batch):
        params, opt_state = carry
        updates, opt_state = optimizer.update(jax.grad(loss)(params, batch), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    batches = storage.generate_batches(sample_key, num_mini_batch=4, num_epochs=4)
    (params, opt_state), _ = batches.scan(sgd, (params, opt_state))
    ends = jnp.sum(storage.data.terminated | storage.data.truncated)
    return storage.update(), params, opt_state, env_state, obs, ends


def main():
    """Train, and print how long episodes are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    args = parser.parse_args()
    params_key, reset_key, run_key = jax.random.split(jax.random.key(0), 3)
    params = init(params_key)
    opt_state = optimizer.init(params)
    env_state, obs = jax.vmap(env.reset)(jax.random.split(reset_key, NUM_ENVS))
    example = jax.eval_shape(act, params, env_state, obs, run_key)[2]
    storage = jaxroll.RolloutStorage.create(example, NUM_STEPS, discount=0.99, gae_lambda=0.95)
    num_updates = max(1, args.steps // (NUM_ENVS * NUM_STEPS))
    for i, key in enumerate(jax.random.split(run_key, num_updates), start=1):
        storage, params, opt_state, env_state, obs, ends = update(
            storage, params, opt_state, env_state, obs, key
        )
        if i % 10 == 0 or i == num_updates:
            length = NUM_ENVS * NUM_STEPS / max(int(ends), 1)
            print(f"step {i * NUM_ENVS * NUM_STEPS:7,}  about {length:.0f} steps per episode")


if __name__ == "__main__":
    main()
