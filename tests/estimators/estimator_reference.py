"""The estimators as plain loops in float64, written from the formulas, episode by episode.

Nothing is computed backwards here: each result is the explicit sum that the formula's recursion
stands for, over the rows of one stretch of one environment. A stretch ends with an episode, with
the rollout, or before a row that is not valid.
"""

import numpy as np

FLOATS = ("rewards", "values", "last_values", "bootstrap_values", "log_rhos", "q_values")


def random_case(rng, num_steps, num_envs, *, ends=0.3, invalid=0.2, per_row=True):
    """Random inputs, with NaN wherever nothing may be read.

    Flags are set at the first and the last step, on neighbouring steps and both at once.
    """
    shape = (num_steps, num_envs)
    case = {name: rng.normal(size=shape) for name in (*FLOATS, "expected_values")}
    case["last_values"] = rng.normal(size=num_envs)
    case["terminated"] = rng.random(shape) < ends
    case["truncated"] = rng.random(shape) < ends
    case["valid"] = rng.random(shape) >= invalid
    for flag in ("terminated", "truncated"):
        case[flag][0, rng.random(num_envs) < 0.5] = True
        case[flag][-1, rng.random(num_envs) < 0.3] = True
    case["discount"] = rng.uniform(0.5, 1, shape) if per_row else 0.9
    case["trace_lambda"] = rng.uniform(0, 1, shape) if per_row else 0.7
    return with_nan_where_unused(case)


def with_nan_where_unused(case):
    case = dict(case)
    valid, over = case["valid"], case["terminated"] | case["truncated"]
    read = case["truncated"] & ~case["terminated"] & valid
    case["bootstrap_values"] = np.where(read, case["bootstrap_values"], np.nan)
    # An invalid row's value is read by a step before it that goes on.
    before = np.concatenate([np.zeros_like(valid[:1]), (valid & ~over)[:-1]])
    for name in ("rewards", "log_rhos", "q_values"):
        case[name] = np.where(valid, case[name], np.nan)
    for name in ("values", "expected_values"):
        case[name] = np.where(valid | before, case[name], np.nan)
    case["last_values"] = np.where(over[-1] | ~valid[-1], np.nan, case["last_values"])
    return case


def _stretches(case, b, follow):
    """Yield (rows, value after the last of them) for environment b; `follow` gives V(row)."""
    num_steps = len(case["rewards"])
    rows = []
    for t in range(num_steps):
        if not case["valid"][t, b]:
            continue
        rows.append(t)
        if case["terminated"][t, b]:
            yield rows, 0.0
        elif case["truncated"][t, b]:
            yield rows, case["bootstrap_values"][t, b]
        elif t + 1 == num_steps:
            yield rows, case["last_values"][b]
        elif not case["valid"][t + 1, b]:
            yield rows, follow[t + 1, b]
        else:
            continue
        rows = []


def _per_stretch(case, follow, otherwise, of_stretch):
    """Run `of_stretch(r, v, v_next, gamma, lam, column)` on each stretch; fill the rest."""
    shape = case["rewards"].shape
    gammas = np.broadcast_to(case["discount"], shape)
    lams = np.broadcast_to(case["trace_lambda"], shape)
    out = np.array(np.broadcast_to(otherwise, shape), dtype=np.float64)
    for b in range(shape[1]):
        for rows, after in _stretches(case, b, follow):
            v = follow[rows, b]
            v_next = np.append(v[1:], after)
            out[rows, b] = of_stretch(
                case["rewards"][rows, b], v, v_next, gammas[rows, b], lams[rows, b], (rows, b)
            )
    return out


def gae(case):
    def advantages(r, v, v_next, gamma, lam, _):
        n = len(r)
        delta = [r[t] + gamma[t] * v_next[t] - v[t] for t in range(n)]
        return [
            sum(np.prod(gamma[t:k] * lam[t:k]) * delta[k] for k in range(t, n)) for t in range(n)
        ]

    return _per_stretch(case, case["values"], 0.0, advantages)


def n_step_returns(case, n):
    def returns(r, v, v_next, gamma, lam, _):
        out = []
        for t in range(len(r)):
            end = min(t + n, len(r))
            rewards = sum(np.prod(gamma[t:k]) * r[k] for k in range(t, end))
            out.append(rewards + np.prod(gamma[t:end]) * v_next[end - 1])
        return out

    return _per_stretch(case, case["values"], case["values"], returns)


def lambda_returns(case):
    """The mixture of n-step returns, weighed by (1 − λ) λⁿ⁻¹."""

    def returns(r, v, v_next, gamma, lam, _):
        size, out = len(r), []
        for t in range(size):
            mixture, left = 0.0, 1.0
            for n in range(1, size - t + 1):
                rewards = sum(np.prod(gamma[t:k]) * r[k] for k in range(t, t + n))
                g = rewards + np.prod(gamma[t : t + n]) * v_next[t + n - 1]
                share = left if t + n == size else left * (1 - lam[t + n - 1])
                mixture += share * g
                left *= lam[t + n - 1]
            out.append(mixture)
        return out

    return _per_stretch(case, case["values"], case["values"], returns)


def discounted_returns(case):
    """Rows that are not valid are taken out, then each episode is summed."""
    shape = case["rewards"].shape
    gammas = np.broadcast_to(case["discount"], shape)
    out = np.zeros(shape)
    for b in range(shape[1]):
        rows = np.flatnonzero(case["valid"][:, b])
        for i, start in enumerate(rows):
            total, weight, after = 0.0, 1.0, case["last_values"][b]
            for t in rows[i:]:
                total += weight * case["rewards"][t, b]
                weight *= gammas[t, b]
                if case["terminated"][t, b] or case["truncated"][t, b]:
                    after = 0.0 if case["terminated"][t, b] else case["bootstrap_values"][t, b]
                    break
            out[start, b] = total + weight * after
    return out


def vtrace(case, clip_rho=1.0, clip_c=1.0, clip_pg_rho=1.0):
    def surprises(r, v, v_next, gamma, lam, where):
        ratio = np.exp(case["log_rhos"][where])
        rho, c = np.minimum(clip_rho, ratio), lam * np.minimum(clip_c, ratio)
        delta, n = rho * (r + gamma * v_next - v), len(r)
        return [sum(np.prod(gamma[t:k] * c[t:k]) * delta[k] for k in range(t, n)) for t in range(n)]

    def advantages(r, v, v_next, gamma, lam, where):
        targets = v + surprises(r, v, v_next, gamma, lam, where)
        target_next = np.append(targets[1:], v_next[-1])
        ratio = np.minimum(clip_pg_rho, np.exp(case["log_rhos"][where]))
        return ratio * (r + gamma * (lam * target_next + (1 - lam) * v_next) - v)

    values = case["values"]
    returns = _per_stretch(case, values, 0.0, surprises) + values
    return _per_stretch(case, values, 0.0, advantages), returns


def retrace(case):
    def returns(r, v, v_next, gamma, lam, where):
        q = case["q_values"][where]
        c = np.minimum(1, np.exp(case["log_rhos"][where]))
        error, n = r + gamma * v_next - q, len(r)
        return [
            q[t]
            + sum(np.prod(gamma[t:k] * lam[t:k] * c[t + 1 : k + 1]) * error[k] for k in range(t, n))
            for t in range(n)
        ]

    return _per_stretch(case, case["expected_values"], case["q_values"], returns)
