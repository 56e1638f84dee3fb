# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages and losses of the algorithms as torch computes them, in fp64, for torch_reference.py.

Written from the papers' equations, episode by episode and token by token, and imports nothing of
earl_jax. Where a paper leaves a case open, the convention is that of docs/concepts/algorithms.md:
a difference of log-probs counts as at most LARGEST_GAP; a sequence is one sample of an episode, and
one without a token of the policy counts nowhere; what differs only by rounding is equal, and a
deviation of 0 divides nothing.

An episode is a dict of torch_reference.py; `args` are config.algorithm_args, with `averages`.
"""

import torch

# exp of a larger one times an advantage would be no number in fp32.
LARGEST_GAP = 20.0
# Log-probs are whole numbers of this, so that fp32 has them exactly.
UNIT = 1 / 1024
PER_TOKEN = ("logprobs", "entropy", "behaviour", "proximal", "reference", "values", "old_values")


# Advantages, one for each turn of each episode that counts.


def mean(values: list) -> torch.Tensor:
    return torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in values]).mean()


def are_equal(values: list[float]) -> bool:
    return max(values) - min(values) <= 1e-9 * max(abs(value) for value in values)


def outcome(episode: dict, args: dict) -> float:
    """The sum of rewards, with DAPO's eq. 13 (L_max = overlong_tokens, L_cache = its buffer)."""
    total, longest = sum(episode["rewards"]), args.get("overlong_tokens", 0)
    if not longest:
        return total
    length, cache = len(episode["logprobs"]), args["overlong_buffer"]
    if length <= longest - cache:
        return total
    return total + ((longest - cache) - length) / cache if length <= longest else total - 1.0


def of_group(episodes: list[dict], episode: dict, args: dict) -> list[float]:
    return [outcome(other, args) for other in episodes if other["group"] == episode["group"]]


def grpo(episodes: list[dict], args: dict) -> list[list[float]]:
    """2402.03300, section 4.1.2: (r_i - mean(r)) / std(r); without std: 2503.20783, section 3.2."""
    rows = []
    for episode in episodes:
        others = of_group(episodes, episode, args)
        advantage = 0.0
        if not are_equal(others):
            values = torch.tensor(others, dtype=torch.float64)
            advantage = outcome(episode, args) - values.mean()
            if args.get("normalize_advantages", True):
                advantage /= values.std(correction=int(args.get("deviation") == "sample"))
        rows.append([float(advantage)] * len(episode["rewards"]))
    return rows


def rloo(episodes: list[dict], args: dict) -> list[list[float]]:
    """2402.14740, eq. 9: r_i minus the mean of the other k - 1."""
    rows = []
    for index, episode in enumerate(episodes):
        others = [
            outcome(other, args)
            for at, other in enumerate(episodes)
            if other["group"] == episode["group"] and at != index
        ]
        own = outcome(episode, args)
        advantage = 0.0 if are_equal([own, *others]) else own - sum(others) / len(others)
        rows.append([advantage] * len(episode["rewards"]))
    return rows


def returns(episode: dict, args: dict) -> list[float]:
    """The discounted return of each turn."""
    rewards, discount = episode["rewards"], args["turn_discount"]
    return [
        sum(discount ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))
        for turn in range(len(rewards))
    ]


def gigpo(episodes: list[dict], args: dict) -> list[list[float]]:
    """2505.10978, eq. 6 to 9: that of the episode, and of each turn among those in its state."""
    rows = grpo(episodes, args)
    for row, episode in zip(rows, episodes, strict=True):
        for turn, own in enumerate(returns(episode, args)):
            values = [
                value
                for other in episodes
                if other["group"] == episode["group"]
                for state, value in zip(other["states"], returns(other, args), strict=True)
                if state == episode["states"][turn]
            ]
            if are_equal(values):
                continue
            every = torch.tensor(values, dtype=torch.float64)
            scale = every.std(correction=int(args.get("deviation") == "sample"))
            advantage = (own - every.mean()) / scale
            row[turn] += args.get("turn_weight", 1.0) * float(advantage)
    return rows


def reinforce(episodes: list[dict], args: dict) -> list[list[float]]:
    """Williams 1992: return minus a baseline; SPIRAL, 2506.24119, eq. 4 with "ema"."""
    baseline, rows = args.get("baseline", "batch"), []
    for episode in episodes:
        row = returns(episode, args)
        for turn in range(len(row)):
            compared = [
                returns(other, args)[turn]
                for other in episodes
                if len(other["rewards"]) > turn
                and other["role"] == episode["role"]
                and (baseline == "batch" or other["group"] == episode["group"])
            ]
            if baseline == "ema":
                row[turn] -= args["averages"].get(episode["role"], 0.0)
            elif baseline != "none":
                row[turn] = 0.0 if are_equal(compared) else row[turn] - float(mean(compared))
        rows.append(row)
    if args.get("normalize_advantages", True):
        every = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
        scale = float(every.std(correction=0))
        rows = [[value / scale for value in row] for row in rows] if scale > 1e-6 else rows
    return rows


def moving_averages(episodes: list[dict], args: dict) -> dict[str, float]:
    """SPIRAL, 2506.24119, section 3.2: b <- decay b + (1 - decay) R, here of a role's mean return.

    R of an episode is the mean over its turns of the discounted return.
    """
    found, discount = dict(args["averages"]), args["turn_discount"]
    for role in {episode["role"] for episode in episodes}:
        each = []
        for rewards in (e["rewards"] for e in episodes if e["role"] == role):
            sums = 0.0
            for later, reward in enumerate(rewards):
                sums += reward * sum(discount**steps for steps in range(later + 1))
            each.append(sums / len(rewards))
        new = sum(each) / len(each)
        decay = args["baseline_decay"]
        found[role] = decay * found[role] + (1 - decay) * new if role in found else new
    return found


def own_outcomes(episodes: list[dict], args: dict) -> list[list[float]]:
    return [[outcome(episode, args)] * len(episode["rewards"]) for episode in episodes]


def scaled_outcomes(episodes: list[dict], args: dict) -> list[list[float]]:
    return [
        [value / args["kl_coefficient"] for value in row] for row in own_outcomes(episodes, args)
    ]


def rewards(episodes: list[dict], args: dict) -> list[list[float]]:
    return [episode["rewards"] for episode in episodes]


ADVANTAGES = {
    "reinforce": reinforce,
    "spiral": reinforce,
    "grpo": grpo,
    "dr_grpo": grpo,
    "gigpo": gigpo,
    "dapo": grpo,
    "gspo": grpo,
    "cispo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": own_outcomes,
    "reinforce_plus_plus_baseline": lambda episodes, args: grpo(
        episodes, args | {"normalize_advantages": False}
    ),
    "ppo": rewards,
    "tba": scaled_outcomes,
    "distillation": lambda episodes, args: [[0.0] * len(e["rewards"]) for e in episodes],
    "sft": lambda episodes, args: [[0.0] * len(episode["rewards"]) for episode in episodes],
}

# Those whose advantages are normalised over the tokens of a batch.
OVER_TOKENS = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


# Tokens of the policy, in order, with the facts that a loss is made of.


def make_tokens(episodes: list[dict], rows: list[list[float]]) -> list[dict]:
    tokens = []
    for number, (episode, row) in enumerate(zip(episodes, rows, strict=True)):
        places = [place for place, turn in enumerate(episode["turns"]) if turn]
        for at, place in enumerate(places):
            turn = episode["turns"][place]
            token = {name: torch.tensor(episode[name][at] * UNIT).double() for name in PER_TOKEN}
            token |= {"episode": number, "turn": turn, "advantage": row[turn - 1]}
            token |= {"group": episode["group"], "place": place}
            token["sequence"] = number, episode["samples"][place]
            tokens.append(token)
    return tokens


def gap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.clamp(one - other, -LARGEST_GAP, LARGEST_GAP)


def kl(policy: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Schulman, joschu.net/blog/kl-approx.html, r = reference / policy."""
    log_r = gap(reference, policy)
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": torch.exp(log_r) - 1 - log_r}[estimator]


def penalty(token: dict, args: dict) -> torch.Tensor:
    """A token's penalty in the reward: of the policy that the ratio is relative to."""
    if not is_in_reward(args):
        return torch.tensor(0.0)
    amount = kl(token["old"], token["reference"], args["kl_estimator"]).detach()
    return args["kl_coefficient"] * amount


def is_in_reward(args: dict) -> bool:
    return bool(args.get("kl_coefficient")) and args.get("kl_in") == "reward"


def finish_advantages(algorithm: str, tokens: list[dict], args: dict) -> None:
    """Makes what depends on tokens: of a critic, of penalties, and of all tokens of the batch."""
    if algorithm == "ppo":
        estimate(tokens, args)
    elif algorithm == "tba":
        balance(tokens)
    elif algorithm == "rloo":
        leave_out_penalties(tokens, args)
    else:
        subtract_following_penalties(tokens, args)
    if algorithm in OVER_TOKENS and args.get("normalize_advantages", True):
        normalize(tokens)
    for token in tokens:
        token["advantage"] = torch.as_tensor(token["advantage"], dtype=torch.float64)


def leave_out_penalties(tokens: list[dict], args: dict) -> None:
    """2402.14740: rewards have their penalties, the episode's own and those of the other k - 1."""
    sums, groups = {}, {}
    for token in tokens:
        sums[token["episode"]] = sums.get(token["episode"], 0.0) + penalty(token, args)
        groups[token["episode"]] = token["group"]
    for token in tokens:
        episode = token["episode"]
        others = [sums[e] for e in sums if e != episode and groups[e] == groups[episode]]
        if others:
            token["advantage"] -= sums[episode] - sum(others) / len(others)


def log_ratio(token: dict, tokens: list[dict], name: str) -> torch.Tensor:
    """log pi(y) - log pi_ref(y) of a token's sequence, with the log-probs of this name."""
    own = [t for t in tokens if t["sequence"] == token["sequence"]]
    return sum(t[name] - t["reference"] for t in own)


def balance(tokens: list[dict]) -> None:
    """2503.18929, VarGrad: r / beta - log Z, the mean of log pi_ref + r / beta - log pi."""
    found = {}
    for token in tokens:
        amount = token["advantage"] - log_ratio(token, tokens, "proximal").detach()
        found.setdefault(token["group"], {})[token["sequence"]] = amount
    log_z = {group: mean(list(each.values())) for group, each in found.items()}
    for token in tokens:
        token["advantage"] = token["advantage"] - log_z[token["group"]]


def normalize(tokens: list[dict]) -> None:
    values = torch.stack([torch.as_tensor(t["advantage"]).double() for t in tokens])
    scale = values.std(correction=0)
    for token, value in zip(tokens, values, strict=True):
        is_noise = scale <= 1e-6 * values.abs().max()
        token["advantage"] = 0.0 * value if is_noise else (value - values.mean()) / scale


def subtract_following_penalties(tokens: list[dict], args: dict) -> None:
    """2501.03262, eq. 8 (A = r - beta * the sum of KL(i) from t to T); beside GRPO the same.

    In distillation (2306.13649) each counts `kl_discount` times less for each place behind t.
    """
    discount = args.get("kl_discount", 1.0)
    for index, token in enumerate(tokens):
        for later in tokens[index:]:
            if later["sequence"] == token["sequence"]:
                amount = discount ** (later["place"] - token["place"]) * penalty(later, args)
                token["advantage"] = token["advantage"] - amount


def estimate(tokens: list[dict], args: dict) -> None:
    """1506.02438, eq. 16: A_t = sum over l of (gamma lambda)^l d_(t+l), over tokens or turns."""
    gamma, decay = args.get("gamma", 1.0), args.get("gae_lambda", 0.95)
    by_turn = args.get("gae_level") == "turn"
    for number in {token["episode"] for token in tokens}:
        own = [token for token in tokens if token["episode"] == number]
        turns = sorted({token["turn"] for token in own})
        of_turn = [[token for token in own if token["turn"] == turn] for turn in turns]
        steps = of_turn if by_turn else [[token] for token in own]
        ends = {id(turn[-1]) for turn in of_turn}
        gains, values = [], [step[0]["old_values"] for step in steps] + [torch.tensor(0.0)]
        for step in steps:
            gain = step[0]["advantage"] if id(step[-1]) in ends else 0.0
            gains.append(gain - sum(penalty(t, args) for t in step))
        errors = [gains[at] + gamma * values[at + 1] - values[at] for at in range(len(steps))]
        for at, step in enumerate(steps):
            sums = sum((gamma * decay) ** (k - at) * errors[k] for k in range(at, len(steps)))
            for token in step:
                token["advantage"], token["returns"] = sums, sums + values[at]


# Losses of tokens.


def clipped(ratio: torch.Tensor, advantage: float, args: dict) -> torch.Tensor:
    """1707.06347, eq. 7; bounds of 2503.14476, eq. 10; dual clip of 1912.09729, eq. 5."""
    low, high = args.get("clip_low", 0.2), args.get("clip_high", 0.2)
    gain = torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
    if args.get("dual_clip") and advantage < 0:
        gain = torch.maximum(gain, torch.as_tensor(args["dual_clip"] * advantage))
    return -gain


def surrogates(algorithm: str, tokens: list[dict], args: dict) -> list[torch.Tensor]:
    losses = []
    for token in tokens:
        advantage, logprob = token["advantage"], token["logprobs"]
        ratio = torch.exp(gap(logprob, token["old"]))
        if algorithm == "sft":
            losses.append(-logprob)
        elif algorithm == "tba":
            # 2503.18929: (log Z + log pi(y) - log pi_ref(y) - r / beta)^2 at each of its tokens.
            losses.append((log_ratio(token, tokens, "logprobs") - advantage) ** 2)
        elif algorithm == "cispo":
            # 2506.13585, eq. 4 and 5.
            low, high = args.get("clip_low", 1.0), args.get("clip_high", 4.0)
            weight = torch.clamp(ratio, 1 - low, 1 + high).detach()
            losses.append(-weight * advantage * logprob)
        elif algorithm == "gspo":
            # 2507.18071, eq. 5 to 7: one ratio for the sequence, whose loss is that of each token.
            own = [t for t in tokens if t["sequence"] == token["sequence"]]
            # As eq. 14 has it, each token of a bounded gap keeps its gradient.
            gaps = [t["logprobs"] - t["old"] for t in own]
            bounded = [torch.clamp(each, -LARGEST_GAP, LARGEST_GAP) for each in gaps]
            cut = sum(b - g for b, g in zip(bounded, gaps, strict=True)).detach()
            ratio = torch.exp((sum(gaps) + cut) / len(own))
            losses.append(clipped(ratio, advantage, args))
        else:
            losses.append(clipped(ratio, advantage, args))
    return losses


def weight_of(token: dict, tokens: list[dict], correction: str, cap: float) -> torch.Tensor:
    """2505.24298, eq. 5, truncated (Ionides 2008, eq. 4) or masked (IcePop, 2510.18855)."""
    if correction == "truncated_sequence":
        own = [t for t in tokens if t["sequence"] == token["sequence"]]
        log_weight = sum(gap(t["proximal"], t["behaviour"]) for t in own)
        log_weight = torch.clamp(log_weight, -LARGEST_GAP, LARGEST_GAP)
        return torch.clamp(torch.exp(log_weight), max=cap)
    weight = torch.exp(gap(token["proximal"], token["behaviour"]))
    if correction == "masked":
        return weight if 1 / cap <= weight <= cap else torch.tensor(0.0)
    return torch.clamp(weight, max=cap)


def policy_loss(case: dict, tokens: list[dict], args: dict) -> torch.Tensor:
    """The mean of the losses, weighted for who sampled, each less its bonus of entropy."""
    losses = surrogates(case["algorithm"], tokens, args)
    for index, token in enumerate(tokens):
        if case["algorithm"] != "tba" and args.get("kl_coefficient") and not is_in_reward(args):
            distance = kl(token["logprobs"], token["reference"], args["kl_estimator"])
            losses[index] = losses[index] + args["kl_coefficient"] * distance
        if case["cap"]:
            weight = weight_of(token, tokens, case["correction"], case["cap"])
            losses[index] = losses[index] * weight.detach()
        losses[index] = losses[index] - case.get("entropy_coefficient", 0.0) * token["entropy"]
    return aggregate(losses, tokens, args)


def aggregate(losses: list[torch.Tensor], tokens: list[dict], args: dict) -> torch.Tensor:
    """Over tokens (2503.14476, eq. 12), sequences (2402.03300, eq. 3), by a constant (Dr. GRPO)."""
    kind = args.get("aggregation", "token")
    if kind == "token":
        return mean(losses)
    means = []
    for sequence in {token["sequence"] for token in tokens}:
        own = [loss for loss, t in zip(losses, tokens, strict=True) if t["sequence"] == sequence]
        divisor = len(own) if kind == "sequence" else args.get("aggregation_tokens", 1024)
        means.append(sum(own) / divisor)
    return mean(means)


def value_loss(tokens: list[dict], args: dict) -> dict:
    """0.5 max((V - R)^2, (V_old + clip(V - V_old, -e, e) - R)^2), as in the code of 1707.06347."""
    losses, bound = [], args.get("value_clip", 0.2)
    for token in tokens:
        value, old, target = token["values"], token["old_values"], token["returns"]
        squares = (value - target) ** 2
        if bound:
            near = torch.minimum(torch.maximum(value, old - bound), old + bound)
            squares = torch.maximum(squares, (near - target) ** 2)
        losses.append(0.5 * squares)
    loss = mean(losses)
    loss.backward()
    return {
        "returns": [float(token["returns"].detach()) for token in tokens],
        "value_loss": float(loss.detach()),
        "value_gradient": [float(token["values"].grad) for token in tokens],
    }
