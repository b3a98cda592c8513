"""Pytrees that keep their dtypes, and numbers that are leaves."""

import dataclasses
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxroll.types import Minibatch, Node, Targets, Transition, as_leaf


class Pair(Node):
    number: Any
    tree: Any = None
    name: str = struct.field(pytree_node=False, default="a")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, "int32"),
        (0.5, "float32"),
        (True, "bool"),
        (np.float64(2), "float32"),
        (np.uint8(1), "uint32"),
    ],
)
def test_numbers_become_small_arrays(value, dtype):
    leaf = as_leaf(value)
    assert isinstance(leaf, np.ndarray)
    assert (leaf.dtype, leaf.shape) == (np.dtype(dtype), ())
    assert as_leaf({"a": value})["a"].dtype == leaf.dtype


def test_arrays_and_tracers_pass_unchanged():
    x = np.arange(3)
    assert as_leaf(x) is x
    assert jax.jit(lambda x: as_leaf(x) + 1)(1.0) == 2


def test_replace_keeps_the_dtype_and_costs_no_second_trace():
    traces = []

    @jax.jit
    def double(pair):
        traces.append(1)
        return pair.number * 2

    pair = Pair(as_leaf(0.5))
    for value in (1, 2.5, np.float64(3), True, jnp.float32(4)):
        changed = pair.replace(number=value)
        assert changed.number.dtype == jnp.float32
        assert double(changed) == 2 * float(value)
    assert len(traces) == 1
    assert pair.number == 0.5


def test_static_fields_are_part_of_the_structure():
    pair = Pair(as_leaf(1.0), tree={"x": jnp.ones(2)})
    assert len(jax.tree.leaves(pair)) == 2
    other = pair.replace(name="b")
    assert other.name == "b"
    assert jax.tree.structure(pair) != jax.tree.structure(other)


def test_nodes_are_frozen():
    with pytest.raises(AttributeError):
        Pair(1).number = 2


def test_fields_that_are_none_cost_nothing_and_axes_may_stand_for_leaves():
    step = Transition(obs=np.ones(2), action=np.ones(2), reward=np.ones(2), terminated=np.ones(2))
    assert len(jax.tree.leaves(step)) == 4
    batch = Minibatch(step, Targets(np.ones(2), np.ones(2)), np.ones(2))
    axes = jax.tree.map(lambda _: 0, batch)
    total = jax.vmap(lambda b: b.targets.returns + b.transition.reward, in_axes=(axes,))(batch)
    assert total.tolist() == [2, 2]


def test_pytrees_print_shapes_dtypes_and_bytes():
    data = jax.eval_shape(lambda: jnp.zeros((128, 64, 84, 84, 4), jnp.uint8))
    rows = jnp.zeros((128, 64))
    trajectory = Transition(obs={"image": data}, action=rows, reward=rows, terminated=rows > 0)
    assert repr(trajectory).splitlines() == [
        "Transition(231.3 MB",
        "  obs.image: uint8[128, 64, 84, 84, 4]",
        "  action: float32[128, 64]",
        "  reward: float32[128, 64]",
        "  terminated: bool[128, 64])",
    ]
    assert repr(Targets(rows, rows)) == (
        "Targets(65.5 kB, advantages: float32[128, 64], returns: float32[128, 64])"
    )
    assert repr(Pair(jax.random.key(0))) == "Pair(8 B, number: key<fry>[], name='a')"
    assert repr(Pair(jnp.int32(3), tree=True)) == "Pair(number: 3, tree: True, name='a')"
    inner = Pair(rows, tree=[np.zeros(3)] * 100)
    assert repr(Pair(inner, tree={"a": rows})).splitlines() == [
        "Pair(67.9 kB",
        "  number.number: float32[128, 64]",
        "  number.tree: 100 arrays, 2.4 kB",
        "  number.name='a'",
        "  tree.a: float32[128, 64]",
        "  name='a')",
    ]


def test_tracers_and_donated_arrays_print_shapes():
    seen = []
    jax.jit(lambda pair: seen.append(repr(pair)))(Pair(1.0))
    assert seen == ["Pair(4 B, number: float32[], name='a')"]
    pair = Pair(jnp.float32(1))
    jax.jit(lambda pair: pair, donate_argnums=0)(pair)
    assert repr(pair) == "Pair(4 B, number: float32[], name='a')"


def test_a_repr_of_ones_own_is_kept():
    class Named(Node):
        x: Any

        def __repr__(self):
            return "named"

    class Child(Named):
        y: Any

    assert repr(Child(1, 2)) == "named"


@pytest.mark.parametrize(
    "name",
    [
        "Transition",
        "Targets",
        "Minibatch",
        "PolicyOutput",
        "TimeStep",
        "FinalRows",
        "ActorState",
        "Rollout",
        "EpisodeSums",
        "EpisodeStatistics",
        "Unrolls",
        "RingCounters",
        "MinibatchPlan",
        "RolloutStorage",
        "DistributedStorage",
        "LearnerState",
        "TrainState",
    ],
)
def test_help_describes_every_field(name):
    modules = ("types", "storages", "storages.minibatches", "agents.base")
    modules = [importlib.import_module(f"jaxroll.{module}") for module in modules]
    kind = next(getattr(module, name) for module in modules if hasattr(module, name))
    for field in dataclasses.fields(kind):
        assert re.search(rf"^ +{field.name}: ", kind.__doc__, re.MULTILINE), field.name
