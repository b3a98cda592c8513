"""Environments that hang: an error after a deadline, and signals that still act."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import gymnasium
import numpy as np
import pytest

from jaxroll.envs import VectorHostEnv, from_gymnasium, make_env
from jaxroll.envs.deadline import Deadline
from tests.envs.scripted import ScriptedGym, ScriptedVector

SAME_STEP = gymnasium.vector.AutoresetMode.SAME_STEP


class Hanging(ScriptedGym):
    """Does not return from its second step (or its first reset)."""

    def __init__(self, where="step"):
        super().__init__()
        self.where = where

    def reset(self, **options):
        if self.where == "reset":
            time.sleep(60)
        return super().reset(**options)

    def step(self, action):
        while self.where == "step" and self.total == 1:
            try:
                time.sleep(0.01)
            except Exception:  # what an environment catches must not keep it alive
                continue
        return super().step(action)


def sync(*envs):
    return gymnasium.vector.SyncVectorEnv([lambda e=e: e for e in envs], autoreset_mode=SAME_STEP)


def test_a_step_that_hangs_raises_with_the_index_of_the_environment():
    envs = VectorHostEnv(sync(ScriptedGym(), Hanging(), ScriptedGym()), env_timeout=0.2)
    envs.reset(seed=0)
    envs.step(np.zeros(3, np.int32))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"environment 1 of the 3 .* env_timeout = 0.2 seconds"):
        envs.step(np.zeros(3, np.int32))
    assert time.monotonic() - began < 5
    with pytest.raises(RuntimeError, match="closed"):
        envs.step(np.zeros(3, np.int32))


def test_a_reset_that_hangs_raises():
    envs = VectorHostEnv(sync(ScriptedGym(), Hanging("reset")), env_timeout=0.2)
    with pytest.raises(TimeoutError, match="environment 1 of the 2"):
        envs.reset(seed=0)


def test_a_vector_environment_that_hangs_in_another_thread_raises():
    class Slow(ScriptedVector):
        def step(self, actions):
            while True:
                time.sleep(0.01)

    errors = []

    def run():
        envs = VectorHostEnv(Slow(2, "SameStep"), env_timeout=0.2)
        envs.reset(seed=0)
        try:
            envs.step(np.zeros(2, np.int32))
        except TimeoutError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert len(errors) == 1
    assert "one of the 2 environments" in errors[0]


@pytest.mark.slow
def test_a_worker_process_that_hangs_raises_with_its_index_and_is_ended():
    factories = [ScriptedGym, Hanging, ScriptedGym]
    vector = gymnasium.vector.AsyncVectorEnv(
        factories, context="forkserver", autoreset_mode=SAME_STEP
    )
    envs = VectorHostEnv(vector, env_timeout=2.0)
    envs.reset(seed=0)
    envs.step(np.zeros(3, np.int32))
    with pytest.raises(TimeoutError, match="environment 1 of the 3"):
        envs.step(np.zeros(3, np.int32))
    assert not any(process.is_alive() for process in vector.processes)


def test_calls_within_the_deadline_are_left_alone():
    deadline = Deadline(0.05, lambda: "nothing")
    for _ in range(3):
        with deadline:
            pass
        time.sleep(0.2)  # between calls any time may pass


@pytest.mark.parametrize("value", [0, -1.0, "10", float("nan"), True])
def test_a_timeout_that_cannot_be_meant_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="env_timeout"):
        make_env("gymnasium:CartPole-v1", env_timeout=value)


def test_the_timeout_is_part_of_the_arguments_where_it_is_not_the_default():
    spec = make_env("gymnasium:CartPole-v1", env_timeout=7.0)
    assert make_env(spec.arguments[0], **spec.arguments[1]) == spec
    assert "env_timeout" not in make_env("gymnasium:CartPole-v1").arguments[1]
    assert from_gymnasium(sync, env_timeout=None).env_timeout is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Sync", "Async"])
@pytest.mark.parametrize("in_eval", [False, True])
def test_a_signal_while_an_environment_hangs_ends_a_script_within_seconds(kind, in_eval, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import time, gymnasium, jaxroll
        from gymnasium.vector import AutoresetMode, {kind}VectorEnv

        class Hangs(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 1, (2,))
            action_space = gymnasium.spaces.Discrete(2)
            steps, hangs_after = 0, {3 if in_eval else 40}
            def reset(self, *, seed=None, options=None):
                return self.observation_space.low, {{}}
            def step(self, action):
                self.steps += 1
                if self.steps > self.hangs_after:
                    print("hangs", flush=True)
                    time.sleep(600)
                return self.observation_space.low, 1.0, False, self.steps % 5 == 0, {{}}

        class Works(Hangs):
            hangs_after = 10**9

        def make(num_envs, cls=Hangs):
            options = dict(context="forkserver") if {kind == "Async"} else {{}}
            return {kind}VectorEnv(
                [cls] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **options)

        if __name__ == "__main__":
            evaluation = dict(eval_env=make, eval_interval=16, num_eval_episodes=2)
            ppo = jaxroll.PPO.create(
                (lambda num_envs: make(num_envs, Works)) if {in_eval} else make,
                num_envs=2, num_steps=8, num_mini_batch=1, hidden_sizes=(4,))
            options = dict(progress="silent", log_interval=16)
            ppo.train(10_000, **options, **(evaluation if {in_eval} else {{}}))
        """)
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        assert process.stdout.readline().startswith("hangs")  # two workers may write at once
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
