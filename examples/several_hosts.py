"""Several hosts: the same program on each, one run.

Run it in two terminals, with `--process-id 0` and `--process-id 1`:
`python examples/several_hosts.py --coordinator 127.0.0.1:9911 --num-processes 2 --process-id 0`.
On Slurm, MPI and TPU pods leave all three out and add `--join`. If a process dies the others leave
with exit code 75; start all of them again and the run goes on.
"""

import argparse

import jaxroll


def main():
    """Join the others, then train on every device there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--out", default="runs/several_hosts", help="seen by all hosts")
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--join", action="store_true", help="let JAX find the other processes")
    args = parser.parse_args()
    if args.join or args.coordinator is not None:
        # Before anything touches a device.
        jaxroll.parallel.initialize(args.coordinator, args.num_processes, args.process_id)
    ppo = jaxroll.PPO.create("CartPole-v1", num_actors=8, num_envs=64)
    ppo.train(
        args.steps,
        mesh=jaxroll.parallel.make_mesh(),
        reduction="exact",
        checkpoint_dir=args.out,
        checkpoint_interval=20_000,
        resume=True,
        own_process=True,
    )


if __name__ == "__main__":
    main()
