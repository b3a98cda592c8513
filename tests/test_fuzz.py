"""Public callables with one wrong argument at a time: a clear error, never silence.

Each call is classified:

- clear: an error raised by jaxroll that names the argument or shows its value;
- unclear: an error from inside jax, numpy or flax, an AttributeError, or one that names neither;
- accepted: no error at all.

Nothing is trained: calls are traced at most, and what a run would need first stops it. To read the
findings of each area: `python -m tests.test_fuzz DIRECTORY`.
"""

import collections
import contextlib
import dataclasses
import datetime
import functools
import math
import os
import pathlib
import re
import sys
import tempfile
import traceback
import warnings

import jax
import numpy as np
import pytest

import jaxroll
from jaxroll import losses, parallel, spaces, train
from jaxroll.envs import wrappers

# The most of each area's calls that may be accepted, and that may be accepted or unclear. They only
# go down, to 0, which stands for MAX_UNCLEAR of the calls where it is about unclear ones.
CEILINGS = {
    "core": (0, 0),
    "learner": (0, 0),
    "collect": (0, 0),
    "envs": (0, 0),
    "checkpoint": (0, 0),
    "report": (0, 0),
    "loop": (0, 0),
}
AREAS = tuple(CEILINGS)
MAX_UNCLEAR = 0.05
PACKAGE = str(pathlib.Path(jaxroll.__file__).parent)
T, B = 4, 2


def shown(value):
    """A value in one short line."""
    if type(value) is object:
        return "object()"
    return " ".join(repr(value).split())[:60]


# What no argument can be, whatever it is for.
RAGGED = [[1.0], [2.0, 3.0]]
OF_NONE = np.array([None] * B)
DATES = np.array([datetime.date(2026, 1, 1)] * B)
NO_NUMBER = (None, "abc", "0.9", 1j, np.full(B, 1j), RAGGED, OF_NONE, DATES, {}, object())
# By kind of argument: values that cannot be meant. A "?" after the kind: None is meant.
WRONG = {
    "count": (*NO_NUMBER, math.nan, math.inf, -1, 1.5, True, 2**40, np.ones(3)),
    "steps": (*NO_NUMBER, math.nan, math.inf, -1, 1.5, True, np.ones(3)),  # many are meant
    "unit": (*NO_NUMBER, math.nan, math.inf, -0.1, 1.5, True, np.ones(7)),
    "positive": (*NO_NUMBER, math.nan, math.inf, -0.1, True, np.ones(7)),
    "bound": (*NO_NUMBER, math.nan, -0.1, True, np.ones(7)),  # infinity is no bound
    "number": (*NO_NUMBER, math.nan, math.inf, True, np.ones(7)),
    "seed": (*NO_NUMBER, math.nan, math.inf, -1, 1.5, True, 2**40, np.ones(3)),
    "flag": (None, "abc", "no", 1j, 2, 0.5, RAGGED, OF_NONE, object()),
    "choice": ("abc", 3, 1j, True, RAGGED, object()),
    "text": (3, 1j, True, RAGGED, object(), b"abc"),
    "array": (None, "abc", 1j, np.full((T, B), 1j), RAGGED, DATES, OF_NONE, np.ones(7), object()),
    "key": (None, 0, "abc", 1j, RAGGED, np.zeros(2, np.uint32), object()),
    "path": (None, 3, 1j, True, "", "gs://bucket/run", "s3://bucket", RAGGED, object()),
    "env": (None, 3, "NoSuch-v9", 1j, {}, RAGGED, object()),
    "policy": (3, "abc", 1j, {}, RAGGED, object()),
    "state": (None, 3, "abc", 1j, {}, RAGGED, object()),
    "space": (None, 3, "abc", 1j, {}, RAGGED, object()),
    "sizes": ("abc", 1j, 64, (0,), (-1,), (1.5,), (math.nan,), (None,), (True,), RAGGED),
    "function": (None, 3, "abc", 1j, RAGGED),
    "mapping": (3, "abc", 1j, True, object()),
}
BATCH = shown(np.ones(7))
# Values above that some callables do mean: (callables, arguments) by regular expression → values.
MEANT = {
    # A box may be unbounded.
    (r"spaces\.Box\.create", "low|high"): ("inf",),
    # Agents may hold a batch of values, to be vmapped over.
    (r"(PPO|A2C|DAAC|IMPALA)\.(create|replace)", r"\w+"): (BATCH,),
    # Looks ahead to the end of the rollout.
    ("n_step_returns", "n"): (shown(2**40),),
    # Never reached.
    (r"agent\.train", "target_return"): ("inf",),
    # Nothing to join.
    (r"History\.concat", "histories"): ("{}",),
    # Keeps no row.
    (r"\w+Logger", "resume_from_step"): ("-1",),
}


class Reached(Exception):
    """A run got past its checks."""


class NeverTrained(jaxroll.PPO):
    """Stops a run where its first state is made."""

    def init(self, key):
        raise Reached


@dataclasses.dataclass(frozen=True)
class Target:
    """A callable with right arguments, name → (kind, value)."""

    area: str
    name: str
    call: collections.abc.Callable
    arguments: dict


def targets():
    """What is fuzzed, by area."""
    return [*core(), *learner(), *collect(), *envs(), *checkpoint(), *report(), *loop()]


def traced(function):
    """The call under `eval_shape`: numbers stay concrete, nothing is computed."""
    return lambda **arguments: jax.eval_shape(lambda: function(**arguments))


def core():
    """Estimators, losses, storages."""
    target = functools.partial(Target, "core")
    block = ("array", np.ones((T, B), np.float32))
    row = ("array", np.ones(B, np.float32))
    flags = ("array?", np.zeros((T, B), bool))
    common = {
        "rewards": block,
        "last_values": row,
        "terminated": flags,
        "truncated": flags,
        "bootstrap_values": ("array?", np.ones((T, B), np.float32)),
        "discount": ("unit", 0.9),
        "valid": flags,
    }
    values = {"values": block}
    unit = ("unit", 0.9)
    estimators = {
        "gae": {**values, "gae_lambda": unit},
        "lambda_returns": {**values, "trace_lambda": unit},
        "discounted_returns": {},
        "n_step_returns": {**values, "n": ("count", 2)},
        "vtrace": {
            **values,
            "log_rhos": block,
            "trace_lambda": unit,
            "clip_rho": ("bound", 1.0),
            "clip_c": ("bound", 1.0),
            "clip_pg_rho": ("bound", 1.0),
        },
        "retrace": {
            "log_rhos": block,
            "q_values": block,
            "expected_values": block,
            "trace_lambda": unit,
        },
    }
    for name, own in estimators.items():
        yield target(name, traced(getattr(jaxroll, name)), {**common, **own})
    weights = {"weights": ("array?", np.ones(6, np.float32))}
    flat = ("array", np.ones(6, np.float32))
    yield target("normalize", traced(jaxroll.normalize), {"x": flat, **weights})
    for name, arguments in {
        "policy_gradient_loss": ("log_probs", "advantages"),
        "clipped_policy_loss": ("log_probs", "old_log_probs", "advantages"),
        "value_loss": ("values", "returns"),
        "clipped_value_loss": ("values", "old_values", "returns"),
        "advantage_loss": ("adv_preds", "advantages"),
        "entropy_bonus": ("entropies",),
        "approximate_kl": ("log_probs", "old_log_probs"),
        "clip_fraction": ("log_probs", "old_log_probs"),
    }.items():
        clip = {"clip_epsilon": ("bound", 0.2)} if "clip" in name else {}
        function = getattr(losses, name)
        own = {**dict.fromkeys(arguments, flat), **clip, **weights}
        yield target(f"losses.{name}", traced(function), own)
    yield from storages()


def transition(**changes):
    """One row of B environments."""
    row = jaxroll.Transition(
        obs=np.ones((B, 3), np.float32),
        action=np.zeros(B, np.int32),
        reward=np.ones(B, np.float32),
        terminated=np.zeros(B, bool),
        log_prob=np.zeros(B, np.float32),
        value=np.ones(B, np.float32),
    )
    return row.replace(**changes) if changes else row


def storages():
    """Making, filling and sampling them."""
    target = functools.partial(Target, "core")
    steps = {"num_steps": ("count", T)}
    numbers = {"discount": ("unit", 0.9), "gae_lambda": ("unit", 0.9)}
    example = {"example": ("state", transition())}
    rows = ("array", np.ones(B, np.float32))
    decoupled = transition(extras={"adv_pred": np.ones(B, np.float32)})
    yield target(
        "RolloutStorage.create",
        jaxroll.RolloutStorage.create,
        {**example, **steps, **numbers},
    )
    yield target(
        "DecoupledRolloutStorage.create",
        jaxroll.DecoupledRolloutStorage.create,
        {"example": ("state", decoupled), **steps, **numbers},
    )
    ring = {
        "num_storages": ("count?", 8),
        "batch_size": ("count?", 2),
        "max_truncations": ("count", 1),
    }
    yield target(
        "DistributedStorage.create",
        jaxroll.DistributedStorage.create,
        {**example, **steps, **ring},
    )
    full = jaxroll.RolloutStorage.create(transition(), T)
    for _ in range(T):
        full = full.add(transition())
    full = full.compute_returns_and_advantages(np.ones(B, np.float32))
    empty = jaxroll.RolloutStorage.create(transition(), T)
    sampling = {
        "key": ("key", jax.random.key(0)),
        "num_mini_batch": ("count?", 2),
        "remainder": ("choice", "error"),
    }
    more = {"num_epochs": ("count", 1), "shuffle": ("flag", True), "by": ("choice?", "step")}
    for name, call, arguments in (
        ("add", empty.add, {"transition": ("state", transition())}),
        ("insert_data_slice", empty.insert_data_slice, {"trajectory": ("state", full.data)}),
        (
            "compute_returns_and_advantages",
            full.compute_returns_and_advantages,
            {"last_values": rows},
        ),
        ("sample", full.sample, sampling),
        ("generate_batches", full.generate_batches, {**sampling, **more}),
        ("plan", full.plan, {**sampling, **more}),
        ("replace", full.replace, numbers),
        ("get_all_buffer_data", full.get_all_buffer_data, {"data_to_cpu": ("flag", False)}),
    ):
        traces = name not in ("generate_batches", "get_all_buffer_data")
        call = traced(call) if traces else call
        yield target(f"RolloutStorage.{name}", call, arguments)
    for name in ("reward", "value", "terminated", "log_prob"):
        call = lambda name=name, **value: empty.add(transition(**value))  # noqa: E731
        yield Target(
            "core",
            "RolloutStorage.add(Transition)",
            traced(call),
            {name: ("array", getattr(transition(), name))},
        )
    for name, (_, value) in numbers.items():
        call = lambda name=name, **value: full.update_storage_parameter(name, value[name])  # noqa: E731
        yield target("update_storage_parameter", call, {name: ("unit", value)})


@functools.cache
def agent(cls=jaxroll.PPO):
    """A small one."""
    return cls.create("CartPole-v1", num_envs=4, num_steps=4, hidden_sizes=(4,))


@functools.cache
def init_state():
    """Its first state."""
    return agent().init(jax.random.key(0))


def kind_of(hyperparameter):
    """The kind of a hyperparameter by what it says of itself."""
    if True in hyperparameter.choices:
        return "flag?"
    if hyperparameter.choices:
        return "choice?"
    if hyperparameter.name == "hidden_sizes":
        return "sizes?"
    if hyperparameter.name == "network":
        return "choice"
    if hyperparameter.name == "activation":
        return "choice?"
    if isinstance(hyperparameter.default, bool):
        return "flag"
    if hyperparameter.name == "shared_torso":
        return "flag?"
    if hyperparameter.is_static:
        return "count" if hyperparameter.default is not None else "count?"
    if hyperparameter.none is not None:
        return "bound?"
    return {"in [0, 1]": "unit", "> 0": "positive", ">= 0": "positive"}[hyperparameter.rule]


def learner():
    """Making agents, and their pure functions."""
    target = functools.partial(Target, "learner")
    sizes = {"num_envs": 4, "num_steps": 4}
    for name in ("PPO", "A2C", "DAAC", "IMPALA"):
        cls = getattr(jaxroll, name)
        ring = {"num_storages": 8, "batch_size": 4} if name == "IMPALA" else {}
        right = {key: h.default for key, h in cls.hyperparameters().items()} | sizes | ring
        arguments = {key: (kind_of(h), right[key]) for key, h in cls.hyperparameters().items()}
        arguments |= {"env": ("env", "CartPole-v1"), "policy": ("policy?", None)}
        arguments |= {} if ring else {"storage": ("function?", None)}
        yield target(f"{name}.create", cls.create, arguments)
    leaves = ("discount", "learning_rate", "clip_epsilon", "gae_lambda", "entropy_coef")
    known = jaxroll.PPO.hyperparameters()
    numbers = {key: (kind_of(known[key]), known[key].default) for key in leaves}
    yield target("PPO.replace", agent().replace, numbers)
    state = {"state": ("state", init_state())}
    key = {"key": ("key", jax.random.key(0))}
    yield target("agent.init", traced(agent().init), key)
    step = {**state, "reduction": ("choice", "fast")}
    yield target("agent.train_step", traced(agent().train_step), step)
    yield target("agent.act", agent().act, {**state, "deterministic": ("flag", True)})
    yield Target(
        "learner", "parallel.make_mesh", parallel.make_mesh, {"num_devices": ("count?", 1)}
    )


def collect():
    """Policies and rollouts."""
    target = functools.partial(Target, "collect")
    env = jaxroll.make_env("CartPole-v1")
    policy = agent().policy
    actor = jax.tree.map(lambda x: x[0], init_state().actors)
    params = init_state().learner.params
    yield target(
        "make_policy",
        jaxroll.make_policy,
        {
            "observation_space": ("space", env.observation_space),
            "action_space": ("space", env.action_space),
            "network": ("choice", "auto"),
            "hidden_sizes": ("sizes?", (4,)),
            "activation": ("choice?", "tanh"),
            "shared_torso": ("flag?", None),
            "core_size": ("count?", None),
            "squash": ("flag", False),
            "log_std_init": ("number", 0.0),
            "dtype": ("choice", np.float32),
        },
    )
    both = {"env": ("env", env), "policy": ("policy", policy)}
    key = {"key": ("key", jax.random.key(0))}
    many = {"num_envs": ("count", 2)}
    yield target("init_actor", traced(jaxroll.init_actor), {**both, **key, **many})
    yield target(
        "collect",
        traced(jaxroll.collect),
        {
            **both,
            "params": ("state", params),
            "actor": ("state", actor),
            "num_steps": ("count", T),
            "sequence_length": ("count?", None),
            "max_truncations": ("count?", None),
            "bootstrap": ("flag", True),
            "deterministic": ("flag", False),
        },
    )
    yield target(
        "evaluate",
        traced(jaxroll.evaluate),
        {
            **both,
            **key,
            "params": ("state", params),
            "num_episodes": ("count", 2),
            "num_envs": ("count?", 2),
            "deterministic": ("flag", True),
            "max_steps": ("count?", 5),
        },
    )


def envs():
    """Environments and spaces."""
    target = functools.partial(Target, "envs")
    env = {"env": ("env", jaxroll.make_env("CartPole-v1"))}
    pendulum = {"env": ("env", jaxroll.make_env("Pendulum-v1"))}
    yield target("make_env", jaxroll.make_env, {"name": ("env", "CartPole-v1")})
    yield target("list_envs", jaxroll.list_envs, {"source": ("choice?", "gymnax")})
    yield target("autoreset", jaxroll.autoreset, env)
    yield target(
        "check_env", jaxroll.check_env, {**env, "num_steps": ("count", 0), "seed": ("seed", 0)}
    )
    yield target("TimeLimit", wrappers.TimeLimit, {**env, "max_steps": ("count", 5)})
    yield target("FrameStack", wrappers.FrameStack, {**env, "num_frames": ("count", 2)})
    yield target("FlattenObservation", wrappers.FlattenObservation, env)
    yield target("ClipAction", wrappers.ClipAction, pendulum)
    yield target("spaces.Discrete", spaces.Discrete, {"n": ("count", 3)})
    yield target(
        "spaces.Box.create",
        spaces.Box.create,
        {"low": ("number", 0.0), "high": ("number", 1.0), "shape": ("sizes", (3,))},
    )
    yield target(
        "export_policy",
        lambda **arguments: jaxroll.export_policy(path=scratch() / "policy", **arguments),
        {
            "agent": ("state", agent()),
            "state": ("state", init_state()),
            "batch_size": ("count?", 2),
            "deterministic": ("flag", True),
        },
    )
    yield target(
        "load_policy",
        jaxroll.load_policy,
        {"path": ("path", exported()), "sha256": ("text?", None)},
    )


@functools.cache
def exported():
    """A policy's file."""
    return jaxroll.export_policy(agent(), init_state(), scratch() / "policy", platforms=("cpu",))


def scratch():
    """A new directory."""
    return pathlib.Path(tempfile.mkdtemp(prefix="jaxroll-fuzz-"))


@functools.cache
def saved():
    """A checkpoint."""
    path = scratch() / "saved"
    agent().save(init_state(), path)
    return path


def checkpoint():
    """Saving, loading, sweeps."""
    target = functools.partial(Target, "checkpoint")
    yield target(
        "agent.save",
        agent().save,
        {
            "state": ("state", init_state()),
            "path": ("path", scratch() / "to"),
            "overwrite": ("flag", True),
        },
    )
    yield target("agent.load", agent().load, {"path": ("path", saved())})
    yield target(
        "sweep",
        lambda **arguments: jaxroll.sweep(progress="silent", **arguments),
        {
            "agent": ("state", agent(NeverTrained)),
            "num_train_steps": ("steps", 64),
            "seeds": ("seed", 2),
            "hyperparameters": ("mapping?", {"learning_rate": [1e-3]}),
            "nonfinite": ("choice", "skip"),
        },
    )

    def sweep_over(learning_rate):
        grid = {"learning_rate": [learning_rate]}
        return jaxroll.sweep(agent(NeverTrained), 64, hyperparameters=grid, progress="silent")

    yield target("sweep over", sweep_over, {"learning_rate": ("positive", 1e-3)})


def report():
    """Histories, plots, loggers, progress."""
    target = functools.partial(Target, "report")
    history = jaxroll.History([{"step": 1, "loss": 0.5}])
    rows = scratch() / "metrics.jsonl"
    rows.write_text('{"step": 1}\n')
    path = {"path": ("path", rows)}
    yield target("History.read", jaxroll.History.read, path)
    yield target("History.append", jaxroll.History().append, {"row": ("mapping", {"step": 1})})
    yield target("History.last", history.last, {"name": ("text", "loss")})
    yield target("History.concat", jaxroll.History.concat, {"histories": ("state", [history])})
    yield target("History.plot", lambda name: history.plot(name), {"name": ("text", "loss")})
    plot = functools.partial(history.plot, "loss")
    options = {"x": ("text", "step"), "band": ("choice?", "range"), "smooth": ("count", 1)}
    yield target("History.plot", plot, {**options, "out": ("path?", None)})
    yield target("plot_runs", train.plot_runs, {"runs": ("state", history)})
    for logger in (train.JsonlLogger, train.CsvLogger, train.TensorBoardLogger):
        where = "directory" if logger is train.TensorBoardLogger else "path"
        file = scratch() / "rows"
        arguments = {where: ("path", file), "resume_from_step": ("steps?", 3)}
        yield target(logger.__name__, logger, arguments)
    loggers = {"loggers": ("function", ()), "directory": ("path?", scratch())}
    yield target("make_loggers", train.make_loggers, loggers)
    yield target(
        "Progress",
        train.Progress,
        {"total_steps": ("steps", 10), "mode": ("choice", "silent")},
    )
    progress = train.Progress(10, mode="silent")
    yield target("Progress.update", progress.update, {"step": ("steps", 1)})


def loop():
    """Runs: in Python and by config."""
    target = functools.partial(Target, "loop")
    own = agent(NeverTrained)
    steps = {"num_train_steps": ("steps", 64)}
    train = lambda **arguments: own.train(**arguments)  # noqa: E731
    yield target(
        "agent.train",
        train,
        {
            **steps,
            "seed": ("seed", 0),
            "state": ("state?", None),
            "mesh": ("state?", None),
            "reduction": ("choice", "fast"),
            "checkpoint_dir": ("path?", None),
            "checkpoint_interval": ("steps?", None),
            "keep_checkpoints": ("steps", 3),
            "keep_best": ("steps", 0),
            "resume": ("flag", False),
            "init_model_path": ("path?", None),
            "callbacks": ("function", ()),
            "loggers": ("function?", ()),
            "log_interval": ("steps?", 64),
            "eval_interval": ("steps?", None),
            "num_eval_episodes": ("count", 2),
            "eval_env": ("env?", None),
            "target_return": ("number?", None),
            "time_budget": ("bound?", None),
            "nonfinite": ("choice", "stop"),
            "progress": ("choice", "silent"),
            "config": ("mapping?", None),
        },
    )
    yield target(
        "agent.eval",
        agent().eval,
        {
            "state": ("state", init_state()),
            "num_episodes": ("count", 1),
            "seed": ("seed", 0),
            "deterministic": ("flag", True),
            "env": ("env?", None),
        },
    )
    settings = {
        "agent": ("choice", "ppo"),
        "env": ("env", "CartPole-v1"),
        **steps,
        "seed": ("seed", 0),
        "num_seeds": ("count", 1),
        "devices": ("count?", None),
        "reduction": ("choice", "fast"),
        "hyperparameters": ("mapping", {}),
        "env_options": ("mapping", {}),
    }
    make = lambda **arguments: jaxroll.DistributedTrainer(arguments)  # noqa: E731
    yield target("DistributedTrainer", make, settings)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one wrong argument led to."""

    area: str
    callable: str
    argument: str
    value: str
    verdict: str  # clear, unclear, accepted
    detail: str

    def __str__(self):
        return f"{self.verdict:9}{self.callable}({self.argument}={self.value})  {self.detail}"


def classify(target, name, value):
    """Call a target with one wrong argument."""
    arguments = {key: right for key, (_, right) in target.arguments.items()} | {name: value}
    found = functools.partial(Finding, target.area, target.name, name, shown(value))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.call(**arguments)
    except Reached:
        return found("accepted", "")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = frames[-1].filename.startswith(PACKAGE) and "raise" in (frames[-1].line or "")
        text = " ".join(str(error).split())
        kind = type(error).__name__
        words = (name, name.removesuffix("s"), shown(value), str(value)[:30], type(value).__name__)
        named = any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for word in words)
        if kind == "AttributeError" or not own or not named:
            place = f"{pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno}"
            return found("unclear", f"{kind} at {place}: {text[:160]}")
        return found("clear", f"{kind}: {text[:160]}")
    return found("accepted", "")


def wrong_values(kind):
    """The wrong values of a kind; for an optional one, None is right."""
    optional = kind.endswith("?")
    return [v for v in WRONG[kind.rstrip("?")] if not (optional and v is None)]


def is_meant(target, name, value):
    """Whether the value is on the list of exceptions."""
    return any(
        re.fullmatch(callables, target.name)
        and re.fullmatch(arguments, name)
        and shown(value) in values
        for (callables, arguments), values in MEANT.items()
    )


@functools.cache
def findings(area):
    """All findings of an area; a right call must pass first."""
    result = []
    for target in (t for t in targets() if t.area == area):
        for name, (kind, _) in target.arguments.items():
            for value in wrong_values(kind):
                if not is_meant(target, name, value):
                    result.append(classify(target, name, value))
    return result


def summary(area):
    """Counts by verdict."""
    return collections.Counter(finding.verdict for finding in findings(area))


@pytest.mark.slow
def test_right_arguments_are_right():
    """Else the error for a wrong argument could be that of another."""
    for target in targets():
        with contextlib.suppress(Reached):
            target.call(**{name: value for name, (_, value) in target.arguments.items()})


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    """Where a path that should have been refused can do no harm."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("area", AREAS)
def test_wrong_arguments_are_not_accepted(area):
    accepted = [str(f) for f in findings(area) if f.verdict == "accepted"]
    assert len(accepted) <= CEILINGS[area][0], "\n".join(accepted)


@pytest.mark.slow
@pytest.mark.parametrize("area", AREAS)
def test_few_errors_are_unclear(area):
    unclear = [str(f) for f in findings(area) if f.verdict != "clear"]
    most = max(CEILINGS[area][1], MAX_UNCLEAR * len(findings(area)))
    assert len(unclear) <= most, "\n".join(unclear)


if __name__ == "__main__":
    directory = pathlib.Path(sys.argv[1]).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    os.chdir(scratch())
    for area in sys.argv[2:] or AREAS:
        rows = sorted(f for f in map(str, findings(area)) if not f.startswith("clear"))
        head = ", ".join(f"{count} {verdict}" for verdict, count in summary(area).items())
        (directory / f"fuzz_{area}.txt").write_text("\n".join([head, *rows]) + "\n")
        print(f"{area}: {head}")
