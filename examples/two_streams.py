"""Two streams of rewards: a storage with a critic, a discount and a λ for each.

"extrinsic" ends with the episode; "intrinsic", such as a bonus for what is new, does not. Each
stream has its own returns and advantages. Run it: `python examples/two_streams.py`.
"""

import argparse

import jax
import jax.numpy as jnp

import jaxroll

NUM_ENVS = 4


def main():
    """Fill a storage with random numbers, and look at the targets of each stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args()
    zeros = jnp.zeros(NUM_ENVS)
    streams = {"extrinsic": zeros, "intrinsic": zeros}
    example = jaxroll.Transition(
        obs=jnp.zeros((NUM_ENVS, 3)),
        action=jnp.zeros(NUM_ENVS, jnp.int32),
        reward=streams,
        terminated=jnp.zeros(NUM_ENVS, bool),
        value=streams,
    )
    storage = jaxroll.RolloutStorage.create(
        example,
        num_steps=args.steps,
        discount={"extrinsic": 0.999, "intrinsic": 0.9},
        episodic={"extrinsic": True, "intrinsic": False},
    )
    for key in jax.random.split(jax.random.key(0), args.steps):
        reward_key, end_key = jax.random.split(key)
        step = example.replace(
            reward={
                "extrinsic": jnp.ones(NUM_ENVS),
                "intrinsic": jax.random.uniform(reward_key, (NUM_ENVS,)),
            },
            terminated=jax.random.bernoulli(end_key, 0.1, (NUM_ENVS,)),
        )
        storage = jaxroll.storages.add_donated(storage, step)  # compiled, writes in place
    storage = storage.compute_returns_and_advantages(last_values=streams).check()
    for name, returns in storage.targets.returns.items():
        print(f"{name:9}  mean return {returns.mean():.2f}")


if __name__ == "__main__":
    main()
