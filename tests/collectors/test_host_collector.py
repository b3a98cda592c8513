"""Rows from host environments equal those of an environment stepped by hand."""

import dataclasses
import gc
import tracemalloc

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from jaxroll.collectors.callback import CallbackEnv
from jaxroll.collectors.host import HostCollector
from jaxroll.distributions import Categorical
from jaxroll.envs import HostEnv, HostStep, VectorHostEnv, make_env
from jaxroll.networks import ActorCriticPolicy, make_policy
from jaxroll.types import PolicyOutput
from tests.envs.scripted import NUM_ACTIONS, ScriptedGym, ScriptedVector, hand_stepped

MODES = ("SameStep", "NextStep", "Disabled")


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """The carry sums what it saw since the episode began; V = w · carry + 1."""

    def initial_carry(self, batch_size):
        return {"sum": jnp.zeros(batch_size)}

    def apply(self, params, carry, obs, is_first):
        total = jnp.where(is_first, 0.0, carry["sum"]) + obs.sum(-1)
        logits = jnp.zeros((len(total), NUM_ACTIONS))
        extras = {"seen": total}
        return {"sum": total}, PolicyOutput(Categorical(logits), params["w"] * total + 1, extras)

    def value(self, params, carry, obs, is_first):
        return self.apply(params, carry, obs, is_first)[1].value


PARAMS = {"w": jnp.float32(0.5)}


def scripted(kind, mode, num_envs):
    if kind == "own":
        return VectorHostEnv(ScriptedVector(num_envs, mode))
    envs = SyncVectorEnv([ScriptedGym] * num_envs, autoreset_mode=AutoresetMode(mode))
    return VectorHostEnv(envs)


def concatenated(rollouts):
    return jax.tree.map(lambda *x: np.concatenate(x), *(r.transition for r in rollouts))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["sync", "own"])
def test_rows_equal_an_environment_stepped_by_hand(kind, mode):
    num_envs, num_steps, next_step = 4, 9, mode == "NextStep"
    collector = HostCollector(scripted(kind, mode, num_envs), Recurrent(), sequence_length=3)
    actor = collector.init(jax.random.key(3))
    first = np.asarray(actor.obs[:, 0]).astype(int)
    rollouts = []
    for _ in range(3):  # rollouts go on where the last one stopped, ends at their border included
        actor, rollout = collector.collect(PARAMS, actor, num_steps)
        rollouts.append(rollout)
    rows = concatenated(rollouts)
    total = 3 * num_steps
    num_episodes, return_sum, length_sum = 0, 0.0, 0
    for b in range(num_envs):
        hand = hand_stepped(first[b], rows.action[:, b], next_step)
        for name in ("obs", "reward", "terminated", "truncated", "is_first"):
            np.testing.assert_array_equal(getattr(rows, name)[:, b], hand[name], err_msg=name)
        if next_step:
            np.testing.assert_array_equal(rows.valid[:, b], hand["valid"])
        else:
            assert rows.valid is None
        carry, running, length = 0.0, 0.0, 0
        for t in range(total):
            if t % 3 == 0:
                kept = rollouts[t // num_steps].initial_carry["sum"][t % num_steps // 3, b]
                assert kept == pytest.approx(carry)
            carry = (0.0 if hand["is_first"][t] else carry) + hand["obs"][t].sum()
            assert rows.value[t, b] == pytest.approx(0.5 * carry + 1)
            assert rows.extras["seen"][t, b] == pytest.approx(carry)
            cut = hand["truncated"][t] and not hand["terminated"][t]
            expected = 0.5 * (carry + hand["final_obs"][t].sum()) + 1 if cut else 0.0
            assert rows.bootstrap_value[t, b] == pytest.approx(expected)
            running, length = running + hand["reward"][t], length + int(hand["valid"][t])
            if hand["terminated"][t] or hand["truncated"][t]:
                num_episodes, return_sum = num_episodes + 1, return_sum + running
                length_sum, running, length = length_sum + length, 0.0, 0
        np.testing.assert_array_equal(actor.obs[b], hand["last_obs"])
        assert actor.is_first[b] == hand["last_is_first"]
        carry = (0.0 if hand["last_is_first"] else carry) + hand["last_obs"].sum()
        assert rollouts[-1].last_value[b] == pytest.approx(0.5 * carry + 1)
        assert actor.statistics.episode_return[b] == pytest.approx(running)
        assert actor.statistics.episode_length[b] == length
    assert rows.truncated.any()
    assert (rows.terminated & rows.truncated).any()
    assert sum(int(r.episodes.count) for r in rollouts) == num_episodes
    assert sum(int(r.episodes.length_sum) for r in rollouts) == length_sum
    assert sum(float(r.episodes.return_sum) for r in rollouts) == pytest.approx(return_sum)


@pytest.mark.parametrize("mode", MODES)
def test_max_truncations_hold_the_first_truncated_steps_and_count_the_rest(mode):
    collector = HostCollector(
        scripted("sync", mode, 5), Recurrent(), max_truncations=2, bootstrap=False
    )
    actor = collector.init(jax.random.key(0))
    first = np.asarray(actor.obs[:, 0]).astype(int)
    _, rollout = collector.collect(PARAMS, actor, 30)
    final, overflow = rollout.final, 0
    for b in range(5):
        hand = hand_stepped(first[b], rollout.transition.action[:, b], mode == "NextStep")
        steps = np.flatnonzero(hand["truncated"] & ~hand["terminated"])
        overflow += len(steps) - 2
        np.testing.assert_array_equal(final.step[:, b], steps[:2])
        np.testing.assert_array_equal(final.obs[:, b], hand["final_obs"][steps[:2]])
        np.testing.assert_allclose(
            final.carry["sum"][:, b], rollout.transition.extras["seen"][steps[:2], b]
        )
    assert overflow > 0
    assert int(final.overflow) == overflow


def test_without_bootstrap_truncated_steps_have_their_own_value():
    collector = HostCollector(scripted("sync", "SameStep", 3), Recurrent(), bootstrap=False)
    _, rollout = collector.collect(PARAMS, collector.init(jax.random.key(0)), 12)
    rows = rollout.transition
    cut = np.asarray(rows.truncated & ~rows.terminated)
    assert cut.any()
    np.testing.assert_array_equal(rows.bootstrap_value, np.where(cut, rows.value, 0))


def test_host_and_device_collectors_return_the_same_tree():
    from jaxroll.collectors.rollout import collect, init_actor
    from jaxroll.envs import autoreset
    from tests.envs.scripted import ScriptedJax

    env = autoreset(ScriptedJax())
    device = init_actor(env, Recurrent(), jax.random.key(0), 4)
    after, expected = collect(env, Recurrent(), PARAMS, device, 6, sequence_length=3)
    collector = HostCollector(scripted("sync", "SameStep", 4), Recurrent(), sequence_length=3)
    actor, rollout = collector.collect(PARAMS, collector.init(jax.random.key(0)), 6)
    after, actor = after.replace(env=None), actor.replace(env=None)
    for ours, theirs in ((rollout, expected), (actor, after)):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        jax.tree_util.tree_map_with_path(
            lambda path, x, y: (
                (x.shape, x.dtype, path) == (y.shape, y.dtype, path)
                or pytest.fail(f"{path}: {x.dtype}{x.shape} and {y.dtype}{y.shape}")
            ),
            ours,
            theirs,
        )
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(ours))


def test_rollouts_can_be_donated_and_are_not_changed_by_the_next():
    collector = HostCollector(scripted("own", "NextStep", 3), Recurrent())
    actor, first = collector.collect(PARAMS, collector.init(jax.random.key(0)), 5)
    before = jax.tree.map(np.array, first)
    kept_obs = np.array(actor.obs)
    obs = actor.obs
    actor, second = collector.collect(PARAMS, actor, 5)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, first))
    np.testing.assert_array_equal(obs, kept_obs)
    double = jax.jit(lambda r: jax.tree.map(lambda x: x * 2, r), donate_argnums=0)
    expected = 2 * np.array(second.transition.reward)
    np.testing.assert_array_equal(double(second.transition.reward), expected)
    collector.collect(PARAMS, actor, 5)


def test_same_key_gives_the_same_rollout_and_another_key_another():
    def rollout(seed):
        with make_env("gymnasium:CartPole-v1").make(6) as envs:
            collector = HostCollector(envs, Cart())
            actor, _ = collector.collect((), collector.init(jax.random.key(seed)), 20)
            return collector.collect((), actor, 20)[1]

    one, again, other = rollout(0), rollout(0), rollout(1)
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert not np.array_equal(one.transition.obs, other.transition.obs)


@dataclasses.dataclass(frozen=True)
class Cart:
    def initial_carry(self, batch_size):
        return ()

    def apply(self, params, carry, obs, is_first):
        logits = jnp.zeros((len(obs), 2))
        return carry, PolicyOutput(Categorical(logits), obs.sum(-1))

    def value(self, params, carry, obs, is_first):
        return obs.sum(-1)


def test_one_compilation_serves_every_rollout_and_every_equal_collector():
    traces = []

    @dataclasses.dataclass(frozen=True)
    class Counting(Cart):
        def apply(self, params, carry, obs, is_first):
            traces.append(obs.shape)
            return super().apply(params, carry, obs, is_first)

    for _ in range(2):
        with make_env("gymnasium:CartPole-v1").make(2) as envs:
            collector = HostCollector(envs, Counting())
            actor = collector.init(jax.random.key(0))
            for _ in range(3):
                actor, _ = collector.collect((), actor, 8)
    assert len(traces) == 3  # for the shapes of the noise and of the rows, and for the step


@pytest.mark.parametrize("mode", MODES)
def test_values_after_the_loop_equal_those_within_the_step(mode):
    class InStep(ActorCriticPolicy):
        has_separate_value = False

    def collected(kind):
        envs = scripted("own", mode, 3)
        policy = make_policy(envs.observation_space, envs.action_space, hidden_sizes=(8,))
        assert policy.has_separate_value
        if kind is InStep:
            policy = InStep(policy.architecture, policy.shared_torso)
        collector = HostCollector(envs, policy)
        actor = collector.init(jax.random.key(1))
        return collector.collect(policy.init(jax.random.key(2), actor.obs), actor, 14)[1]

    after, within = collected(ActorCriticPolicy), collected(InStep)
    assert bool(after.transition.truncated.any())
    np.testing.assert_array_equal(after.transition.action, within.transition.action)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), after, within)


def test_an_exception_of_an_environment_surfaces_and_the_others_are_closed():
    single = [ScriptedGym(), ScriptedGym(fail_at=4), ScriptedGym()]
    envs = VectorHostEnv(SyncVectorEnv([lambda e=e: e for e in single]))
    collector = HostCollector(envs, Recurrent())
    actor = collector.init(jax.random.key(0))
    with pytest.raises(ZeroDivisionError, match="the scripted failure") as caught:
        collector.collect(PARAMS, actor, 20)
    assert any("scripted" in str(entry.path) for entry in caught.traceback)
    assert all(env.closed for env in single)
    with pytest.raises(RuntimeError, match="closed"):
        collector.init(jax.random.key(0))


def test_an_outdated_actor_state_is_refused_and_restart_goes_on():
    collector = HostCollector(scripted("sync", "SameStep", 2), Recurrent())
    old = collector.init(jax.random.key(0))
    actor, _ = collector.collect(PARAMS, old, 4)
    with pytest.raises(ValueError, match="taken 4 steps, but the actor state is from after 0"):
        collector.collect(PARAMS, old, 4)
    fresh = HostCollector(scripted("sync", "SameStep", 2), Recurrent())
    with pytest.raises(ValueError, match="not been reset"):
        fresh.collect(PARAMS, actor, 4)
    restarted = fresh.restart(actor)
    assert bool(restarted.is_first.all())
    assert int(restarted.num_rollouts) == 1
    after, _ = fresh.collect(PARAMS, restarted, 4)
    assert int(after.num_rollouts) == 2


@pytest.mark.parametrize(
    ("settings", "num_steps", "message"),
    [
        ({"sequence_length": 4}, 6, "sequence_length must divide num_steps = 6, got 4"),
        ({}, 0, "num_steps must be at least 1"),
    ],
)
def test_wrong_sizes_are_refused(settings, num_steps, message):
    collector = HostCollector(scripted("sync", "SameStep", 2), Recurrent(), **settings)
    with pytest.raises(ValueError, match=message):
        collector.collect(PARAMS, collector.init(jax.random.key(0)), num_steps)


def test_a_spec_is_not_an_open_environment():
    with pytest.raises(TypeError, match=r"spec\.make"):
        HostCollector(make_env("gymnasium:CartPole-v1"), Cart())  # pyright: ignore


def test_dict_observations_are_collected():
    class DictEnv(ScriptedGym):
        observation_space = gymnasium.spaces.Dict(
            {"where": ScriptedGym.observation_space, "kind": gymnasium.spaces.Discrete(9, start=1)}
        )

        def observe(self):
            return {"where": super().observe(), "kind": self.episode + 1}

    @dataclasses.dataclass(frozen=True)
    class OnWhere(Recurrent):
        def apply(self, params, carry, obs, is_first):
            return super().apply(params, carry, obs["where"], is_first)

    for mode in MODES:
        envs = SyncVectorEnv([DictEnv] * 3, autoreset_mode=AutoresetMode(mode))
        collector = HostCollector(VectorHostEnv(envs), OnWhere())
        _, rollout = collector.collect(PARAMS, collector.init(jax.random.key(1)), 14)
        rows = rollout.transition
        assert rows.obs["where"].dtype == np.float32
        assert rows.obs["kind"].dtype == np.int32
        np.testing.assert_array_equal(rows.obs["kind"], rows.obs["where"][..., 0])
        final = rollout.final
        used = np.asarray(final.step) < 14
        assert used.any()
        np.testing.assert_array_equal(final.obs["kind"][used], final.obs["where"][used][:, 0])


# The io_callback form


def test_callback_steps_equal_direct_steps():
    direct = scripted("sync", "SameStep", 3)
    obs = direct.reset(seed=2)
    expected = [direct.step(np.full(3, t % NUM_ACTIONS)) for t in range(12)]
    with CallbackEnv(scripted("sync", "SameStep", 3)) as envs:
        token, first = envs.reset(seed=2)
        np.testing.assert_array_equal(first, obs)

        @jax.jit
        def program(token):
            def step(token, t):
                return envs.step(token, jnp.full(3, t % NUM_ACTIONS))

            return jax.lax.scan(step, token, jnp.arange(12))

        token, steps = program(token)
    assert int(token) == 12
    assert isinstance(steps, HostStep)
    for t, step in enumerate(expected):
        final = step.obs if step.final_obs is None else step.final_obs
        for ours, theirs in zip(steps, step._replace(final_obs=final)):
            np.testing.assert_array_equal(ours[t], theirs)


def failing_callback_env():
    single = [ScriptedGym(), ScriptedGym(fail_at=4)]
    vector = SyncVectorEnv([lambda e=e: e for e in single], autoreset_mode=AutoresetMode.SAME_STEP)
    return CallbackEnv(VectorHostEnv(vector))


def run_program(envs, token, length):
    def step(token, _):
        token, step = envs.step(token, jnp.zeros(2, jnp.int32))
        return token, step.reward

    return jax.jit(lambda token: jax.lax.scan(step, token, length=length))(token)


def test_callback_keeps_the_exception_and_the_program_runs_to_its_end():
    envs = failing_callback_env()
    token, _ = envs.reset(seed=0)
    token, rewards = run_program(envs, token, 10)
    assert int(token) == 10
    np.testing.assert_array_equal(rewards[4:], np.broadcast_to(rewards[3], (6, 2)))
    with pytest.raises(RuntimeError, match="inside a jitted program") as caught:
        envs.check()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    envs.check()  # told once


def test_callback_raises_on_leaving_the_with_block():
    def within_block():
        with failing_callback_env() as envs:
            run_program(envs, envs.reset(seed=0)[0], 10)

    with pytest.raises(RuntimeError, match="inside a jitted program"):
        within_block()


def test_callback_works_on_a_mesh_program_beside_collectives():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    envs = failing_callback_env()
    token, _ = envs.reset(seed=0)

    def program(token):
        token, rewards = run_program(envs, token, 10)
        shards = jax.shard_map(
            lambda x: jax.lax.psum(x, "d"),
            mesh=mesh,
            in_specs=jax.P("d"),
            out_specs=jax.P(),
        )(rewards[:, 0])
        return token, shards

    jax.block_until_ready(jax.jit(program)(token))
    with pytest.raises(RuntimeError, match="inside a jitted program"):
        envs.check()


def test_callback_refuses_a_token_that_is_not_the_last():
    envs = CallbackEnv(scripted("sync", "SameStep", 2))
    token, _ = envs.reset(seed=0)
    run_program(envs, token, 3)
    run_program(envs, token, 3)
    with pytest.raises(RuntimeError) as caught:
        envs.check()
    assert "the last step returned, 3, got 0" in str(caught.value.__cause__)


def test_host_env_is_abstract():
    with pytest.raises(TypeError):
        HostEnv()  # pyright: ignore


def test_memory_does_not_grow_with_the_number_of_rollouts():
    """Neither what is on the device nor, as numpy allocates it, what is on the host."""

    def held():
        gc.collect()
        return len(jax.live_arrays()), tracemalloc.get_traced_memory()[0]

    with scripted("sync", "NextStep", 4) as envs:
        collector = HostCollector(envs, Recurrent())
        actor = collector.init(jax.random.key(0))
        tracemalloc.start()
        try:
            for i in range(22):
                actor, rollout = collector.collect(PARAMS, actor, 256)
                jax.block_until_ready(rollout)
                if i == 1:
                    before = held()
            after = held()
        finally:
            tracemalloc.stop()
    assert after[0] == before[0]
    rollout_bytes = sum(x.nbytes for x in jax.tree.leaves(rollout.transition))
    assert after[1] - before[1] < rollout_bytes, "of twenty"


def test_observations_go_to_the_device_once_and_only_actions_come_back():
    with make_env("gymnasium:CartPole-v1").make(3) as envs:
        collector = HostCollector(envs, Cart())
        programs, uploads, finished = collector._programs, [], []

        def act(leaves_value, params, written, *rest):
            uploads.append([x.nbytes for x in jax.tree.leaves(rest) if type(x) is np.ndarray])
            out = programs.act(leaves_value, params, written, *rest)
            assert all(x.is_deleted() for x in jax.tree.leaves(written))  # written in place
            return out

        def finish(*args):
            finished.extend(x.nbytes for x in jax.tree.leaves(args) if type(x) is np.ndarray)
            return programs.finish(*args)

        collector._programs = programs._replace(act=act, finish=finish)
        actor, _ = collector.collect((), collector.init(jax.random.key(0)), 16)
        obs, flags = 3 * 4 * 4, 3
        assert uploads == [[flags], *[[obs, flags]] * 15]  # the first ones are there already
        assert max(finished) < 16 * obs
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(actor.obs))
