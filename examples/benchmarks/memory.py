"""Storages and minibatches: what adding and shuffling cost, in time and in temporary memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Ratio, Row, Run, Settings, measure, measure_kernels
from jax import lax

from jaxroll.envs import make_env
from jaxroll.networks import make_policy
from jaxroll.storages import RolloutStorage, add_donated
from jaxroll.types import Transition

PyTree = Any

PUREJAXRL = "purejaxrl form"
PIXELS = (84, 84, 4)


def storage(settings: Settings) -> list[Row]:
    """`add` in a scan, and from Python."""
    small, pixels = (128, 64), (32, 8)
    if settings.quick:
        small, pixels = (8, 4), (2, 1)
    return [
        _add_in_rollout(small, settings),
        _add_in_scan("4 floats", small, (4,), np.float32, settings),
        _add_in_scan("84×84×4 uint8", pixels, PIXELS, np.uint8, settings),
        _add_from_python("4 floats", small, (4,), np.float32, settings),
        _add_from_python("84×84×4 uint8", (pixels[0], small[1]), PIXELS, np.uint8, settings),
    ]


def _add_in_rollout(shape: tuple[int, int], settings: Settings) -> Row:
    """A loop of one's own with an environment and a policy, as `add` is meant to be used."""
    num_steps, num_envs = shape
    env = make_env("CartPole-v1")
    policy = make_policy(env.observation_space, env.action_space)
    env_state, obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), num_envs))
    params = policy.init(jax.random.key(1), obs)
    start = (env_state, obs, jax.random.key(2))

    def step(state: Any) -> tuple[Any, Transition]:
        env_state, obs, key = state
        key, action_key, step_key = jax.random.split(key, 3)
        _, output = policy.apply(params, (), obs, jnp.zeros(num_envs, bool))
        action = output.distribution.sample(action_key)
        keys = jax.random.split(step_key, num_envs)
        env_state, time_step = jax.vmap(env.step)(keys, env_state, action)
        transition = Transition(
            obs=obs,
            action=action,
            reward=time_step.reward,
            terminated=time_step.terminated | time_step.truncated,
            log_prob=output.distribution.log_prob(action),
            value=output.value,
        )
        return (env_state, time_step.obs, key), transition

    def adding(carry: Any, _: Any) -> tuple[Any, None]:
        storage, state = carry
        state, transition = step(state)
        return (storage.add(transition), state), None

    example = jax.eval_shape(step, start)[1]

    @jax.jit
    def jaxroll(start: Any) -> PyTree:
        empty = RolloutStorage.create(example, num_steps)
        (storage, state), _ = lax.scan(adding, (empty, start), length=num_steps)
        return storage.data, state

    @jax.jit
    def stacking(start: Any) -> PyTree:
        state, data = lax.scan(lambda state, _: step(state), start, length=num_steps)
        return data, state

    contenders = {"jaxroll": lambda: jaxroll(start), "stacking": lambda: stacking(start)}
    ratios = [Ratio("jaxroll", "stacking", at_most=1.05)]
    case = f"add in a rollout of CartPole, {shape}"
    steps = num_steps * num_envs
    return measure("storage", case, contenders, ratios, settings, steps=steps)


def _add_in_scan(
    what: str, shape: tuple[int, int], obs_shape: tuple[int, ...], dtype: Any, settings: Settings
) -> Row:
    num_steps, num_envs = shape
    steps = _trajectory(shape, obs_shape, dtype)
    first = jax.tree.map(lambda x: x[0], steps)

    def produced(step: Transition) -> Transition:
        # Stands for an environment: every leaf is computed. What a scan only hands through it
        # does not stack at all.
        return jax.tree.map(lambda x: ~x if x.dtype == bool else x + jnp.ones((), x.dtype), step)

    def jaxroll(steps: Transition) -> PyTree:
        empty = RolloutStorage.create(first, num_steps)
        return lax.scan(lambda s, x: (s.add(produced(x)), None), empty, steps)[0].data

    def stacking(steps: Transition) -> PyTree:
        return lax.scan(lambda c, x: (c, produced(x)), (), steps)[1]

    functions: dict[str, Callable[..., PyTree]] = {"jaxroll": jaxroll, "stacking": stacking}
    try:
        import flashbax
    except ImportError:
        pass
    else:
        buffer = flashbax.make_trajectory_buffer(
            add_batch_size=num_envs,
            sample_batch_size=1,
            sample_sequence_length=1,
            period=1,
            min_length_time_axis=1,
            max_length_time_axis=num_steps,
        )

        def by_flashbax(steps: Transition) -> PyTree:
            def add(state: Any, step: Transition) -> tuple[Any, None]:
                rows = jax.tree.map(lambda x: x[:, None], produced(step))
                return buffer.add(state, rows), None

            empty = buffer.init(jax.tree.map(lambda x: x[0], first))
            return lax.scan(add, empty, steps)[0].experience

        functions["flashbax"] = by_flashbax
    ratios = [Ratio("jaxroll", "stacking", at_most=1.05), Ratio("flashbax", "jaxroll")]
    case = f"add in a scan and nothing else, {what}, {shape}"
    row = measure_kernels("storage", case, functions, (steps,), ratios, settings)
    row.temporary_bytes = {name: temporary_bytes(f, steps) for name, f in functions.items()}
    return row


def _add_from_python(
    what: str, shape: tuple[int, int], obs_shape: tuple[int, ...], dtype: Any, settings: Settings
) -> Row:
    num_steps, num_envs = shape
    on_device = jax.tree.map(lambda x: x[0], _trajectory((1, num_envs), obs_shape, dtype))
    on_host = jax.tree.map(np.array, on_device)
    rows = jax.tree.map(lambda x: np.zeros((num_steps, *x.shape), x.dtype), on_host)
    state = {"jaxroll": RolloutStorage.create(on_device, num_steps)}
    state["numpy in"] = jax.tree.map(jnp.array, state["jaxroll"])
    restart = jax.jit(lambda s: s.update(), donate_argnums=0)

    def adding(name: str, step: Transition) -> Run:
        def run() -> Any:
            storage = restart(state[name])
            for _ in range(num_steps):
                storage = add_donated(storage, step)
            state[name] = storage
            return storage

        return run

    def copying() -> None:
        for t in range(num_steps):
            for buffer, x in zip(jax.tree.leaves(rows), jax.tree.leaves(on_host)):
                buffer[t] = x

    contenders = {
        "jaxroll": adding("jaxroll", on_device),
        "jaxroll, numpy rows": adding("numpy in", on_host),
        "numpy copy": copying,
    }
    pixels = len(obs_shape) == 3
    ratios = [
        Ratio("jaxroll", "numpy copy", at_most=3 if pixels else None),
        Ratio("jaxroll, numpy rows", "numpy copy"),
    ]
    case = f"donated add from Python, {what}, {shape}"
    per_call = dict.fromkeys(contenders, float(num_steps))
    return measure("storage", case, contenders, ratios, settings, per_call=per_call)


def minibatches(settings: Settings) -> list[Row]:
    """One epoch: shuffle, split, and read every minibatch once."""
    cases: list[Any] = [
        ("4 floats", (128, 64), (4,), np.float32),
        ("4 floats", (128, 2048), (4,), np.float32),
        ("84×84×4 uint8", (128, 8), PIXELS, np.uint8),
    ]
    if settings.quick:
        cases = [("4 floats", (8, 4), (4,), np.float32)]
    return [_epoch(what, shape, obs, dtype, settings) for what, shape, obs, dtype in cases]


def _epoch(
    what: str, shape: tuple[int, int], obs_shape: tuple[int, ...], dtype: Any, settings: Settings
) -> Row:
    num_steps, num_envs = shape
    size, count = num_steps * num_envs, 4
    steps = _trajectory(shape, obs_shape, dtype)
    full = RolloutStorage.create(jax.tree.map(lambda x: x[0], steps), num_steps)
    full = full.insert_data_slice(steps).before_gradients(jnp.zeros(num_envs))
    data = (full.data, full.targets)
    key = jax.random.key(0)

    def read(total: Any, batch: PyTree) -> tuple[Any, None]:
        """Every number of the minibatch is read once, as a learner would."""
        sums = [jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(batch)]
        return total + sum(sums[1:], sums[0]), None

    def jaxroll(key: Any, data: PyTree) -> Any:
        stored = full.replace(data=data[0], targets=data[1])
        batches = stored.generate_batches(key, num_mini_batch=count)
        return batches.scan(lambda t, b: read(t, (b.transition, b.targets)), jnp.zeros(()))[0]

    def purejaxrl(key: Any, data: PyTree) -> Any:
        order = jax.random.permutation(key, size)
        flat = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), data)
        shuffled = jax.tree.map(lambda x: jnp.take(x, order, axis=0), flat)
        batches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), shuffled)
        return lax.scan(read, jnp.zeros(()), batches)[0]

    functions: dict[str, Callable[..., PyTree]] = {"jaxroll": jaxroll, PUREJAXRL: purejaxrl}
    notes = []
    try:
        import flashbax
    except ImportError:
        pass
    else:
        functions["flashbax"] = _flashbax_epoch(flashbax, data, size, count, read)
        notes.append("flashbax's item buffer draws with replacement: its epoch is no permutation")
    pixels = len(obs_shape) == 3
    ratios = [
        Ratio(PUREJAXRL, "jaxroll", at_least=2 if pixels else 4),
        Ratio("flashbax", "jaxroll"),
        Ratio("stable-baselines3", "jaxroll"),
    ]
    case = f"epoch, {what}, {shape}"
    inputs = (key, data)
    row = measure_kernels("minibatches", case, functions, inputs, ratios, settings, notes=notes)
    row.temporary_bytes = {name: temporary_bytes(f, *inputs) for name, f in functions.items()}
    if not pixels:
        _add_stable_baselines(row, shape, count, repeated_run(jaxroll, inputs), settings)
    return row


def repeated_run(function: Callable[..., PyTree], inputs: tuple) -> Run:
    """A compiled function as a contender of its own."""
    compiled = jax.jit(function)
    return lambda: compiled(*inputs)


def _flashbax_epoch(
    flashbax: Any, data: PyTree, size: int, count: int, read: Any
) -> Callable[..., PyTree]:
    buffer = flashbax.make_item_buffer(
        max_length=size,
        min_length=1,
        sample_batch_size=size // count,
        add_sequences=True,
    )

    def epoch(key: Any, data: PyTree) -> Any:
        flat = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), data)
        state = buffer.init(jax.tree.map(lambda x: x[0], flat))
        state = state.replace(
            experience=jax.tree.map(lambda x: x[None], flat),
            is_full=jnp.ones_like(state.is_full),
        )

        def one(total: Any, key: Any) -> tuple[Any, None]:
            return read(total, buffer.sample(state, key).experience)

        return lax.scan(one, jnp.zeros(()), jax.random.split(key, count))[0]

    return epoch


def _add_stable_baselines(
    row: Row, shape: tuple[int, int], count: int, ours: Run, settings: Settings
) -> None:
    """Stable-Baselines3's generator beside ours, each called from Python."""
    try:
        import gymnasium
        from stable_baselines3.common.buffers import RolloutBuffer
    except ImportError:
        row.notes.append("stable-baselines3 is not installed: its generator is not timed")
        return
    num_steps, num_envs = shape
    space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    buffer = RolloutBuffer(
        num_steps, space, gymnasium.spaces.Discrete(2), device="cpu", n_envs=num_envs
    )
    buffer.full = True

    def run() -> float:
        # The first call of a rollout also flattens it; ours starts from the rollout too.
        buffer.generator_ready = True
        return sum(float(b.observations.sum()) for b in buffer.get(num_steps * num_envs // count))

    buffer.generator_ready = False
    next(iter(buffer.get(num_steps * num_envs // count)))
    ratios = [Ratio("stable-baselines3", "jaxroll, from Python")]
    extra = measure(
        row.section,
        row.case,
        {"jaxroll, from Python": ours, "stable-baselines3": run},
        ratios,
        settings,
    )
    row.times |= extra.times
    row.first_calls |= extra.first_calls
    row.ratios += extra.ratios


def temporary_bytes(function: Callable[..., PyTree], *inputs: PyTree) -> int:
    """What a compiled program allocates beside its inputs and outputs; −1 if it does not tell."""
    analysis = jax.jit(function).lower(*inputs).compile().memory_analysis()
    return int(getattr(analysis, "temp_size_in_bytes", -1))


def _trajectory(shape: tuple[int, int], obs_shape: tuple[int, ...], dtype: Any) -> Transition:
    rng = np.random.default_rng(0)
    if np.dtype(dtype) == np.uint8:
        obs = rng.integers(0, 255, (*shape, *obs_shape), np.uint8)
    else:
        obs = rng.normal(size=(*shape, *obs_shape)).astype(dtype)
    normal = lambda: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(
        jnp.asarray,
        Transition(
            obs=obs,
            action=rng.integers(0, 2, shape, np.int32),
            reward=normal(),
            terminated=rng.random(shape) < 0.05,
            log_prob=normal(),
            value=normal(),
        ),
    )
