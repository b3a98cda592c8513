"""One update of each agent equals an independent computation on the same rollout."""

import dataclasses
import itertools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxroll import PPO, PolicyOutput, RolloutStorage, Transition, autoreset, spaces
from jaxroll.distributions import Categorical
from jaxroll.estimators import normalize
from jaxroll.metrics import compute
from jaxroll.networks import FunctionPolicy
from tests.agents.agent_toys import (
    DRIFT,
    AnySpaces,
    Drift,
    init,
    run_actors,
    small,
    train_step,
    update,
)
from tests.tiers import plain

KEY = jax.random.key(0)
CLOSE = {"rtol": 2e-4, "atol": 2e-6}


def rollout_of(agent, seed=0):
    """(state after the actors ran, one actor's rollout without the actor axis)."""
    return run_actors(agent, init(agent, jax.random.key(seed)))


def numpy_gae(agent, rollout):
    """Advantages and returns by a loop in float64."""
    step = jax.tree.map(lambda x: np.asarray(x[0], np.float64), rollout.transition)
    last = np.asarray(rollout.last_value[0], np.float64)
    gamma, lam = float(agent.discount), float(agent.gae_lambda)
    terminated, truncated = step.terminated > 0, step.truncated > 0
    advantages = np.zeros_like(step.reward)
    following = np.zeros_like(last)
    for t in reversed(range(len(step.reward))):
        after = last if t == len(step.reward) - 1 else step.value[t + 1]
        after = np.where(truncated[t], step.bootstrap_value[t], after)
        after = np.where(terminated[t], 0, after)
        following = np.where(terminated[t] | truncated[t], 0, following)
        following = step.reward[t] + gamma * after - step.value[t] + gamma * lam * following
        advantages[t] = following
    return advantages, advantages + step.value


def policy_rows(agent, params, rollout):
    """(log-probabilities, entropies, values), [N], by the plainest route: log-softmax by hand."""
    step = jax.tree.map(lambda x: x[0].reshape(-1, *x.shape[3:]), rollout.transition)
    _, output = agent.policy.apply(params, (), step.obs, step.is_first)
    logits = jax.nn.log_softmax(output.distribution.logits)
    log_prob = jnp.take_along_axis(logits, step.action[:, None], 1)[:, 0]
    return log_prob, -jnp.sum(jnp.exp(logits) * logits, 1), output, step


def flat(x):
    return jnp.asarray(np.asarray(x, np.float32).reshape(-1))


def normalized(x):
    return (x - x.mean()) / (x.std() + 1e-8)


def adam(agent, learning_rate):
    return optax.chain(
        optax.clip_by_global_norm(float(agent.max_grad_norm)),
        optax.adam(learning_rate, eps=float(agent.adam_epsilon)),
    )


def stepped(agent, loss, params, learning_rate):
    """Params after one Adam step on the gradient of `loss`, and the gradient's norm."""
    grads = jax.jit(jax.grad(loss))(params)
    optimizer = adam(agent, learning_rate)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates), optax.global_norm(grads)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **CLOSE), a, b)


@pytest.mark.parametrize("mode", ["minibatch", "rollout", None])
def test_ppo_update_equals_one_written_by_hand(mode):
    agent = small(
        "ppo", DRIFT, num_mini_batch=1, num_epochs=1, normalize_advantage=mode, max_grad_norm=0.1
    )
    state, rollouts = rollout_of(agent)
    assert rollouts.transition.truncated.any()
    assert rollouts.transition.terminated.any()
    after, metrics = update(agent, state, rollouts)
    advantages, returns = numpy_gae(agent, rollouts)
    if mode:
        advantages = normalized(advantages)

    def loss(params):
        log_prob, entropy, output, step = policy_rows(agent, params, rollouts)
        ratio, a = jnp.exp(log_prob - step.log_prob), flat(advantages)
        policy = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        value = 0.5 * jnp.square(output.value - flat(returns))
        return jnp.mean(policy + 0.5 * value - 0.01 * entropy)

    params, norm = stepped(agent, loss, state.learner.params, float(agent.learning_rate))
    close(after.learner.params, params)
    np.testing.assert_allclose(metrics["grad_norm"].result(), norm, rtol=1e-4)
    assert norm > 0.1  # so the clip was at work
    np.testing.assert_allclose(metrics["loss"].result(), loss(state.learner.params), **CLOSE)


def test_ppo_clips_ratio_and_value_of_params_that_moved():
    agent = small("ppo", DRIFT, num_mini_batch=1, clip_value=True)
    state, rollouts = rollout_of(agent)
    storage = agent.fill(jax.tree.map(lambda x: x[0], rollouts))
    batch = storage.minibatch(
        jax.tree.map(lambda x: x[0], storage.plan(None, num_mini_batch=1, shuffle=False))
    )
    batch = agent.prepare(batch)
    moved = jax.tree.map(
        lambda x: x + 0.5 * jax.random.normal(jax.random.key(7), x.shape), state.learner.params
    )
    advantages, returns = numpy_gae(agent, rollouts)

    def loss(params):
        log_prob, entropy, output, step = policy_rows(agent, params, rollouts)
        ratio, a, r = jnp.exp(log_prob - step.log_prob), flat(normalized(advantages)), flat(returns)
        policy = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        kept = step.value + jnp.clip(output.value - step.value, -0.2, 0.2)
        value = 0.5 * jnp.maximum(jnp.square(output.value - r), jnp.square(kept - r))
        return jnp.sum(policy + 0.5 * value - 0.01 * entropy)

    value, grads = jax.value_and_grad(lambda p: agent.loss(p, batch)[0])(moved)
    expected, expected_grads = jax.value_and_grad(loss)(moved)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), grads, expected_grads
    )
    _, weight, metrics = agent.loss(moved, batch)
    assert weight == 32
    assert 0 < metrics["clip_fraction"].result() < 1


def test_a2c_update_equals_one_written_by_hand():
    agent = small("a2c", DRIFT, num_steps=8)
    state, rollouts = rollout_of(agent)
    after, metrics = update(agent, state, rollouts)
    advantages, returns = numpy_gae(agent, rollouts)
    if agent.normalize_advantage:
        advantages = normalized(advantages)

    def loss(params):
        log_prob, entropy, output, _ = policy_rows(agent, params, rollouts)
        value = 0.5 * jnp.square(output.value - flat(returns))
        coefs = float(agent.value_coef), float(agent.entropy_coef)
        return jnp.mean(-log_prob * flat(advantages) + coefs[0] * value - coefs[1] * entropy)

    params, norm = stepped(agent, loss, state.learner.params, float(agent.learning_rate))
    close(after.learner.params, params)
    np.testing.assert_allclose(metrics["grad_norm"].result(), norm, rtol=1e-4)


def test_daac_updates_equal_ones_written_by_hand_and_keep_apart():
    agent = small("daac", DRIFT, num_mini_batch=1, num_epochs=1, value_epochs=1)
    state, rollouts = rollout_of(agent)
    after, _ = update(agent, state, rollouts)
    advantages, returns = numpy_gae(agent, rollouts)
    params = state.learner.params

    def policy_loss(actor):
        log_prob, entropy, output, step = policy_rows(agent, {**params, "actor": actor}, rollouts)
        a = flat(normalized(advantages))
        ratio = jnp.exp(log_prob - step.log_prob)
        policy = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        extras = agent.policy.act_extras({**params, "actor": actor}, output, step.action)
        predicted = jnp.square(extras["adv_pred"] - a)
        return jnp.mean(policy + 0.25 * predicted - float(agent.entropy_coef) * entropy)

    def value_loss(critic):
        _, _, output, _ = policy_rows(agent, {**params, "critic": critic}, rollouts)
        return jnp.mean(0.5 * jnp.square(output.value - flat(returns)))

    actor, _ = stepped(agent, policy_loss, params["actor"], float(agent.learning_rate))
    critic, _ = stepped(agent, value_loss, params["critic"], float(agent.value_learning_rate))
    close(after.learner.params, {"actor": actor, "critic": critic})

    storage = agent.fill(jax.tree.map(lambda x: x[0], rollouts))
    batch = storage.contents()
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch.replace(initial_carry=None))
    for loss, untouched in ((agent.loss, "critic"), (agent.value_loss, "actor")):
        grads = jax.grad(lambda p, loss=loss: loss(p, batch)[0])(params)
        assert all(not x.any() for x in jax.tree.leaves(grads[untouched]))
        mine = "actor" if untouched == "critic" else "critic"
        assert any(x.any() for x in jax.tree.leaves(grads[mine]))


def test_daac_trains_the_value_only_on_its_turn_and_counts_its_steps():
    agent = small("daac", DRIFT, value_freq=2)
    states, rows = [init(agent, jax.random.key(0))], []
    for _ in range(3):
        state, metrics = train_step(agent, states[-1])
        states.append(state)
        rows.append(compute(metrics))
    for name in ("value_loss", "value_grad_norm"):
        assert [name in row for row in rows] == [False, True, False]
    for i, (before, after) in enumerate(itertools.pairwise(states)):
        for part, moves in (("actor", True), ("critic", i % 2 == 1)):
            same = [
                np.array_equal(a, b)
                for a, b in zip(
                    jax.tree.leaves(before.learner.params[part]),
                    jax.tree.leaves(after.learner.params[part]),
                )
            ]
            assert (not all(same)) == moves
            counts = [optax.tree.get(s.learner.opt_state[part], "count") for s in (before, after)]
            epochs = {"actor": agent.num_epochs, "critic": agent.value_epochs}[part]
            assert counts[1] - counts[0] == moves * epochs * agent.num_mini_batch
        policy_steps = agent.num_epochs * agent.num_mini_batch
        value_steps = (i % 2) * agent.value_epochs * agent.num_mini_batch
        assert after.learner.version - before.learner.version == policy_steps + value_steps


def test_daac_does_not_compute_values_that_it_does_not_train():
    """Where the critic's gradient would not be finite, it is not counted before its turn."""
    agent = small("daac", DRIFT, value_freq=2, num_epochs=1)
    state, rollouts = rollout_of(agent)
    step = rollouts.transition
    bad = rollouts.replace(transition=step.replace(value=step.value.at[0, 0, 0].set(jnp.inf)))
    counts = []
    for iteration in (0, 1):
        shared = state.learner.replace(iteration=jnp.int32(iteration))
        _, metrics = update(agent, state.replace(learner=shared), bad)
        split = len(jax.tree.leaves(state.learner.params["actor"]))
        counts.append(int(metrics["nonfinite"].total[split:].sum()))
    assert counts[0] == 0
    assert counts[1] > 0
    always = small("daac", DRIFT, value_freq=1, num_epochs=1)
    branches = [
        update.lower(one, state, rollouts).as_text().count("stablehlo.case")
        for one in (always, agent)
    ]
    assert branches[1] == branches[0] + 1


def stored_batch(agent, state, rollouts):
    """What the learner of IMPALA samples after one rollout."""
    stored = agent.store(state, rollouts)
    slots = jax.tree.map(lambda x: x[0], stored.storage.slots)
    return stored.storage.replace(slots=slots).sample()


def moved(params, size=0.3):
    """Params that are no longer those that acted."""
    return jax.tree.map(lambda x: x + size * jax.random.normal(jax.random.key(3), x.shape), params)


def unrolled(agent, params, batch):
    """[T, b] values, log-probabilities of all actions and values of all successors, by a loop."""
    apply, value = jax.jit(agent.policy.apply), jax.jit(agent.policy.value)
    step, carry = batch.transition, batch.initial_carry
    values, logits, following = [], [], []
    no = jnp.zeros(step.reward.shape[1], bool)
    for t in range(agent.num_steps):
        carry, out = apply(params, carry, step.obs[t], step.is_first[t])
        values.append(out.value)
        logits.append(jax.nn.log_softmax(out.distribution.logits))
        # Every successor, valued with the carry that stands there.
        following.append(value(params, carry, Drift.successor(step.obs[t]), no))
    last = value(params, carry, batch.last_obs, batch.last_is_first)
    return jnp.stack(values), jnp.stack(logits), jnp.stack(following), last


def taken(logits, action):
    return jnp.take_along_axis(logits, action[..., None], 2)[..., 0]


def numpy_vtrace(agent, batch, values, logits, following, last):
    """(targets, advantages, ρ) in float64, for λ = 1 and equal bounds of 1."""
    step = batch.transition
    log_prob = np.asarray(taken(logits, step.action))
    rho = np.minimum(1, np.exp(log_prob - np.asarray(step.log_prob)).astype(np.float64))
    cut = np.asarray(step.truncated & ~step.terminated)
    onward, targets = np.asarray(last, np.float64), []
    values, following = np.asarray(values, np.float64), np.asarray(following, np.float64)
    for t in reversed(range(agent.num_steps)):
        onward = np.where(cut[t], following[t], onward)
        onward = np.where(step.terminated[t], 0, onward)
        advantage = np.asarray(step.reward[t]) + float(agent.discount) * onward - values[t]
        onward = values[t] + rho[t] * advantage
        targets.insert(0, onward)
    return np.stack(targets), np.stack(targets) - values, rho


@pytest.mark.parametrize("network", plain(["mlp", "lstm"], ["lstm"]))
def test_impala_targets_of_changed_params_come_from_the_full_final_observations(network):
    agent = small(
        "impala",
        DRIFT,
        network=network,
        num_steps=8,
        max_truncations=8,
        batch_size=4,
        num_storages=4,
    )
    state, rollouts = rollout_of(agent)
    batch = stored_batch(agent, state, rollouts)
    step = batch.transition
    assert step.truncated.any()
    params = moved(state.learner.params)
    output, last_values, bootstrap = jax.jit(agent.values)(params, batch)

    values, logits, following, last = unrolled(agent, params, batch)
    cut = np.asarray(step.truncated & ~step.terminated)
    np.testing.assert_allclose(output.value, values, **CLOSE)
    np.testing.assert_allclose(np.asarray(bootstrap)[cut], np.asarray(following)[cut], **CLOSE)
    np.testing.assert_allclose(last_values, last, **CLOSE)

    # V-trace and its losses from those values.
    targets, advantages, rho = numpy_vtrace(agent, batch, values, logits, following, last)
    total_policy = -(advantages * np.asarray(taken(logits, step.action))).sum()
    total_value = 0.5 * np.square(advantages).sum()
    entropy = -(np.exp(logits) * np.asarray(logits)).sum()
    total, weight, metrics = jax.jit(agent.loss)(params, batch)
    assert weight == 32
    coefs = float(agent.value_coef), float(agent.entropy_coef)
    expected = total_policy + coefs[0] * total_value - coefs[1] * entropy
    np.testing.assert_allclose(total, expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["policy_loss"].total, total_policy, rtol=1e-4)
    explained = 1 - np.var(advantages) / np.var(targets)
    np.testing.assert_allclose(metrics["explained_variance"].result(), explained, rtol=1e-3)
    np.testing.assert_allclose(metrics["clip_fraction"].result(), (rho == 1).mean(), rtol=1e-5)


def test_impala_takes_one_rmsprop_step_on_the_clipped_sum():
    agent = small("impala", DRIFT, num_steps=8, batch_size=4, num_storages=4, max_grad_norm=1.0)
    agent = agent.replace(entropy_coef=0.3)
    state, rollouts = rollout_of(agent)
    batch = stored_batch(agent, state, rollouts)
    step, params = batch.transition, moved(state.learner.params)
    targets, advantages, rho = numpy_vtrace(agent, batch, *unrolled(agent, params, batch))
    assert (rho < 1).any()

    def loss(params):
        """With targets and advantages that are numbers, no functions of the params."""
        act = jax.vmap(lambda obs, is_first: agent.policy.apply(params, (), obs, is_first)[1])
        output = act(step.obs, step.is_first)
        logits = jax.nn.log_softmax(output.distribution.logits)
        policy = -jnp.sum(jnp.asarray(advantages, jnp.float32) * taken(logits, step.action))
        value = 0.5 * jnp.sum(jnp.square(jnp.asarray(targets, jnp.float32) - output.value))
        entropy = -jnp.sum(jnp.exp(logits) * logits)
        return policy + agent.value_coef * value - agent.entropy_coef * entropy

    grads = jax.jit(jax.grad(loss))(params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.rmsprop(
            float(agent.learning_rate),
            decay=float(agent.rmsprop_decay),
            eps=float(agent.rmsprop_epsilon),
        ),
    )
    updates, _ = optimizer.update(grads, optimizer.init(params))
    state = state.replace(learner=state.learner.replace(params=params))
    after, metrics = update(agent, state, rollouts)
    close(after.learner.params, optax.apply_updates(params, updates))
    assert optax.global_norm(grads) > 1.0
    np.testing.assert_allclose(metrics["grad_norm"].result(), optax.global_norm(grads), rtol=1e-4)


@pytest.mark.parametrize(
    ("network", "action"),
    [("mlp", spaces.Box.create(-1, 1, (2,))), ("lstm", spaces.Discrete(3))],
)
def test_impala_does_not_look_at_invalid_rows(network, action):
    env = autoreset(AnySpaces(spaces.Box.create(0, 1, (2,)), action))
    agent = small("impala", env, network=network, num_steps=8, batch_size=4, num_storages=4)
    state, rollouts = rollout_of(agent)
    batch = stored_batch(agent, state, rollouts)
    step = batch.transition
    assert step.truncated[4].all()
    valid = jnp.ones(step.reward.shape, bool).at[5].set(False)  # a host resets after the end
    is_first = step.is_first.at[5].set(False).at[6].set(True)
    grad = jax.jit(jax.grad(lambda params, batch: agent.loss(params, batch)[0]))

    def with_row(number):
        def put(x):
            return x.at[5].set(number) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return batch.replace(
            transition=jax.tree.map(put, step).replace(valid=valid, is_first=is_first)
        )

    ordinary, unusable = (grad(state.learner.params, with_row(x)) for x in (0.5, jnp.nan))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(unusable))
    chex.assert_trees_all_equal(ordinary, unusable)


def test_advantages_are_normalised_once_in_each_mode():
    spreads = {}
    for mode in ("minibatch", "rollout", None):
        agent = small("ppo", DRIFT, normalize_advantage=mode)
        _, rollouts = rollout_of(agent)
        storage = agent.fill(jax.tree.map(lambda x: x[0], rollouts))
        raw, _ = numpy_gae(agent, rollouts)
        stored = np.asarray(storage.targets.advantages)
        expected = normalized(raw) if mode == "rollout" else raw
        np.testing.assert_allclose(stored, expected, rtol=1e-4, atol=1e-5)
        plan = storage.plan(jax.random.key(0), num_mini_batch=2)
        batch = storage.minibatch(jax.tree.map(lambda x: x[0], plan))
        seen = agent.prepare(batch).targets.advantages
        picked = batch.targets.advantages
        expected = normalize(picked, batch.weights) if mode == "minibatch" else picked
        np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)
        spreads[mode] = float(jnp.std(seen))
    assert abs(spreads["minibatch"] - 1) < 1e-4
    assert abs(spreads["rollout"] - 1) > 1e-4


def test_streams_are_added_before_they_are_normalised():
    agents = {mode: small("ppo", DRIFT, normalize_advantage=mode) for mode in ("rollout", None)}
    _, rollouts = rollout_of(agents[None])
    rollout = jax.tree.map(lambda x: x[0], rollouts)

    def streams(x):  # of very different spread
        return {"a": x, "b": -30 * x}

    step = rollout.transition
    names = ("reward", "value", "bootstrap_value")
    step = step.replace(**{name: streams(getattr(step, name)) for name in names})
    rollout = rollout.replace(transition=step, last_value=streams(rollout.last_value))
    seen = {}
    for mode, agent in agents.items():
        storage = agent.fill(rollout)
        plan = storage.plan(jax.random.key(0), num_mini_batch=1)
        batch = agent.prepare(storage.minibatch(jax.tree.map(lambda x: x[0], plan)))
        seen[mode] = batch.targets.advantages
    np.testing.assert_allclose(seen["rollout"], normalized(seen[None]), rtol=1e-4, atol=1e-5)


def step_of_streams():
    """One step of two environments whose values have two streams."""
    streams = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    return Transition(
        obs=np.zeros((2, 1), np.float32),
        action=np.zeros(2, np.int32),
        reward=streams,
        terminated=np.zeros(2, bool),
        value=streams,
    )


@pytest.mark.parametrize("own", [True, False])
def test_streams_keep_the_discounts_of_the_storage_factory(own):
    discount = {"a": 0.5, "b": 0.9}
    factory = RolloutStorage.create_factory(num_steps=8, discount=discount, gae_lambda=0.3)
    make = factory if own else lambda step: factory(step).replace(gae_lambda=np.float32(0.3))
    agent = small("ppo", num_steps=8, discount=0.7, gae_lambda=0.6, storage=make)
    storage = agent.make_storage(step_of_streams(), None)
    assert {k: round(float(x), 3) for k, x in storage.discount.items()} == discount
    # One number is the agent's.
    assert {round(float(x), 3) for x in jax.tree.leaves(storage.gae_lambda)} == {0.6}


def test_a_storage_of_another_length_than_the_rollout_is_refused():
    for num_steps in (4, 16):
        factory = RolloutStorage.create_factory(num_steps=num_steps)
        agent = small("ppo", num_steps=8, storage=factory)
        with pytest.raises(ValueError, match=rf"num_steps = 8, got {num_steps}.*num_steps=8"):
            jax.eval_shape(agent.train_step, jax.eval_shape(agent.init, jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class Short:
    """Truncates every fourth step by itself: its time limit is not known."""

    observation_space = spaces.Box.create(0, 4, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(2)

    def step(self, key, state, action):
        obs = jnp.stack([state + 1.0, action])
        return state + 1, obs, jnp.float32(1), jnp.bool_(False), state >= 3


SHORT = autoreset(Short())


@pytest.mark.parametrize("name", plain(["ppo", "a2c", "daac", "impala"], ["ppo", "impala"]))
def test_no_truncated_step_of_short_episodes_loses_its_bootstrap(name):
    agent = small(name, SHORT, num_steps=16)
    state, rollouts = rollout_of(agent)
    step = rollouts.transition
    assert int((step.truncated & ~step.terminated).sum()) == 4 * agent.num_envs
    assert not rollouts.final.overflow.any()
    finals = jnp.stack([jnp.full(step.action.size, 4.0), step.action.ravel()], -1)
    params = agent.acting_params(state.learner)
    values = agent.policy.value(params, (), finals, step.is_first.ravel())
    expected = np.where(step.truncated, values.reshape(step.action.shape), 0)
    np.testing.assert_allclose(step.bootstrap_value, expected, rtol=1e-5)


def test_lost_bootstraps_warn_once_and_are_counted():
    agent = small("ppo", SHORT, num_steps=16, max_truncations=1, num_mini_batch=1)
    with pytest.warns(UserWarning, match="bootstrapped from V.obs.") as caught:
        _, history = agent.train(
            3 * agent.steps_per_iteration, log_interval=agent.steps_per_iteration, progress="silent"
        )
    assert len([w for w in caught if "bootstrapped" in str(w.message)]) == 1
    assert history["final_overflow"][-1] == 3 * agent.num_envs


class TwoStreams(PPO):
    """The reward twice, under two names."""

    def run(self, learner, actor):
        actor, rollout = super().run(learner, actor)
        step = rollout.transition
        streams = {"a": step.reward, "b": -3 * step.reward}
        return actor, rollout.replace(transition=step.replace(reward=streams))


def linear_policy(*streams):
    """Logits and values linear in Drift's observations; without streams one value."""
    names = streams or ("v",)

    def init(key, obs):
        return {"policy": jnp.zeros((2, 3)), **{name: jnp.ones(2) for name in names}}

    def apply(params, carry, obs, is_first):
        values = {name: obs @ params[name] for name in names}
        value = values if streams else values["v"]
        return carry, PolicyOutput(Categorical(obs @ params["policy"]), value)

    return FunctionPolicy(init, apply)


def test_each_stream_has_the_discount_lambda_and_weight_given_to_the_agent():
    options = {"discount": {"a": 0.9, "b": 0.5}, "gae_lambda": {"a": 1.0, "b": 0.3}}
    coefs = {"a": 1.0, "b": 0.25}
    agent = TwoStreams.create(
        DRIFT,
        policy=linear_policy("a", "b"),
        num_envs=4,
        num_steps=8,
        num_mini_batch=1,
        normalize_advantage=None,
        stream_coef=coefs,
        **options,
    )
    _, rollouts = rollout_of(agent)
    storage = agent.fill(jax.tree.map(lambda x: x[0], rollouts))
    batch = agent.prepare(storage.contents())
    expected = 0
    for name, coef in coefs.items():
        alone = {key: value[name] for key, value in options.items()}
        of_stream = {
            field: getattr(rollouts.transition, field)[name]
            for field in ("reward", "value", "bootstrap_value")
        }
        one = rollouts.replace(
            transition=rollouts.transition.replace(**of_stream),
            last_value=rollouts.last_value[name],
        )
        expected = expected + coef * numpy_gae(SimpleNamespace(**alone), one)[0]
    np.testing.assert_allclose(batch.targets.advantages, expected, rtol=1e-4, atol=1e-5)
    metrics = jax.eval_shape(agent.train_step, jax.eval_shape(agent.init, KEY))[1]
    assert {"value_loss", "explained_variance"} <= metrics.keys()


@pytest.mark.parametrize(
    ("streams", "options", "message"),
    [
        ((), {"discount": {"a": 0.9}}, r"discount has the streams \['a'\].*single array"),
        (("a", "b"), {"gae_lambda": {"a": 0.9}}, r"gae_lambda has.*of the streams \['a', 'b'\]"),
        (("a", "b"), {"stream_coef": {"a": 1, "c": 1}}, "stream_coef has the streams"),
        (("a", "b"), {"discount": {"a": 0.9, "b": 1.5}}, r"discount\['b'\] must be in \[0, 1\]"),
        (("a", "b"), {"discount": {}}, "a dict with one for each stream"),
        (("a", "b"), {"normalize_rewards": True}, "normalize_rewards scales one stream"),
        (("a", "b"), {"clip_epsilon": {"a": 1.0, "b": 1.0}}, "clip_epsilon must be a number"),
    ],
)
def test_streams_that_do_not_fit_the_policy_are_refused(streams, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PPO.create(DRIFT, policy=linear_policy(*streams), **options)


def test_the_discounts_of_streams_are_given_once():
    own = {"a": 0.5, "b": 0.9}
    factory = RolloutStorage.create_factory(num_steps=8, discount=own)
    agent = PPO.create(
        DRIFT, policy=linear_policy("a", "b"), num_steps=8, discount=own, storage=factory
    )
    with pytest.raises(ValueError, match="given to the agent and to its storage"):
        agent.make_storage(step_of_streams(), None)


@pytest.mark.parametrize("name", plain(["ppo", "a2c", "daac"], ["ppo"]))
def test_invalid_rows_reach_no_gradient(name):
    env = autoreset(AnySpaces(spaces.Box.create(0, 1, (2,)), spaces.Box.create(-1, 1, (2,))))
    agent = small(name, env, num_steps=8)
    state, rollouts = rollout_of(agent)
    step = rollouts.transition
    valid = jnp.ones(step.reward.shape, bool).at[:, 5].set(False)  # a host resets after the end

    def with_row(number):
        def put(x):
            return x.at[:, 5].set(number) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return rollouts.replace(transition=jax.tree.map(put, step).replace(valid=valid))

    ordinary, unusable = (update(agent, state, with_row(x)) for x in (0.5, jnp.nan))
    assert not unusable[1]["nonfinite"].result().any()
    assert unusable[1]["grad_norm"].result() > 0
    chex.assert_trees_all_equal(ordinary[0].learner.params, unusable[0].learner.params)
