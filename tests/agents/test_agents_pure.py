"""train_step as a pure function: jit, scan, vmap, every kind of space, one compilation."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import (
    A2C,
    IMPALA,
    PPO,
    OnPolicyAgent,
    PolicyOutput,
    RolloutStorage,
    make_env,
    metrics as metrics_lib,
    parallel,
    spaces,
)
from jaxroll.agents import leaf
from jaxroll.distributions import Categorical
from jaxroll.envs import autoreset
from jaxroll.networks import FunctionPolicy, make_policy
from jaxroll.sweeps import sweep
from tests.agents.agent_toys import (
    CLOCK,
    DRIFT,
    SMALL,
    AnySpaces,
    init,
    leaves_equal,
    small,
    train_step,
)
from tests.tiers import plain

KEY = jax.random.key(0)
VECTOR = spaces.Box.create(-1, 1, (3,))
SPACES = {
    "continuous": (VECTOR, spaces.Box.create(-2, 2, (2,))),
    "multi-discrete": (VECTOR, spaces.MultiDiscrete((2, 3))),
    "switches": (VECTOR, spaces.MultiBinary(3)),
    "image": (spaces.Box.create(0, 255, (6, 6, 2), np.uint8), spaces.Discrete(3)),
    "masked dict": (
        spaces.Dict.create(
            {
                "place": VECTOR,
                "kind": spaces.Discrete(4),
                "action_mask": spaces.MultiBinary(3, np.dtype(bool)),
            }
        ),
        spaces.Discrete(3),
    ),
}


def assert_finite(tree):
    for path, x in jax.tree.leaves_with_path(tree):
        if jnp.issubdtype(x.dtype, jnp.floating):
            assert np.isfinite(np.asarray(x)).all(), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", plain(SMALL, ["ppo"]))
def test_scan_vmap_and_plain_steps_agree_and_compile_once(name):
    agent = small(name, DRIFT)

    @jax.jit
    def train(agent, seed):
        def step(state, _):
            return agent.train_step(state)

        return jax.lax.scan(step, agent.init(jax.random.key(seed)), length=2)

    states, metrics = jax.vmap(train, in_axes=(None, 0))(agent, jnp.arange(2))
    train_step(agent, init(agent, jax.random.key(7)))
    compiled = train_step._cache_size(), init._cache_size()
    for seed in range(2):
        state = init(agent, jax.random.key(seed))
        for i in range(2):
            state, one = train_step(agent, state)
            for key, value in metrics_lib.compute(one).items():
                member = jax.tree.map(lambda x, s=seed, i=i: x[s, i], metrics[key])
                np.testing.assert_allclose(
                    member.result(), value, rtol=2e-3, atol=1e-5, err_msg=key
                )
        member = jax.tree.map(lambda x, s=seed: x[s], states)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
            member.learner.params,
            state.learner.params,
        )
        assert np.array_equal(
            jax.random.key_data(member.actors.key),
            jax.random.key_data(state.actors.key),
        )
    assert_finite(states)
    # Other seeds, another value of a leaf, and another agent made alike compile nothing.
    other = small(name, DRIFT, learning_rate=0.5).replace(discount=0.3, entropy_coef=0)
    changed, _ = train_step(other, init(other, jax.random.key(9)))
    assert (train_step._cache_size(), init._cache_size()) == compiled
    assert_finite(changed)


# One storage and one learner serve all spaces: the two other kinds see what differs most.
PAIRS = [("ppo", kind) for kind in SPACES]
COMMON = [("ppo", kind) for kind in ("multi-discrete", "image", "masked dict")]
PAIRS += [(name, kind) for name in ("daac", "impala") for kind in ("continuous", "masked dict")]


@pytest.mark.parametrize(("name", "kind"), plain(PAIRS, COMMON))
def test_one_step_in_every_kind_of_space_is_finite(name, kind):
    env = autoreset(AnySpaces(*SPACES[kind]))
    agent = small(name, env)
    state, metrics = train_step(agent, init(agent, KEY))
    numbers = metrics_lib.compute(metrics)
    assert_finite(state.learner)
    assert np.isfinite(numbers["loss"])
    assert not numbers["nonfinite"].any()  # a masked action would have earned NaN


def test_pendulum_with_normalisers_and_squashed_actions_takes_a_step():
    agent = small(
        "ppo",
        make_env("Pendulum-v1"),
        normalize_observations=True,
        normalize_rewards=True,
        squash=True,
    )
    state, _ = train_step(agent, init(agent, KEY))
    assert_finite(state)
    assert state.learner.obs_statistics.count == 32
    assert state.learner.reward_scaler.statistics.count == 32
    acted = agent.act(state)(jnp.zeros((5, 3)))
    assert acted.shape == (5, 1)
    assert (jnp.abs(acted) <= 2).all()


METRICS = {"loss", "policy_loss", "value_loss", "entropy", "approx_kl", "explained_variance"}
METRICS |= {"grad_norm", "learning_rate", "episode_return", "episode_length", "episodes"}


@pytest.mark.parametrize("name", SMALL)
def test_every_agent_tells_what_it_has_to_tell(name):
    agent = small(name, DRIFT)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    metrics = jax.eval_shape(agent.train_step, state)[1]
    assert metrics.keys() >= METRICS
    assert ("clip_fraction" in metrics) == (name != "a2c")
    assert ("policy_lag" in metrics) == (name == "impala")


def test_the_first_minibatch_sees_the_policy_that_acted():
    """Normalising moments are those from before the rollout: the ratio starts at exactly 1."""
    agent = small("ppo", DRIFT, normalize_observations=True, num_mini_batch=1, num_epochs=1)
    state = init(agent, KEY)
    for _ in range(2):
        state, metrics = train_step(agent, state)
        assert abs(metrics["approx_kl"].result()) < 1e-9
        assert metrics["clip_fraction"].result() == 0


@pytest.mark.slow
def test_recurrent_ppo_replays_the_log_probabilities_that_acted():
    agent = small(
        "ppo", DRIFT, network="gru", sequence_length=4, num_mini_batch=1, num_epochs=1, num_steps=8
    )
    state = init(agent, KEY)
    for _ in range(2):
        state, metrics = train_step(agent, state)
        assert abs(metrics["approx_kl"].result()) < 1e-9


@pytest.mark.parametrize("num_actors", plain([1, 2], [2]))
def test_impala_lag_is_the_one_that_the_sizes_promise(num_actors):
    # R = 3 iterations in the ring, U = 2 updates each: batch j is 2·2 + j versions behind.
    agent = IMPALA.create(
        DRIFT,
        hidden_sizes=(8,),
        num_envs=8,
        num_steps=2,
        num_storages=24,
        batch_size=4,
        num_actors=num_actors,
    )
    state = init(agent, KEY)
    assert state.learner.version == 0
    assert state.storage.num_full == 16 / num_actors
    lags, reads = [], []
    for i in range(5):
        reads.append(int(state.storage.counters_.read))
        state, metrics = train_step(agent, state)
        lags.append(float(metrics["policy_lag"].result()))
        assert metrics["storage_dropped"].result() == 0
        assert state.learner.version == 2 * (i + 1)
        # What the next iteration reads first was filled (R − 1) iterations before it.
        versions = np.asarray(state.storage.slots.version)
        oldest = int(state.storage.counters_.read)
        assert (versions[:, oldest] == max(0, 2 * (i - 1))).all()
    # The mean over j = 0, 1, growing from the prefill's version 0 to the steady state.
    assert lags == [0.5, 2.5, 4.5, 4.5, 4.5]
    # Every unroll is read once, in the order in which they were written.
    assert reads == [0, 8 // num_actors, 16 // num_actors, 0, 8 // num_actors]
    assert state.storage.num_full == 16 / num_actors


def test_several_actors_are_several_environments_and_one_learner():
    agent = small("ppo", DRIFT, num_actors=2)
    state = init(agent, KEY)
    assert state.actors.obs.shape == (2, 2, 2)
    assert not np.array_equal(state.actors.obs[0], state.actors.obs[1])
    after, metrics = train_step(agent, state)
    assert after.actors.obs.shape == (2, 2, 2)
    assert np.isfinite(metrics["loss"].result())


def test_agents_made_alike_are_equal_and_have_one_structure():
    def made(**options):
        return PPO.create("CartPole-v1", num_envs=8, **options)

    one, other = made(), made(learning_rate=1.0)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.structure(one) != jax.tree.structure(made(num_steps=4))
    assert leaves_equal(one, made())


def test_agents_with_storages_made_alike_share_one_compilation():
    def made(**options):
        factory = RolloutStorage.create_factory(num_steps=8, **options)
        return small("ppo", storage=factory)

    same = made(discount=0.5, gae_lambda=np.float32(0.9))
    traces = []

    @jax.jit
    def step(agent):
        traces.append(agent.storage)
        return agent.discount

    step(same)
    step(made(discount=0.5, gae_lambda=np.float32(0.9)))
    assert len(traces) == 1
    assert made(discount=0.5) != same
    step(made(discount=0.25, gae_lambda=np.float32(0.9)))
    assert len(traces) == 2
    assert "RolloutStorage.create_factory(num_steps=8" in repr(traces[0])


BAD = {
    "num_actors must divide num_envs = 8": lambda: PPO.create(CLOCK, num_envs=8, num_actors=3),
    "num_mini_batch must divide": lambda: PPO.create(CLOCK, num_envs=8, num_mini_batch=7),
    "sequence_length must divide": lambda: PPO.create(
        CLOCK, network="lstm", num_steps=8, sequence_length=3
    ),
    "sequence_length must be at least 1, got 0": lambda: PPO.create(
        CLOCK, network="lstm", num_steps=8, sequence_length=0
    ),
    "sequence_length must be at least 1, got -4": lambda: PPO.create(
        CLOCK, network="lstm", num_steps=8, sequence_length=-4
    ),
    "sequence_length must be an integer, got 'all'": lambda: PPO.create(
        CLOCK, network="lstm", sequence_length="all"
    ),
    "is for recurrent policies": lambda: PPO.create(CLOCK, sequence_length=4),
    "batch_size must divide num_envs = 8": lambda: IMPALA.create(
        CLOCK, num_envs=8, batch_size=3, num_storages=8
    ),
    "num_envs must divide num_storages = 12": lambda: IMPALA.create(
        CLOCK, num_envs=8, batch_size=4, num_storages=12
    ),
    "num_actors must divide batch_size = 4": lambda: IMPALA.create(
        CLOCK, num_envs=8, batch_size=4, num_storages=8, num_actors=8
    ),
    "learning_rate must be > 0, got -1": lambda: PPO.create(CLOCK, learning_rate=-1),
    "discount must be in": lambda: PPO.create(CLOCK, discount=1.5),
    "learning_rate must be a number, got nan": lambda: PPO.create(
        CLOCK, learning_rate=float("nan")
    ),
    "learning_rate must be finite, got inf": lambda: PPO.create(CLOCK, learning_rate=float("inf")),
    "entropy_coef must be finite": lambda: IMPALA.create(CLOCK, entropy_coef=np.array([0, np.inf])),
    "Did you mean 'learning_rate'": lambda: PPO.create(CLOCK, learning_rat=1e-3),
    "num_envs must be an integer, got 'many'": lambda: PPO.create(CLOCK, num_envs="many"),
    "DAAC never shares its torso": lambda: SMALL["daac"][0].create(CLOCK, shared_torso=True),
    "DAAC needs a decoupled policy, whose params": lambda: SMALL["daac"][0].create(
        CLOCK, policy=make_policy(CLOCK.observation_space, CLOCK.action_space)
    ),
    "must have 2 choices": lambda: PPO.create(
        CLOCK, policy=make_policy(CLOCK.observation_space, spaces.Discrete(5))
    ),
    "but a policy was given": lambda: PPO.create(
        CLOCK,
        policy=make_policy(CLOCK.observation_space, CLOCK.action_space),
        hidden_sizes=(8,),
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_before_anything_is_compiled(message):
    with pytest.raises((ValueError, TypeError)) as error:
        BAD[message]()
    assert message in str(error.value)


@pytest.mark.parametrize("cls", [PPO, IMPALA])
def test_a_class_called_without_create_says_so(cls):
    for arguments in (("CartPole-v1",), (CLOCK,), ()):
        with pytest.raises(TypeError, match=rf"Use {cls.__name__}\.create\("):
            cls(*arguments)


def test_replacing_a_hyperparameter_checks_it():
    ppo = small("ppo")
    for name, value in (("discount", 1.5), ("learning_rate", "1"), ("gae_lambda", True)):
        with pytest.raises((ValueError, TypeError), match=f"{name} must be"):
            ppo.replace(**{name: value})
    assert np.isinf(ppo.replace(clip_epsilon=None).clip_epsilon)


def mean_log_prob(agent, params, batch):
    log_prob = agent.outputs(params, batch).distribution.log_prob(batch.transition.action)
    return jnp.mean(log_prob)


WRONG_LOSSES = {
    "scalar": mean_log_prob,
    "pair": lambda *args: (mean_log_prob(*args), {}),
    "rows": lambda agent, params, batch: (batch.weights, jnp.sum(batch.weights), {}),
    "no dict": lambda *args: (mean_log_prob(*args), jnp.ones(()), jnp.ones(())),
    "nothing": lambda *args: None,
}


@pytest.mark.parametrize("kind", WRONG_LOSSES)
def test_a_loss_that_returns_something_else_is_refused_at_create(kind):
    class Mine(OnPolicyAgent):
        loss = WRONG_LOSSES[kind]

    with pytest.raises(TypeError, match=r"loss must return \(Σ w·ℓ, Σ w, metrics\).*Got"):
        Mine.create(CLOCK, num_envs=2, num_steps=2)


def test_an_agent_without_a_loss_and_a_rule_that_does_not_exist_are_refused():
    class Mine(OnPolicyAgent):
        pass

    with pytest.raises(TypeError, match=r"Mine must define loss: help\(Mine\.loss\)"):
        Mine.create(CLOCK)
    with pytest.raises(ValueError, match=r"rule must be one of None, '> 0'.*got '>0'"):
        leaf(0.5, "some number", ">0")


class Counting(A2C):
    """Counts its updates in `extras`, and its policy acts with params that the count scales."""

    def init_extras(self, params):
        return {"updates": jnp.zeros((), jnp.int32)}

    def with_normalizer(self, params, learner):
        return {"params": params, "scale": 1.0 + learner.extras["updates"]}

    def update(self, state, rollouts, **across):
        state, metrics = super().update(state, rollouts, **across)
        extras = {"updates": state.learner.extras["updates"] + 1}
        metrics["plain"] = jnp.array([1.0, 3.0])  # an array counts as a mean
        return state.replace(learner=state.learner.replace(extras=extras)), metrics


def counting():
    def apply(bound, carry, obs, is_first):
        params = jax.tree.map(lambda x: x * bound["scale"], bound["params"])
        return carry, PolicyOutput(Categorical(obs @ params["logits"]), obs @ params["value"])

    policy = FunctionPolicy(
        lambda key, obs: {"logits": jnp.zeros((4, 2)), "value": jnp.zeros(4)}, apply
    )
    return Counting.create(CLOCK, policy=policy, num_envs=4, num_steps=2, num_actors=2)


def test_an_algorithms_own_state_is_replicated_saved_and_swept(tmp_path):
    agent = counting()  # `create` applied the policy with what `with_normalizer` gives
    steps = 2 * agent.steps_per_iteration
    state, history = agent.train(
        steps, mesh=parallel.make_mesh(2), checkpoint_dir=tmp_path / "run", progress="silent"
    )
    assert state.learner.extras["updates"] == 2
    assert state.learner.extras["updates"].sharding.is_fully_replicated
    assert history.to_records()[-1]["plain"] == 2
    assert agent.load(tmp_path / "run").learner.extras["updates"] == 2
    result = sweep(agent, steps, seeds=[0, 1], progress="silent")
    assert result.states.learner.extras["updates"].tolist() == [2, 2]


def test_what_bounds_may_be_infinite():
    ppo = PPO.create(CLOCK, clip_epsilon=np.inf, max_grad_norm=None, decay_steps=np.inf)
    assert all(np.isinf([ppo.clip_epsilon, ppo.max_grad_norm, ppo.decay_steps]))
    assert np.isinf(IMPALA.create(CLOCK, clip_rho=None).clip_rho)


def test_creating_agents_touches_no_device():
    """So that jax.distributed.initialize can still come.

    With an environment of gymnax it must come before: importing gymnax 1.0 makes arrays.
    """
    code = """
import jax, numpy as np, jaxroll
from tests.agents.agent_toys import CLOCK, AnySpaces, small
from jaxroll import spaces
from jaxroll.envs import autoreset
image = autoreset(AnySpaces(spaces.Box.create(0, 255, (8, 8, 2), np.uint8), spaces.Discrete(3)))
small("ppo", CLOCK, normalize_observations=True, normalize_rewards=True)
small("a2c", CLOCK, network="gru", sequence_length=2)
small("daac", image)
small("impala", image, network="lstm").replace(learning_rate=1e-3)
assert not jax._src.xla_bridge.backends_are_initialized()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
