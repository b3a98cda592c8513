"""DistributedTrainer: one config to a whole run, the imperative shell around a pure agent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from jaxroll import parallel, train as train_lib
from jaxroll.checks import divisors
from jaxroll.collectors.host import HostCollector
from jaxroll.config import GIVEN, Config
from jaxroll.sweeps import Sweep
from jaxroll.train.history import History
from jaxroll.train.options import Options, fields_of
from jaxroll.train.preflight import as_eval_env, check_budget, check_traces
from jaxroll.train.programs import make_program
from jaxroll.types import Rollout


class DistributedTrainer:
    """A run: environments, agent and loop as a config describes them.

    Making one checks everything that can be checked, and touches no device and no file.

    Args:
      config: a `Config`, a mapping, or the path of a TOML file or of a run's directory.
      train_env: train on this environment, or the one of this name, instead of the config's. The
        run's config says how to make it; if only an object does, it must be given again later.
      test_env: test on this one instead; it must have the same spaces, on the device or the host.

    Attributes:
      config: the run, with every hyperparameter named.
      agent: what is trained; a `Sweep` where the config asks for several seeds.
      history: the rows of `train`.

    Example:
      >>> trainer = DistributedTrainer({
      ...     "agent": "ppo", "env": "CartPole-v1", "num_train_steps": 64, "progress": "silent",
      ...     "hyperparameters": {"num_envs": 4, "num_steps": 8}})
      >>> state, history = trainer.train()
      >>> trainer.act().transition.reward.shape, len(trainer.test(8)["episode_returns"])
      ((8, 4), 8)
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | os.PathLike[str],
        train_env: Any = None,
        test_env: Any = None,
    ):
        if isinstance(config, str | os.PathLike):
            config = Config.read(config)
        elif isinstance(config, Mapping):
            config = Config.from_dict(config)
        elif not isinstance(config, Config):
            kind = type(config).__name__
            raise TypeError(f"config must be a Config, a mapping or a path, got {kind}.")
        if isinstance(train_env, str):
            config, train_env = config.replace(env=train_env), None
        self.train_env = config.make_env() if train_env is None else train_env
        self.agent: Any = config.make_agent(self.train_env)
        if train_env is not None:
            config = config.replace(**_settings_of(train_env, self.agent.env_name))
        self.test_env = as_eval_env(self.agent, test_env, "test_env")
        self.config = config.complete()
        if config.num_seeds > 1:
            seeds = range(config.seed, config.seed + config.num_seeds)
            self.agent = Sweep.create(self.agent, seeds=seeds)
        check_budget(self.agent, config.num_train_steps)
        count, num_actors = config.devices or 1, self.agent.num_actors
        if num_actors % count:
            raise ValueError(
                f"devices must divide num_actors = {num_actors}, got {count}. Use num_actors = "
                f"{count} (--num-actors {count}) or a multiple of it, or one of "
                f"{divisors(num_actors)} devices."
            )
        self.history = History()
        self._state: Any = None

    @property
    def out(self) -> Path | None:
        """The run's directory; None: nothing is written."""
        return None if self.config.out is None else Path(self.config.out)

    @property
    def state(self) -> Any:
        """The current TrainState: of the last `train` or `load`, at first that of step 0."""
        if self._state is None:
            with contextlib.closing(make_program(self.agent, None, "fast")) as program:
                self._state = program.init(self.config.seed)
        return self._state

    def act(self, actor: int = 0) -> Rollout:
        """What an actor collects next with the current params, leaves [T, B, ...].

        Nothing changes by looking: training goes on where it was. Of several seeds, the first
        acts. Host environments are opened anew for it.

        Args:
          actor: which one, from 0.
        """
        agent, state = self.agent, self.state
        if isinstance(agent, Sweep):
            agent, state = agent.member(0), jax.tree.map(lambda x: x[0], state)
        if not 0 <= actor < agent.num_actors:
            raise ValueError(f"actor must be from 0 to {agent.num_actors - 1}, got {actor}.")
        one = jax.tree.map(lambda x: x[actor], state.actors)
        if not agent.is_host:
            return jax.jit(agent.run)(state.learner, one)[1]
        with agent.env.make(agent.envs_per_actor) as envs:
            collector = HostCollector(envs, agent.policy, **agent.collect_options)
            params = agent.acting_params(state.learner)
            return collector.collect(params, collector.init(one.key), agent.num_steps)[1]

    def train(
        self,
        *,
        resume: bool = False,
        callbacks: Iterable[Callable[[Any], Any]] = (),
        progress: str | None = None,
        on_signal: Literal["exit", "return"] = "exit",
        own_process: bool = False,
    ) -> tuple[Any, History]:
        """Train as the config says.

        Args:
          resume: go on with the run in the config's `out`.
          callbacks: called with an `Event` after each row; a true result stops the run.
          progress: show it so, instead of as the config says.
          on_signal: as in `jaxroll.train.train`.
          own_process: as there.

        Returns:
          (state, history); of several seeds the state's leaves are [N, ...] and each row has a
          `seed`.
        """
        out, mesh = self.out, self.make_mesh()
        is_first = jax.process_index() == 0  # the others may find what it has written by now
        if is_first and not resume and out and (out / "config.toml").exists():
            raise FileExistsError(
                f"{out} holds a run already. Use train(resume=True) to go on with it, or another "
                "out."
            )
        options = {name: getattr(self.config, name) for name in fields_of(Options)}
        options["progress"] = progress or self.config.progress
        self._state, self.history = train_lib.train(
            self.agent,
            **options,
            mesh=mesh,
            checkpoint_dir=out,
            resume=resume,
            eval_env=self.test_env,
            callbacks=callbacks,
            config={"config": self.config.to_dict()},
            on_begin=lambda: out and self.config.write(out / "config.toml"),
            on_signal=on_signal,
            own_process=own_process,
        )
        return self._state, self.history

    def test(
        self, num_episodes: int | None = None, *, seed: int = 0, deterministic: bool = True
    ) -> dict[str, Any]:
        """Play whole episodes on the test environment with the current params.

        Args:
          num_episodes: None: the config's `num_test_episodes`.
          seed: of the episodes.
          deterministic: act with the distribution's mode.

        Returns:
          as `agent.eval`: `episode_return`, its deviation `episode_return_std` and `episode_length`
          over the episodes that ended, `num_unfinished`, and each episode's `episode_returns` and
          `episode_lengths`; of several seeds the mean over all episodes, with `seed_returns` for
          each and [N, episodes] arrays.
        """
        count = self.config.num_test_episodes if num_episodes is None else num_episodes
        options = {"seed": seed, "deterministic": deterministic, "env": self.test_env}
        result = train_lib.evaluate(self.agent, self.state, count, **options)
        if isinstance(self.agent, Sweep):
            names = ("episode_returns", "episode_lengths", "is_complete")
            means = train_lib.episode_means(*(result[name].reshape(-1) for name in names))
            result |= {"seed_returns": result["episode_return"], **means}
        return result

    def save(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Path:
        """Write the whole state to a directory of its own; where it is.

        Args:
          path: None: `model` in the run's directory, replaced if it is there.
          overwrite: whether to replace what an earlier `save` wrote to `path`.
        """
        target = self._run_path("save") / "model" if path is None else Path(path)
        train_lib.save(self.agent, self.state, target, overwrite=overwrite or path is None)
        return target

    def load(self, path: str | os.PathLike[str] | None = None, *, best: bool = False) -> Any:
        """Make what was saved the current state; the newest intact checkpoint of a run.

        Args:
          path: of `save`, or a run's directory; None: the config's `out`.
          best: take the run's best checkpoint, by `eval_episode_return`, instead of the newest.
        """
        source = self._run_path("load") if path is None else Path(path)
        source = train_lib.best_checkpoint(source) if best else source
        self._state = train_lib.load(self.agent, source)
        return self._state

    def check(self) -> None:
        """Raise for what only shows when a whole iteration is traced: no file is touched yet."""
        self.make_mesh()
        check_traces(self.agent)

    def make_mesh(self) -> Any:
        """The mesh that the config asks for, over all processes; None: one device."""
        if jax.process_count() > 1:
            return parallel.make_mesh()
        return None if self.config.devices is None else parallel.make_mesh(self.config.devices)

    def _run_path(self, method: str) -> Path:
        if self.out is None:
            raise ValueError(
                f"the config names no out, so {method} needs a path: "
                f'trainer.{method}("runs/first/model").'
            )
        return self.out


def _settings_of(env: Any, name: str) -> dict[str, Any]:
    """`env` and `env_options` of a config that makes this environment, or a mark that none does."""
    settings = getattr(env, "arguments", None)
    if settings is not None:
        try:
            config = Config(env=settings[0], env_options=settings[1])
            if Config.from_toml(config.to_toml()).make_env() == env:
                return {"env": config.env, "env_options": config.env_options}
        except (TypeError, ValueError):  # an option that a file cannot hold
            pass
    return {"env": GIVEN + name, "env_options": {}}
