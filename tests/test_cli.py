"""The command line as a user types it: results, messages, exit codes."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from jaxroll.agents import AGENTS
from jaxroll.cli import main, make_parser, parse
from jaxroll.commands import claim_directory, start
from jaxroll.config import Config, parse_value
from jaxroll.train import History
from jaxroll.train.checkpoint import CheckpointWarning
from jaxroll.train.options import fields_of

TINY = [
    *("--num-envs", "4", "--num-train-steps", "256", "--set", "num_steps=8"),
    *("--set", "hidden_sizes=[8]", "--set", "num_mini_batch=2", "--set", "num_epochs=1"),
    *("--set", "log_interval=64", "--set", "num_test_episodes=4"),
]


def read_rows(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k not in ("fps", "total_time")} for row in rows]


@pytest.fixture(autouse=True)
def cache():
    """What --no-cache turns off is on again for the next test."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    yield
    if not jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    assert main(["train", *TINY, "--no-cache", "--quiet", "--out", str(out)]) == 0
    return out


# Help and listings.


@pytest.mark.parametrize("command", sorted(make_parser()[1]))
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: jaxroll {command}")


def test_no_command_shows_help_and_is_a_mistake(capsys):
    assert main([]) == 2
    assert "exit codes:" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from jaxroll.cli import main; main(['--help']); main(['train', '--help']);"
        "heavy = {'jax', 'numpy', 'rich', 'flax', 'matplotlib'} & set(sys.modules);"
        "sys.exit(len(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


@pytest.mark.parametrize("command", [["train"], ["resume", "run"]])
def test_every_setting_has_a_flag(command):
    flags = {"log_interval": 64, "time_budget": 1.5, "loggers": "csv", "target_return": None}
    words = [f"--{name.replace('_', '-')}={str(x).lower()}" for name, x in flags.items()]
    given = vars(parse([*command, *words]))
    assert flags.items() <= given.items()
    own = {"agent", "env", "out", "seed", "num_seeds"} if command[0] == "resume" else set()
    help = make_parser()[1][command[0]].format_help()
    for name in fields_of(Config).keys() - own - {"agent", "env"}:
        assert f"--{name.replace('_', '-')}" in help
        assert name in flags or name not in given  # what is not typed stays as the config has it


def test_agents_lists_every_hyperparameter_with_its_default_and_help(capsys):
    assert main(["agents"]) == 0
    assert set(AGENTS) <= set(capsys.readouterr().out.split())
    assert main(["agents", "impala"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for h in AGENTS["impala"].hyperparameters().values():
        default = "none" if h.default is None else h.default
        assert f"{h.name} {default} {h.help}" in text


def test_envs_lists_names_that_can_be_made(capsys):
    assert main(["envs", "gymnax"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out.split()


# Mistakes.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command .trian.. Did you mean 'train'"),
        (["--nothing", "train"], "train does not take '--nothing'"),
        (["train", "--num-env", "4"], "Did you mean '--num-envs'"),
        (["train", "pp0"], "agent must be one of .*, got .pp0.. Did you mean .ppo."),
        (["train", "CartPole-v1"], "is an environment. Use: jaxroll train ppo CartPole-v1"),
        (["train", "ppo", "CartPol-v1"], "Did you mean 'CartPole-v1'"),
        (["train", "--set", "learning_rate"], "--set takes KEY=VALUE"),
        (["train", "--set", "learning_rat=1"], "Did you mean 'learning_rate'"),
        (["train", "--set", "learning_rate=-1"], "learning_rate must be > 0, got -1"),
        (["train", "--set", "learning_rate=fast"], "learning_rate must be a number"),
        (["train", "--num-train-steps", "many"], "num_train_steps must be an integer"),
        (["train", "--set", "num_mini_batch=7"], "num_mini_batch must divide"),
        (["train", "--devices", "2"], "--num-actors 2"),
        (["train", "--devices", "16", "--num-actors", "16"], "num_devices must be between"),
        (["train", "--config", "nowhere.toml"], "no config at nowhere.toml"),
        (["train", "--process-id", "1"], "together"),
        (["train", "--set", "hyperparameters=3"], "hyperparameters.NAME=VALUE"),
        (["train", "--set", "env_options=3", "--set", "env_options.x=1"], "env_options.NAME=VALUE"),
        (["train", "--out", "/dev/null/run"], "cannot make the run directory /dev/null/run"),
        (["train", "--set", "env_options.lenght=3"], "lenght"),
        (["train", "--set", "env_options.max_steps_in_episode=abc"], "must be an integer"),
        (["train", "--set", "env_options.max_steps_in_episode=-3"], "must be at least 1, got -3"),
        (["train", "--num-envs", str(2**40)], "num_envs must be below 2"),
        (["train", "--set", f"num_steps={2**33}"], "num_steps must be below 2"),
        (["train", "--set", f"num_epochs={2**40}"], "num_epochs must be below 2"),
        (["train", "--num-envs", str(2**20), "--set", "num_steps=4096"], "num_steps must be below"),
        (["train", "--set", "hidden_sizes=[1000000, 1000000]"], "must fit into this machine"),
        (["train", "--set", "agent=3"], "agent must be one of .*, got 3"),
        (["train", "--set", "learning_rate=true"], "learning_rate must be a number, got True"),
        (["train", "--out", "gs://bucket/run"], "out must be a path on this machine"),
        (["eval", "nowhere"], "no config at nowhere"),
        (["resume", "nowhere"], "no config at nowhere"),
        (["plot", "runs/nowhere"], "there is no run at runs/nowhere"),
        (["agents", "pp"], "Did you mean 'ppo'"),
        (["envs", "gymnasum"], "Did you mean 'gymnasium'"),
        (["eval"], "required: RUN"),
    ],
)
def test_a_mistake_is_one_message_and_code_2_and_writes_nothing(
    argv, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert re.search(message, err)
    assert err.startswith("jaxroll: ")
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_traceback_is_shown_on_request(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--traceback", "--set", "learning_rate=-1"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("JAXROLL_DEBUG", "1")
    assert main(["train", "--set", "learning_rate=-1"]) == 2
    assert "Traceback" in capsys.readouterr().err


_wild = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(-10, 10),
    st.text(st.characters(codec="utf-8"), max_size=6),
    st.lists(st.integers(-1, 8) | st.text(max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)


def make_trainer(config):
    """A trainer, or None where a check of ours refuses the config."""
    from jaxroll.cli import _is_ours
    from jaxroll.trainer import DistributedTrainer

    try:
        return DistributedTrainer(config)
    except (ValueError, TypeError) as error:
        if not _is_ours(error):
            raise


RELAXED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@hypothesis_settings(**RELAXED, max_examples=60)
@given(agent=st.sampled_from(sorted(AGENTS)), data=st.data())
def test_no_hyperparameter_gets_past_our_checks_into_jax(agent, data):
    names = st.sampled_from(list(AGENTS[agent].hyperparameters()))
    given = data.draw(st.dictionaries(names, _wild, min_size=1, max_size=2))
    make_trainer({"agent": agent, "hyperparameters": given})


_OPTIONS = {
    "CartPole-v1": ["max_steps_in_episode", "gravity", "tau"],
    "Acrobot-v1": ["available_torque", "torque_noise_max"],
    "Catch-bsuite": ["rows", "columns", "max_steps_in_episode"],
    "FourRooms-misc": ["use_visual_obs", "pos_fixed", "fail_prob"],
    "FrozenLake-misc": ["desc", "map_name", "reward_schedule", "success_rate"],
}


@hypothesis_settings(**RELAXED, max_examples=100)
@given(env=st.sampled_from(sorted(_OPTIONS)), data=st.data())
def test_no_option_of_an_environment_gets_past_our_checks_into_jax(env, data):
    names = st.sampled_from(_OPTIONS[env])
    given = data.draw(st.dictionaries(names, _wild, min_size=1, max_size=2))
    make_trainer({"env": env, "env_options": given})


@pytest.mark.slow
@hypothesis_settings(**RELAXED, max_examples=40)
@given(agent=st.sampled_from(sorted(AGENTS)), env=st.sampled_from(sorted(_OPTIONS)), data=st.data())
def test_what_our_checks_let_pass_can_be_traced(agent, env, data):
    from jaxroll.cli import _is_ours

    hyperparameters = st.sampled_from(list(AGENTS[agent].hyperparameters()))
    config = {
        "agent": agent,
        "env": env,
        "hyperparameters": data.draw(st.dictionaries(hyperparameters, _wild, max_size=2)),
        "env_options": data.draw(
            st.dictionaries(st.sampled_from(_OPTIONS[env]), _wild, max_size=1)
        ),
    }
    trainer = make_trainer(config)
    if trainer is None:
        return
    try:
        trainer.check()
    except (ValueError, TypeError) as error:
        if not _is_ours(error):
            raise


# Runs.


def test_a_run_has_its_config_metrics_curve_and_checkpoint(run):
    assert {p.name for p in run.iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "curve.png",
        "checkpoints",
    }
    config = Config.read(run)
    assert (config.agent, config.env, config.num_train_steps) == ("ppo", "CartPole-v1", 256)
    assert config.hyperparameters["num_envs"] == 4
    assert [row["step"] for row in read_rows(run)] == [64, 128, 192, 256]


def test_the_same_command_gives_the_same_rows_in_a_directory_of_its_own(run, capsys):
    argv = ["train", *TINY, "--no-cache", "--set", "progress=lines", "--out", str(run)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    again = run.with_name("first-2")
    assert str(again) in out
    assert re.search(r"return +[\d.]+ ± [\d.]+ over 4 deterministic episodes", out)
    assert read_rows(again) == read_rows(run)


def test_a_config_file_reproduces_a_run(run):
    out = run.with_name("copy")
    argv = ["train", "--config", str(run / "config.toml"), "--no-cache", "--quiet"]
    assert main([*argv, "--out", str(out)]) == 0
    assert read_rows(out) == read_rows(run)


def test_quiet_prints_nothing(run, capfd):
    argv = ["train", "--config", str(run), "--no-cache", "--quiet", "--num-train-steps", "64"]
    assert main([*argv, "--out", str(run.with_name("quiet"))]) == 0
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_eval_plays_what_was_trained(run, capsys):
    assert main(["eval", str(run), "--num-episodes", "6", "--no-cache"]) == 0
    first = capsys.readouterr().out
    assert re.search(r"episodes +6 deterministic, seed 0", first)
    assert main(["eval", str(run), "--num-episodes", "6", "--no-cache"]) == 0
    assert capsys.readouterr().out == first
    assert main(["eval", str(run), "--num-episodes", "6", "--stochastic", "--no-cache"]) == 0
    assert "6 stochastic" in capsys.readouterr().out


def test_eval_plays_the_best_checkpoint_if_asked(run, capsys):
    out = run.with_name("best")
    argv = ["train", "--config", str(run), "--no-cache", "--quiet", "--out", str(out)]
    argv += ["--set", "eval_interval=64", "--set", "num_eval_episodes=2", "--set", "keep_best=1"]
    assert main(argv) == 0
    assert main(["eval", str(out), "--num-episodes", "4", "--best", "--no-cache"]) == 0
    capsys.readouterr()
    assert main(["eval", str(run), "--best", "--no-cache"]) == 2
    assert "none is the best" in capsys.readouterr().err


def test_resume_goes_on_to_the_same_end(run, capsys):
    parts, whole = run.with_name("parts"), run.with_name("whole")
    common = ["train", "--config", str(run), "--set", "decay_steps=384", "--no-cache", "--quiet"]
    assert main([*common, "--num-train-steps", "128", "--out", str(parts)]) == 0
    assert main([*common, "--num-train-steps", "384", "--out", str(whole)]) == 0
    capsys.readouterr()
    assert main(["resume", str(parts), "--num-train-steps", "384", "--no-cache"]) == 0
    assert "going on" in capsys.readouterr().out
    assert read_rows(parts) == read_rows(whole)
    assert Config.read(parts).num_train_steps == 384


def test_a_prolonged_run_says_from_where_its_learning_rate_is_0(run, capsys):
    out = run.with_name("longer")
    argv = ["train", "--config", str(run), "--set", "decay_steps=256", "--no-cache", "--quiet"]
    assert main([*argv, "--out", str(out)]) == 0
    assert "learning rate is 0" not in capsys.readouterr().err
    assert main(["resume", str(out), "--num-train-steps", "320", "--no-cache"]) == 0
    assert "is 0 from step 256 on, and the run ends at 320" in capsys.readouterr().err
    assert Config.read(out).hyperparameters["decay_steps"] == 256


def test_resume_takes_settings_and_says_what_is_another_run(run, capsys):
    out = run.with_name("set")
    argv = ["train", "--config", str(run), "--no-cache", "--quiet", "--num-train-steps", "128"]
    assert main([*argv, "--out", str(out)]) == 0
    again = ["resume", str(out), "--num-train-steps", "256", "--no-cache", "--quiet", "--set"]
    before = (out / "config.toml").read_text()
    assert main([*again, "seed=1"]) == 2
    assert "the run has seed 0, and goes on with it; got seed 1" in capsys.readouterr().err
    assert (out / "config.toml").read_text() == before
    with pytest.warns(CheckpointWarning, match="goes on with learning_rate = 0.01, before 0.002"):
        assert main([*again, "learning_rate=0.01", "--set", "time_budget=1e-3"]) == 0
    config = Config.read(out)
    assert (config.time_budget, config.hyperparameters["learning_rate"]) == (1e-3, 0.01)
    assert main([*again, "learning_rat=1"]) == 2


def test_a_config_of_ones_own_names_its_directory_and_that_of_a_run_does_not(
    run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "configs"
    Config.read(run).replace(out="mine").write(mine / "mine.toml")
    argv = ["train", "--num-train-steps", "64", "--no-cache", "--quiet", "--config"]
    assert main([*argv, str(mine / "mine.toml")]) == 0
    assert main([*argv, str(run)]) == 0
    assert main([*argv, str(run / "config.toml")]) == 0
    made = {"configs", "mine", "runs", "runs/ppo-CartPole-v1-0", "runs/ppo-CartPole-v1-0-2"}
    found = [*tmp_path.iterdir(), *(tmp_path / "runs").iterdir()]
    assert {str(path.relative_to(tmp_path)) for path in found} == made


def test_of_many_that_start_at_once_each_has_a_directory_of_its_own(tmp_path):
    wanted = tmp_path / "runs" / "one"
    for _ in range(5):
        with ThreadPoolExecutor(16) as pool:
            claimed = list(pool.map(claim_directory, [str(wanted)] * 16))
        assert len(set(claimed)) == 16
        shutil.rmtree(wanted.parent)
    (tmp_path / "runs").mkdir()
    wanted.touch()  # a file is no directory
    assert claim_directory(str(wanted)) == f"{wanted}-2"


def test_the_cache_is_really_off(monkeypatch):
    import jax

    monkeypatch.setattr(jax.config, "update", lambda name, value: asked.append((name, value)))
    asked = []
    start(cache=False)  # the directory that conftest.py chose must not be used either
    assert asked == [("jax_enable_compilation_cache", False)]


def test_plot_leaves_out_runs_without_metrics(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "curve.png"
    assert main(["plot", str(run), str(tmp_path / "empty"), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert out.exists()
    assert captured.err == f"jaxroll: {tmp_path / 'empty'} has no metrics and is left out.\n"
    assert main(["plot", str(tmp_path / "empty")]) == 2
    assert "no metrics to draw yet" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "empt")]) == 2
    assert f"Did you mean '{tmp_path / 'empty'}'" in capsys.readouterr().err


def test_plot_draws_runs_and_columns(run, tmp_path, capsys):
    out = tmp_path / "two.svg"
    argv = ["plot", str(run), "episode_return", "fps", "--out", str(out), "--band", "none"]
    assert main(argv) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert "<svg" in out.read_text()
    assert main(["plot", str(run), "episode_retrun"]) == 2
    assert "Did you mean 'episode_return'" in capsys.readouterr().err


@pytest.mark.slow
def test_several_seeds_share_one_file(run, capsys):
    out = run.with_name("seeds")
    argv = ["train", "--config", str(run), "--num-seeds", "2", "--no-cache", "--out", str(out)]
    assert main(argv) == 0
    assert "of each seed" in capsys.readouterr().out
    rows = read_rows(out)
    assert [(row["step"], row["seed"]) for row in rows] == [
        (step, seed) for step in (64, 128, 192, 256) for seed in (0, 1)
    ]
    solo = read_rows(run)
    member = [row for row in rows if row["seed"] == 0]
    np.testing.assert_allclose(
        [row["loss"] for row in member], [row["loss"] for row in solo], rtol=1e-3
    )
    assert main(["eval", str(out), "--no-cache"]) == 0
    assert "seed 1" in capsys.readouterr().out


def test_a_gradient_that_is_not_finite_is_code_1(run, capsys):
    argv = ["train", "--config", str(run), "--no-cache", "--set", "learning_rate=1e38"]
    assert main([*argv, "--set", "max_grad_norm=none", "--out", str(run.with_name("bad"))]) == 1
    err = capsys.readouterr().err
    assert "not finite" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("word", ["no", "off", "false"])
def test_words_that_mean_no_turn_a_flag_off(word):
    assert Config().set({"shared_torso": parse_value(word)}).hyperparameters == {
        "shared_torso": False
    }


@pytest.mark.slow
def test_the_dtype_of_networks_is_set_by_config_and_command(tmp_path, capsys):
    argv = ["train", *TINY, "--no-cache", "--quiet", "--out", str(tmp_path / "half")]
    assert main([*argv, "--set", "dtype=bfloat16"]) == 0
    config = Config.read(tmp_path / "half" / "config.toml")
    assert config.hyperparameters["dtype"] == "bfloat16"
    assert main([*argv, "--set", "dtype=float16"]) == 2
    assert "dtype must be one of 'float32', 'bfloat16', got 'float16'" in capsys.readouterr().err


# Processes of their own.


@pytest.mark.slow
def test_a_closed_stream_and_one_that_shows_ascii_only_end_no_run(tmp_path):
    variables = environment(tmp_path) | {"PYTHONIOENCODING": "ascii"}
    words = " ".join([sys.executable, "-m", "jaxroll", "train", *(f"'{x}'" for x in TINY)])
    done = subprocess.run(
        f"{words} --out run 2>&-", shell=True, env=variables, cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert done.returncode == 0
    assert b"over 4 deterministic episodes" in done.stdout


@pytest.mark.slow
def test_a_signal_during_start_up_ends_the_command(tmp_path):
    for wait in (0.3, 0.8, 1.5):
        process = spawn(["train", *TINY, "--num-train-steps", "100_000_000"], tmp_path)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) in (130, -signal.SIGINT)


def environment(tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    return kept | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TERM": "xterm", "COLUMNS": "120"}


def spawn(argv, tmp_path, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "jaxroll", *argv],
        env=environment(tmp_path),
        cwd=tmp_path,
        text=True,
        **options,
    )


def in_terminal(argv, tmp_path):
    """(exit code, all that was shown) in a pseudo-terminal."""
    leader, follower = pty.openpty()
    process = spawn(argv, tmp_path, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    shown = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(leader)
    return process.wait(), shown.decode()


@pytest.mark.slow
def test_a_terminal_shows_the_bar_then_the_result(tmp_path):
    code, shown = in_terminal(["train", *TINY], tmp_path)
    assert code == 0, shown
    assert "compiling" in shown
    assert "100%" in shown
    assert "steps/s" in shown
    last = shown[shown.index("return   ") :]
    assert "runs/ppo-CartPole-v1-0" in last
    assert (tmp_path / "runs" / "ppo-CartPole-v1-0" / "curve.png").exists()
    assert "Warning" not in shown
    assert list((tmp_path / "cache" / "jaxroll").rglob("*"))  # compiled programs are kept


@pytest.mark.filterwarnings("ignore::jaxroll.train.checkpoint.CheckpointWarning")
def test_a_last_step_that_could_not_be_saved_is_said_and_code_1(run, capsys, tmp_path, monkeypatch):
    from jaxroll.train import step_files

    def fail(path, *args):
        raise OSError("No space left on device")

    monkeypatch.setattr(step_files, "write_shards", fail)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    argv = ["train", "--config", str(run), "--no-cache", "--out", str(tmp_path / "run")]
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert re.search(r"step 256 could not be saved in .*; nothing is on disk there", captured.err)
    assert "return" in captured.out  # the policy was tested all the same


def test_a_stop_that_could_not_save_does_not_say_so(run, capsys, tmp_path, monkeypatch):
    history = History()
    history.stopped_by, history.stopped_at, history.saved_step = "SIGTERM", 128, 64
    monkeypatch.setattr(
        "jaxroll.trainer.DistributedTrainer.train", lambda self, **options: (None, history)
    )
    argv = ["train", "--config", str(run), "--no-cache", "--out", str(tmp_path / "run")]
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert "step 128 could not be saved" in captured.err
    assert "step 64 is on disk" in captured.err
    assert "stopped by" not in captured.out
    history.saved_step = 128
    assert main([*argv, "--out", str(tmp_path / "other")]) == 143
    assert "stopped by SIGTERM, saved at step 128. Go on with" in capsys.readouterr().out


def test_the_curve_is_drawn_before_the_test(run, monkeypatch, tmp_path):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxroll.trainer.DistributedTrainer.test", stop)
    out = tmp_path / "run"
    assert main(["train", "--config", str(run), "--no-cache", "--quiet", "--out", str(out)]) == 130
    assert (out / "curve.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resume_goes_on(number, tmp_path):
    argv = ["train", *TINY, "--num-train-steps", "100_000_000", "--out", "run"]
    process = spawn(argv, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wait_for_rows(tmp_path / "run")
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    step = re.search(r"saved at step ([\d,]+)\. Go on with: jaxroll resume run", out)
    assert step is not None, out
    assert int(step[1].replace(",", "")) >= read_rows(tmp_path / "run")[-1]["step"]
    done = read_rows(tmp_path / "run")[-1]["step"]
    more = spawn(["resume", "run", "--num-train-steps", str(done + 64), "--quiet"], tmp_path)
    assert more.wait(timeout=300) == 0
    steps = [row["step"] for row in read_rows(tmp_path / "run")]
    assert steps == list(range(64, done + 65, 64))


@pytest.mark.long
def test_two_devices_give_the_rows_of_one(tmp_path):
    argv = ["train", *TINY, "--num-actors", "2", "--reduction", "exact", "--quiet"]
    assert spawn([*argv, "--out", "one"], tmp_path).wait(timeout=300) == 0
    assert spawn([*argv, "--out", "two", "--devices", "2"], tmp_path).wait(timeout=300) == 0
    assert read_rows(tmp_path / "one") == read_rows(tmp_path / "two")


@pytest.mark.slow
def test_when_a_peer_is_killed_the_other_leaves_with_75(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = ["train", *TINY, "--num-actors", "2", "--num-train-steps", "100_000_000", "--out", "run"]
    argv += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id"]
    first, second = (
        spawn([*argv, str(i)], tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in (0, 1)
    )
    try:
        wait_for_rows(tmp_path / "run")
        second.kill()
        _, err = first.communicate(timeout=60)
        assert first.returncode == 75, err
        assert "jaxroll resume" in err
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def wait_for_rows(directory, seconds=300):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        file = directory / "metrics.jsonl"
        if file.exists() and file.read_text().count("\n") >= 2:
            return
        time.sleep(0.1)
    raise AssertionError(f"no rows in {directory}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "environment"),
    [
        ("2>&-", {}),
        (">&- 2>&-", {}),
        ("", {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}),
        ("", {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}),
    ],
)
def test_a_run_needs_neither_a_stderr_nor_unicode(shell, environment, tmp_path):
    words = shlex.join([sys.executable, "-m", "jaxroll", "train", *TINY, "--out", str(tmp_path)])
    ran = subprocess.run(
        ["sh", "-c", f"{words} {shell}"],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert History.read(tmp_path).steps[-1] == 256
    if environment:
        encoding = environment["PYTHONIOENCODING"]
        plus_minus = {"ascii": "+/-", "latin-1": "±"}[encoding]
        assert plus_minus in ran.stdout.decode(encoding)
        assert "compiling ..." in ran.stderr.decode(encoding)
