"""PPO in the form of purejaxrl, written for this comparison.

purejaxrl is a repository of single files that users copy, so what is compared is the same
structure and hyperparameters, written anew: one `lax.scan` over updates; a scan over steps that
splits keys as it goes and stacks transitions with an info dict for each step; GAE with unroll 16,
where a truncation counts as a termination; epochs that permute, take and reshape the whole rollout;
and metrics for every environment and step. Networks are two 64 × 64 tanh torsos.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax

# The hyperparameters that purejaxrl publishes for CartPole and MinAtar.
CARTPOLE = {
    "learning_rate": 2.5e-4,
    "num_envs": 4,
    "num_steps": 128,
    "num_epochs": 4,
    "num_mini_batch": 4,
    "discount": 0.99,
    "gae_lambda": 0.95,
    "clip_epsilon": 0.2,
    "clip_value": True,
    "entropy_coef": 0.01,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
    "decay_steps": 500_000,
}
MINATAR = {**CARTPOLE, "learning_rate": 5e-3, "num_envs": 64, "num_mini_batch": 8}
MINATAR |= {"decay_steps": 10_000_000}


class ActorCritic(nn.Module):
    """Two torsos, logits and a value."""

    num_actions: int

    @nn.compact
    def __call__(self, x: Any) -> tuple[Any, Any]:
        """[N, features] → ([N, actions], [N])."""

        def dense(size: int, scale: float) -> nn.Dense:
            return nn.Dense(
                size,
                kernel_init=nn.initializers.orthogonal(scale),
                bias_init=nn.initializers.constant(0.0),
            )

        hidden = x
        for _ in range(2):
            hidden = nn.tanh(dense(64, np.sqrt(2))(hidden))
        logits = dense(self.num_actions, 0.01)(hidden)
        hidden = x
        for _ in range(2):
            hidden = nn.tanh(dense(64, np.sqrt(2))(hidden))
        return logits, dense(1, 1.0)(hidden)[..., 0]


class Step(NamedTuple):
    """One row of the trajectory."""

    done: Any
    action: Any
    value: Any
    reward: Any
    log_prob: Any
    obs: Any
    info: Any


def make_train(
    env_name: str, config: dict[str, Any], num_updates: int, *, with_info: bool = True
) -> Callable[[jax.Array], Any]:
    """`train(key) -> (runner, metrics)`: the whole training, one scan over updates, to be jitted.

    This is how its users run it: `jax.jit(make_train(config))(key)`.
    """
    init, update = make_update(env_name, config, with_info=with_info)
    return lambda key: lax.scan(update, init(key), length=num_updates)


def make_update(
    env_name: str, config: dict[str, Any], *, with_info: bool = True
) -> tuple[Any, Any]:
    """(init, update): `init(key) -> runner`, `update(runner, None) -> (runner, metrics)`.

    Args:
      env_name: of gymnax.
      config: such as `CARTPOLE`.
      with_info: stack the info dict of every step and return it as metrics, as purejaxrl does.
    """
    import gymnax

    env, params = gymnax.make(env_name)
    network = ActorCritic(env.action_space(params).n)
    num_envs, num_steps = config["num_envs"], config["num_steps"]
    size = num_envs * num_steps
    num_updates = config["decay_steps"] // size

    def reset(key: Any) -> tuple[Any, Any]:
        obs, state = env.reset(key, params)
        zero = jnp.zeros(())
        return obs.reshape(-1), (state, zero, jnp.zeros((), jnp.int32), zero, zero, zero)

    def step(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        env_state, total, length, last_total, last_length, timestep = state
        obs, env_state, reward, terminated, truncated, _ = env.step(key, env_state, action, params)
        done = terminated | truncated
        total, length = total + reward, length + 1
        last_total = last_total * (1 - done) + total * done
        last_length = last_length * (1 - done) + length * done
        timestep = timestep + 1
        info = {
            "returned_episode_returns": last_total,
            "returned_episode_lengths": last_length,
            "timestep": timestep,
            "returned_episode": done,
        }
        total, length = total * (1 - done), length * (1 - done)
        state = (env_state, total, length, last_total, last_length, timestep)
        return obs.reshape(-1), state, reward, done, info if with_info else {}

    def schedule(count: Any) -> Any:
        done = count // (config["num_mini_batch"] * config["num_epochs"])
        return config["learning_rate"] * (1.0 - done / num_updates)

    def init(key: Any) -> Any:
        params_key, reset_key, key = jax.random.split(key, 3)
        obs, env_state = jax.vmap(reset)(jax.random.split(reset_key, num_envs))
        tx = optax.chain(
            optax.clip_by_global_norm(config["max_grad_norm"]), optax.adam(schedule, eps=1e-5)
        )
        state = TrainState.create(
            apply_fn=network.apply, params=network.init(params_key, obs), tx=tx
        )
        return state, env_state, obs, key

    def collect(runner: Any, _: Any) -> tuple[Any, Step]:
        train_state, env_state, obs, key = runner
        key, action_key, step_key = jax.random.split(key, 3)
        logits, value = network.apply(train_state.params, obs)
        action = jax.random.categorical(action_key, logits)
        log_prob = _log_prob(logits, action)
        keys = jax.random.split(step_key, num_envs)
        next_obs, env_state, reward, done, info = jax.vmap(step)(keys, env_state, action)
        row = Step(done, action, value, reward, log_prob, obs, info)
        return (train_state, env_state, next_obs, key), row

    def advantages_of(rows: Step, last_value: Any) -> tuple[Any, Any]:
        def back(carry: Any, row: Step) -> Any:
            gae, next_value = carry
            going = 1 - row.done
            delta = row.reward + config["discount"] * next_value * going - row.value
            gae = delta + config["discount"] * config["gae_lambda"] * going * gae
            return (gae, row.value), gae

        start = (jnp.zeros_like(last_value), last_value)
        _, advantages = lax.scan(back, start, rows, reverse=True, unroll=16)
        return advantages, advantages + rows.value

    def loss(params: Any, rows: Step, gae: Any, targets: Any) -> Any:
        logits, value = network.apply(params, rows.obs)
        log_prob = _log_prob(logits, rows.action)
        epsilon = config["clip_epsilon"]
        clipped = rows.value + (value - rows.value).clip(-epsilon, epsilon)
        worse = jnp.maximum(jnp.square(value - targets), jnp.square(clipped - targets))
        value_loss = 0.5 * worse.mean()
        ratio = jnp.exp(log_prob - rows.log_prob)
        gae = (gae - gae.mean()) / (gae.std() + 1e-8)
        limited = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon) * gae
        policy_loss = -jnp.minimum(ratio * gae, limited).mean()
        log_probs = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        total = policy_loss + config["value_coef"] * value_loss - config["entropy_coef"] * entropy
        return total, (value_loss, policy_loss, entropy)

    def epoch(carry: Any, _: Any) -> tuple[Any, Any]:
        train_state, rows, advantages, targets, key = carry
        key, shuffle_key = jax.random.split(key)
        order = jax.random.permutation(shuffle_key, size)
        batch = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), (rows, advantages, targets))
        shuffled = jax.tree.map(lambda x: jnp.take(x, order, axis=0), batch)
        minibatches = jax.tree.map(
            lambda x: x.reshape(config["num_mini_batch"], -1, *x.shape[1:]), shuffled
        )

        def minibatch(train_state: Any, batch: Any) -> tuple[Any, Any]:
            total, grads = jax.value_and_grad(loss, has_aux=True)(train_state.params, *batch)
            return train_state.apply_gradients(grads=grads), total

        train_state, losses = lax.scan(minibatch, train_state, minibatches)
        return (train_state, rows, advantages, targets, key), losses

    def update(runner: Any, _: Any) -> tuple[Any, Any]:
        runner, rows = lax.scan(collect, runner, length=num_steps)
        train_state, env_state, obs, key = runner
        _, last_value = network.apply(train_state.params, obs)
        advantages, targets = advantages_of(rows, last_value)
        carry = (train_state, rows, advantages, targets, key)
        carry, _ = lax.scan(epoch, carry, length=config["num_epochs"])
        return (carry[0], env_state, obs, carry[-1]), rows.info

    return init, update


def _log_prob(logits: Any, action: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]
