"""Training: dispatch an agent's program, then evaluation, checkpoints, logs and stops by hooks.

Knows the agents' protocol only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh

from jaxroll.train.history import History
from jaxroll.train.hooks import HOOKS, Event
from jaxroll.train.options import Options
from jaxroll.train.preflight import check_start
from jaxroll.train.run import Run


def train(
    agent: Any,
    num_train_steps: int,
    *,
    state: Any = None,
    mesh: Mesh | None = None,
    num_learners: int | None = None,
    checkpoint_dir: str | Path | None = None,
    resume: bool = False,
    eval_env: Any = None,
    callbacks: Iterable[Callable[[Event], Any]] = (),
    config: Mapping[str, Any] | None = None,
    on_begin: Callable[[], Any] = lambda: None,
    on_signal: Literal["exit", "return"] = "exit",
    own_process: bool = False,
    **options: Any,
) -> tuple[Any, History]:
    """Train an agent until `num_train_steps` environment steps.

    Args:
      agent: a DistributedAgent.
      num_train_steps: of the whole run; what was done before a resume counts. A step is a row of a
        rollout: where host environments reset on the next step, rows that only reset count too,
        and `valid_fraction` tells how many did not.
      state: a TrainState to start from; it is copied, not destroyed. Host environments cannot be
        set back to it: they start new episodes, seeded from the actors' keys.
      mesh: from `jaxroll.parallel.make_mesh`; None: one device.
      num_learners: must be the mesh's size, for every device learns; better left out.
      checkpoint_dir: the run's directory: checkpoints, metrics.jsonl, config. None: nothing is
        written. One more checkpoint is always at the end.
      resume: go on from the newest intact checkpoint in `checkpoint_dir`.
      eval_env: evaluate on this environment instead of the agent's; on the device or on the host.
      callbacks: called with an `Event` after each row; a true result stops the run, on any process
        all of them.
      config: saved with each checkpoint, beside the agent's hyperparameters.
      on_begin: called on process 0 when the directory is this run's: locked and, where there is
        something to restore, restored. Again if the directory was deleted meanwhile.
      on_signal: after Ctrl-C, SIGTERM or SIGHUP the run is saved, and "exit" raises
        `KeyboardInterrupt` or `SystemExit`, so that a script ends; "return" returns as at any other
        stop. Ctrl-C in an interactive session returns.
      own_process: end the process itself at a second signal, when a first finds nothing to save, or
        when another process of the run is gone (exit code `parallel.PEER_LOST`).
      **options: values, as `jaxroll.train.Options` has them: seed, reduction, log_interval,
        eval_interval, num_eval_episodes, checkpoint_interval, keep_checkpoints, keep_best,
        target_return, time_budget, nonfinite, init_model_path, loggers, progress. Intervals are
        rounded up to whole iterations.

    Returns:
      (state, history): `history.stopped_by` says why it ended ("steps", "target_return",
      "time_budget", "callback", "SIGINT", "SIGHUP", "SIGTERM"), `history.stopped_at` at which step
      and `history.saved_step` which is the newest on disk.
    """
    checked = Options.make(num_train_steps=num_train_steps, **options)
    start = check_start(
        agent,
        checked,
        state=state,
        mesh=mesh,
        num_learners=num_learners,
        checkpoint_dir=checkpoint_dir,
        resume=resume,
        eval_env=eval_env,
        callbacks=callbacks,
        config=config,
        on_begin=on_begin,
        on_signal=on_signal,
        own_process=own_process,
    )
    run = Run(agent, checked, start)
    with contextlib.ExitStack() as stack:
        run.claim_directory(stack)
        run.open_program(stack)
        run.make_state()
        run.open_logs(stack)
        run.compile()
        while not run.at_end and run.stop is None:
            run.advance()
            for hook in HOOKS:
                hook(run)
        run.finish()
    interrupts = run.interrupts
    is_ours = interrupts.own_process or (interrupts.name == "SIGINT" and hasattr(sys, "ps1"))
    if on_signal == "exit" and not is_ours:
        interrupts.check()
    return run.state, run.history
