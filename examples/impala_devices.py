"""IMPALA on several devices: the same learning curve as on one.

On a CPU the devices are threads. Run it: `python examples/impala_devices.py --devices 8`.
"""

import argparse

import jax

import jaxroll
from jaxroll import parallel


def main():
    """Train on one device and on several, and compare the params."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--devices", type=int, default=8, choices=(1, 2, 4, 8))
    args = parser.parse_args()
    # Before the first use of a device; GPUs and TPUs need no such line.
    jax.config.update("jax_num_cpu_devices", args.devices)
    impala = jaxroll.IMPALA.create(
        "CartPole-v1", num_actors=8, num_envs=32, num_storages=64, batch_size=16
    )
    params = []
    for count in (1, args.devices):
        mesh = parallel.make_mesh(count)
        state, history = impala.train(args.steps, mesh=mesh, reduction="exact")
        params.append(jax.device_get(state.learner.params))
        print(f"{count} devices: return {history.last('episode_return'):.1f}")
    apart = jax.tree.map(lambda x, y: float(abs(x - y).max()), *params)
    print("largest difference between the params:", max(jax.tree.leaves(apart)))


if __name__ == "__main__":
    main()
