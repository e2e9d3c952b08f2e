"""The methods on the tiny Wan at an equal number of transformer evaluations; head_to_head.jsonl is what it writes.

    python notebooks/head_to_head.py tune  # learning rates: one seed, which the comparison does not use
    python notebooks/head_to_head.py run   # the comparison: five seeds a row, each at its best learning rate
    python notebooks/head_to_head.py conditions  # where rectification matters, into conditions.jsonl
    python notebooks/head_to_head.py tenth  # what helps most at a tenth of the budget, into tenth.jsonl

Every run of `train` becomes one line of notebooks/data/head_to_head.jsonl at its end, and a line that exists is not run
again, so both commands may be stopped and repeated. `--reverse` takes the runs from the end: a second worker.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "head_to_head.jsonl"
BUDGET = 15_000  # transformer evaluations of a run, also when learning rates are tuned
SEEDS, TUNING_SEED = range(5), 100
RATES = [2e-4, 6e-4, 2e-3]  # and on by factors of about 3, while the best one is the first or the last
REWARDS = {"palette": "palette", "brightness": f"{Path(__file__)}:brightness"}
ROWS: dict[str, dict] = {
    "flow": {"method": "flow"},
    "dance": {"method": "dance"},
    "mix": {"method": "mix"},
    "mix-flash": {"method": "mix-flash"},
    "flash": {"method": "flash"},
    "flash, random steps": {"method": "flash", "grouping": "random"},
    "flash, not rectified": {"method": "flash", "rectify": False},
    "flash, shared noise": {"method": "flash-shared"},
    "flash, shared noise, dpm2": {"method": "flash-shared", "solver": "dpm2", "compress": 0.4},
}
CONDITIONS: dict[str, dict] = {  # brightness, at flash's rate; over its own window it is in the comparison already
    "window 0:9": {"method": "flash", "window": "0:9"},
    "window 0:9, flow SDE": {"method": "flash", "window": "0:9", "sde": "flow"},
}
CONDITIONS |= {f"{name}, not rectified": row | {"rectify": False} for name, row in CONDITIONS.items()}
EVERYTHING = ROWS["flash, shared noise, dpm2"]
TENTH_RATES = [6e-4, 2e-3, 6e-3]
TENTH: dict[str, dict] = {  # at a tenth of the budget, each at the best of these rates
    "everything": EVERYTHING,
    "fewer steps": EVERYTHING | {"compress": 0.2},
    "two passes": EVERYTHING | {"ppo_epochs": 2},
    "more noise": EVERYTHING | {"sde": "flow"},
}


def brightness(videos, prompts, metadata):
    """A reward without a ceiling in reach: brightness in the prompt's colour less that in the others, [B]."""
    import torch

    colors = {"red": 0b100, "green": 0b010, "blue": 0b001, "yellow": 0b110, "magenta": 0b101, "cyan": 0b011}
    bits = [[colors[prompt.split()[1]] >> shift & 1 for shift in (2, 1, 0)] for prompt in prompts]
    sign = 2.0 * torch.tensor(bits) - 1
    return 10 * (videos.float() / 255 * sign[:, None, None, None]).sum(-1).mean((1, 2, 3))


def read(path: Path = DATA) -> list[dict]:
    """The runs so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def reward_at_end(run: dict) -> float:
    """Held-out reward at the end of the budget: the mean of the last three evaluations, of about twenty."""
    ends = [reward for _, reward in run["curve"][-3:]]
    return sum(ends) / len(ends)


def best_rate(row: str, reward: str, runs: list[dict]) -> tuple[float, list[float]]:
    """The best learning rate of the tuning runs, and those tried."""
    tuning = [r for r in runs if (r["row"], r["reward"], r["tuning"]) == (row, reward, True)]
    tried = {r["lr"]: reward_at_end(r) for r in tuning}
    return max(tried, key=tried.get), sorted(tried)


def run(row: str, reward: str, lr: float, seed: int, budget: int, points: int = 20, **other) -> dict:
    """Train once; returns the line of the data: settings, cost, and the curve of (nfe, held-out reward)."""
    import flash_grpo
    from flash_grpo import Config, evaluations, fill, train

    flash_grpo.draw_pictures = lambda *_: None  # the curves are drawn by 04_head_to_head.ipynb
    settings = (ROWS | CONDITIONS | TENTH)[row] | other
    config = fill(Config(**settings, reward=REWARDS[reward], lr=lr, seed=seed, max_nfe=budget, eval_videos=0))
    cost = sum(evaluations(config, update) for update in range(20)) / 20
    config.eval_every, config.save_every = max(1, round(budget / points / cost)), 0
    config.tracker, config.eval_num_steps = "none", 10
    with tempfile.TemporaryDirectory() as config.output_dir:
        history = train(config, progress=False)
    updates = [m for m in history if "reward_mean" in m]
    return {
        "row": row, "reward": reward, "lr": lr, "seed": seed, "tuning": seed == TUNING_SEED, **other, "budget": budget,
        "updates": len(updates), "nfe_per_update": round(cost, 1),
        "seconds_per_update": round(sum(m["seconds"] for m in updates) / len(updates), 3),
        "grad_norm": round(sum(m["grad_norm"] for m in updates) / len(updates), 6),
        "curve": [(m["nfe"], round(m["eval_reward"], 4)) for m in history if "eval_reward" in m],
    }  # fmt: skip


def jobs(command: str, runs: list[dict]) -> list[tuple]:
    """(row, reward, lr, seed, budget) of the command's runs that are not done yet."""
    rows, rates, budget = (TENTH, TENTH_RATES, BUDGET // 10) if command == "tenth" else (ROWS, RATES, BUDGET)
    done = {(r["row"], r["reward"], r["lr"], r["seed"], r["budget"]) for r in runs}
    wanted = [(row, w, lr, TUNING_SEED, budget) for w in REWARDS for lr in rates for row in rows]
    if command == "conditions":
        wanted = [(row, "brightness", 2e-3, seed, BUDGET) for seed in SEEDS for row in CONDITIONS]
    elif command == "run" or (command == "tenth" and all(job in done for job in wanted)):
        best = {(row, w): best_rate(row, w, runs)[0] for row in rows for w in REWARDS}
        wanted = [(row, w, best[row, w], seed, budget) for seed in SEEDS for w in REWARDS for row in rows]
    elif command == "tune" and all(job in done for job in wanted):  # and on while the best is at an end
        for row, w in ((row, w) for row in rows for w in REWARDS):
            best, tried = best_rate(row, w, runs)
            step = 10**0.5 if best == tried[-1] else 10**-0.5
            wanted += (
                [(row, w, float(f"{best * step:.0e}"), TUNING_SEED, budget)] if best in (tried[0], tried[-1]) else []
            )
    return [job for job in wanted if job not in done]


if __name__ == "__main__":
    sys.path.insert(0, os.environ.get("FLASH_GRPO", str(HERE.parent)))
    path = DATA if sys.argv[1] in ("tune", "run") else DATA.with_name(f"{sys.argv[1]}.jsonl")
    while left := jobs(sys.argv[1], read(path)):
        result = run(*left[-1 if "--reverse" in sys.argv else 0])
        with open(path, "a") as file:
            file.write(json.dumps(result) + "\n")
        shown = {key: value for key, value in result.items() if key != "curve"}
        print(f"{len(left)} left:", shown, reward_at_end(result))
