"""What an agent does outside jit: train, evaluate, save, load, export and act."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxroll.agents.states import TrainState, check_state
from jaxroll.checks import check_flag
from jaxroll.distributions import sample
from jaxroll.export import export_policy
from jaxroll.types import PyTree


class Shell:
    """The methods of an agent that are not pure, around those that are."""

    @property
    def env_name(self: Any) -> str:
        """How the environment is called in logs."""
        env = self.env
        while not hasattr(env, "name") and hasattr(env, "env"):
            env = env.env  # what a wrapper without a name of its own is around
        return str(getattr(env, "name", type(env).__name__))

    def train(self: Any, num_train_steps: int, **options: Any) -> tuple[TrainState, Any]:
        """Train until `num_train_steps` environment steps, with a progress bar.

        Args:
          num_train_steps: of the whole run, what was done before a resume included.
          **options: see `jaxroll.train.train`: seed, state, mesh, reduction, checkpoint_dir,
            resume, init_model_path, callbacks, eval_interval, target_return, time_budget, …

        Returns:
          (state, history).
        """
        from jaxroll import train

        return train.train(self, num_train_steps, **options)

    def eval(
        self: Any,
        state: TrainState,
        num_episodes: int = 32,
        *,
        seed: int = 0,
        deterministic: bool = True,
        env: Any = None,
    ) -> dict[str, Any]:
        """Play whole episodes: mean `episode_return`, `episode_length`, and each episode's.

        An episode that does not end (within 100,000 steps for each that its environment plays) is
        counted in `num_unfinished` and warned of; the means are without it.

        Args:
          state: a TrainState.
          num_episodes: exactly this many are played.
          seed: of the episodes.
          deterministic: act with the distribution's mode.
          env: another environment with the same spaces; None: the agent's own.
        """
        from jaxroll import train

        return train.evaluate(
            self, state, num_episodes, seed=seed, deterministic=deterministic, env=env
        )

    def save(self: Any, state: TrainState, path: Any, *, overwrite: bool = False) -> None:
        """Write the whole state to a directory, verified when it is loaded."""
        from jaxroll import train

        train.save(self, state, path, overwrite=overwrite)

    def load(self: Any, path: Any) -> TrainState:
        """The state that `save` (or a checkpoint of `train`) wrote."""
        from jaxroll import train

        return train.load(self, path)

    def export(self: Any, state: TrainState, path: Any, **options: Any) -> Any:
        """Write the policy to a file that runs with JAX alone.

        Args:
          state: a TrainState.
          path: the file to write.
          **options: see `jaxroll.export.export_policy`: batch_size, deterministic, platforms.
        """
        return export_policy(self, state, path, **options)

    def act(self: Any, state: TrainState, *, deterministic: bool = True) -> Callable[..., Any]:
        """The trained policy taken out as a plain function: `act(obs, carry=…, is_first=…, key=…)`.

        Args:
          state: a TrainState; its params, and the statistics that normalise, become part of it.
          deterministic: the distribution's mode; False: a sample, drawn from `key`.

        Returns:
          a function of observations [B, ...] that gives actions [B, ...]; for a recurrent policy
          (actions, carry).

        Example:
          >>> import jax, jax.numpy as jnp, jaxroll
          >>> ppo = jaxroll.PPO.create("CartPole-v1", num_envs=4, num_steps=8, num_mini_batch=1)
          >>> act = ppo.act(jax.jit(ppo.init)(jax.random.key(0)))
          >>> act(jnp.zeros((2, 4))).shape
          (2,)
        """
        check_state(state)
        check_flag("deterministic", deterministic)
        params = self.acting_params(state.learner)
        policy, recurrent = self.policy, self.is_recurrent

        @jax.jit
        def act(obs: PyTree, carry: Any = None, is_first: Any = None, key: Any = None) -> Any:
            batch = jax.tree.leaves(obs)[0].shape[0]
            carry = policy.initial_carry(batch) if carry is None else carry
            is_first = jnp.zeros(batch, bool) if is_first is None else is_first
            carry, output = policy.apply(params, carry, obs, is_first)
            if deterministic:
                action = output.distribution.mode()
            elif key is None:
                raise ValueError(
                    "a stochastic policy needs a key: act(obs, key=jax.random.key(0))."
                )
            else:
                action = sample(output.distribution, key)
            return (action, carry) if recurrent else action

        return act
