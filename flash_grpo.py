"""Flash-GRPO in one file: align Wan video diffusion models with a reward, training one denoising step per video.

    accelerate launch flash_grpo.py                                     # a small Wan on a laptop's CPU, in minutes
    accelerate launch flash_grpo.py --model wan1.3b --reward pickscore  # a real Wan on the GPUs of this machine
    accelerate launch flash_grpo.py --model wan14b                      # 14B, sharded over the GPUs by FSDP2
    accelerate launch flash_grpo.py --method flow                       # its neighbours: flow, dance, mix, mix-flash
    accelerate launch flash_grpo.py --reward my_file.py:score           # a reward of your own

Flash-GRPO (He et al., ICML 2026, arXiv 2605.15980) is GRPO for flow-matching models with three changes:

1. One-step policy. A rollout is deterministic except for ONE stochastic step k, and only that transition is trained.
2. Iso-temporal grouping. All videos of a prompt share k, so advantages compare policies and not timesteps.
3. Temporal gradient rectification. The gradient at a step is proportional to lambda = |d mean / d velocity| / std,
   which varies over the schedule; each loss is divided by its lambda, so that every timestep pulls alike.

Who reads from the top and stops after `grpo_loss` has the algorithm; then come the Wan policy, the tiny world, rewards,
rollout, checkpoints, evaluation and training. Latents are float32 [B, C, T, H, W]; sigma falls from 1 to 0.
"""

import argparse
import hashlib
import hmac
import inspect
import itertools
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

# ==== Configuration ===================================================================================================


@dataclass
class Config:
    """Every setting; `fill` fills None. A comment is the help text, its braces what is accepted (0<.. = above 0)."""

    # Model
    model: str = "tiny"  # tiny, wan1.3b, wan14b, wan2.2-5b, wan2.2-a14b, or a Wan pipeline's folder or hub name
    weights: str = "pretrained"  # random = the true architecture, no download {pretrained|random}
    height: int | None = None  # pixels {1..}
    width: int | None = None  # pixels {1..}
    num_frames: int | None = None  # frames of a video; 4 n + 1 for Wan {1..}
    num_steps: int | None = None  # denoising steps of a rollout {1..}
    flow_shift: float | None = None  # shift f of the sigma schedule; by default 3 below 700 pixels and 5 above {0<..}
    guidance_scale: float | None = None  # classifier-free guidance; 1 switches it off {1..}
    guidance_scale_2: float | None = None  # guidance of Wan 2.2's low-noise expert; by default the same {1..}
    negative_prompt: str = ""  # what guidance steers away from
    dtype: str | None = None  # bf16 = autocast, and frozen weights stored in bf16 {bf16|fp32}
    gradient_checkpointing: bool | None = None  # recompute activations in the backward pass: less memory, more time
    cfg_batch: bool | None = None  # guidance's two forwards in one batch instead of one after the other

    # Method: a row of METHODS, each part of which can be set on its own
    method: str | None = None  # a row of METHODS; by default flash, and for tiny flash-shared
    sde: str | None = None  # noise of a stochastic step, see sde_coefficients {wan|flow|dance|cps}
    eta: float | None = None  # noise level of flow (0.7), dance (0.3) and cps (0.7); wan has none {0<..}
    window: str | None = None  # steps that may be stochastic, start:stop (--window=-5:-1); by default the first half
    window_every: int | None = None  # updates after which the window moves on by one step; 0 = never {0..}
    sde_steps: int | None = None  # stochastic steps that a video draws from the window; 0 = all {0..}
    train_fraction: float | None = None  # share of the stochastic steps that is trained {0<..1}
    grouping: str | None = None  # iso = a prompt's videos share their stochastic steps {iso|random}
    group_noise: str | None = None  # initial noise of a prompt's videos {independent|shared}
    rectify: bool | None = None  # divide the time-dependent gradient scale out of the loss
    solver: str | None = None  # solver after the last stochastic step; dpm2 = DPM-Solver++ 2M {euler|dpm2}
    compress: float | None = None  # share of the steps after the last stochastic one that is kept {0<..1}

    # Training
    seed: int = 0  # noise depends on (seed, update, prompt, sample), never on the number of processes {0..}
    num_updates: int | None = None  # updates, each on prompts_per_update x group_size videos {1..}
    max_nfe: int | None = None  # end the run after so many transformer evaluations instead {1..}
    prompts_per_update: int | None = None  # prompts of an update, over all processes {1..}
    group_size: int | None = None  # videos per prompt, compared with one another {2..}
    ppo_epochs: int = 1  # optimizer steps on the same videos {1..}
    micro_batch: int | None = None  # videos per forward pass of one process {1..}
    lr: float | None = None  # AdamW's learning rate {0<..}
    weight_decay: float = 1e-4  # AdamW's weight decay {0..}
    adam_eps: float = 1e-15  # AdamW's epsilon; gradients of averaged log-probabilities are tiny {0<..}
    max_grad_norm: float = 1.0  # gradient norm above which it is clipped {0<..}
    clip_range: float = 1e-3  # PPO's clip; small because log-probabilities are averages over the latent {0<..}
    adv_std: str = "global"  # standard deviation in the advantage: of the whole batch or of the group {global|group}
    kl: float = 0.0  # weight of the KL divergence to the model without its adapter {0..}
    full: bool = False  # train all weights instead of a LoRA adapter
    lora_rank: int = 16  # rank of the adapter {1..}
    lora_alpha: int = 32  # scale of the adapter: alpha / rank {1..}
    lora_targets: str = "to_q,to_k,to_v,to_out.0"  # endings of the names of the modules that get an adapter
    ema_decay: float = 0.9  # moving average of the trained weights, for evaluation and export {0..1}
    ema_every: int | None = None  # updates between two steps of the moving average {1..}
    max_bad_updates: int = 5  # stop after so many non-finite updates in a row {1..}
    shard_size: int | None = None  # processes that share a copy of the model; 1 = a copy each, 0 = one a machine {0..}
    timeout: int = 1800  # seconds after which a process that waits for another gives up {1..}

    # Prompts and rewards
    prompts: str | None = None  # file: a prompt a line, or .jsonl with "prompt" and metadata for the reward
    reward: str | None = None  # name[@model][:weight],.. or http://host:port, or file.py:function, which is run
    reward_mix: str = "standardize"  # of several rewards, each standardized over the batch or not {standardize|raw}
    reward_frames: int = 8  # evenly spaced frames that image rewards look at {1..}
    reward_top: float | None = None  # share of the best frames that counts; by default all {0<..1}
    reward_on_error: str = "stop"  # or drop the groups whose reward failed {stop|drop}
    reward_timeout: int = 300  # seconds that a reward server may take for a request {1..}
    host: str = "127.0.0.1"  # `serve`: the address to listen at; with others, set FLASH_GRPO_TOKEN on both sides
    port: int = 8000  # `serve`: the port to listen at; 0 = any {0..65535}

    # Evaluation and files
    eval_every: int | None = None  # updates between evaluations; 0 = only before and after {0..}
    eval_prompts: str | None = None  # file of held-out prompts; by default a part of the built-in ones
    eval_num_steps: int | None = None  # deterministic steps of the evaluation {1..}
    eval_videos: int = 12  # videos saved at each evaluation {0..}
    save_every: int | None = None  # updates between checkpoints; 0 = only at the end {0..}
    keep: int = 2  # newest checkpoints that are kept {1..}
    output_dir: str = "runs"  # parent of the run's folder
    run_name: str | None = None  # the run's folder; by default model-method-seed
    resume: bool = False  # continue the run in that folder from its newest whole checkpoint
    tracker: str = "tensorboard"  # where Accelerate logs besides metrics.jsonl {tensorboard|wandb|none}
    fps: int | None = None  # frames a second of the saved videos {1..}


# fmt: off
# A model's row. Wan's settings are the paper's for 1.3B; for 14B it takes 12 steps. `repo` is the pipeline on the hub.
WAN = {
    "height": 480, "width": 832, "num_frames": 81, "num_steps": 20, "guidance_scale": 4.5, "dtype": "bf16",
    "gradient_checkpointing": True, "cfg_batch": False, "num_updates": 300, "prompts_per_update": 24, "group_size": 4,
    "micro_batch": 1, "lr": 1e-4, "ema_every": 8, "reward": "pickscore", "eval_every": 25, "eval_num_steps": 50,
    "save_every": 25, "fps": 16, "shard_size": 1,
}
MODELS: dict[str, dict] = {
    "tiny": {
        "height": 16, "width": 16, "num_frames": 6, "num_steps": 10, "flow_shift": 3.0, "guidance_scale": 1.0,
        "dtype": "fp32", "gradient_checkpointing": False, "cfg_batch": True, "num_updates": 80,
        "prompts_per_update": 6, "group_size": 8, "micro_batch": 48, "lr": 6e-4, "ema_every": 1, "reward": "palette",
        "eval_every": 20, "eval_num_steps": 20, "save_every": 20, "fps": 4, "shard_size": 1,
    },
    "wan1.3b": WAN | {"repo": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"},
    "wan14b": WAN | {"repo": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "num_steps": 12, "shard_size": 0},
    "wan2.2-5b": WAN | {
        "repo": "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "height": 704, "width": 1280, "num_frames": 121, "fps": 24,
    },
    "wan2.2-a14b": WAN | {"repo": "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "num_steps": 12, "shard_size": 0},
}

# A method's row: which steps are stochastic, hence trained, with which noise and weight, and how the rest is solved.
FLOW_GRPO = {
    "sde": "flow", "window": "0:-1", "window_every": 0, "sde_steps": 0, "train_fraction": 1.0, "grouping": "iso",
    "group_noise": "independent", "rectify": False, "solver": "euler", "compress": 1.0,
}
FLASH_GRPO = FLOW_GRPO | {"sde": "wan", "window": None, "sde_steps": 1, "rectify": True}
METHODS: dict[str, dict] = {
    "flash": FLASH_GRPO,  # arXiv 2605.15980
    "flash-shared": FLASH_GRPO | {"group_noise": "shared"},  # ours: a group differs by the policy's one action alone
    "flow": FLOW_GRPO,  # arXiv 2505.05470
    "dance": FLOW_GRPO | {"sde": "dance", "train_fraction": 0.6, "group_noise": "shared"},  # arXiv 2505.07818
    "mix": FLOW_GRPO | {"window": "0:4", "window_every": 25},  # arXiv 2507.21802
    "mix-flash": FLOW_GRPO | {"window": "0:4", "window_every": 25, "solver": "dpm2", "compress": 0.4},
}
COLORS = {
    "red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1),
    "yellow": (1, 1, 0), "magenta": (1, 0, 1), "cyan": (0, 1, 1),
}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
# fmt: on
TINY_PROMPTS = [f"a {c} {s} moving {d}" for d in DIRECTIONS for s in ("circle", "square") for c in COLORS]
WAN_PROMPTS = """\
A barista pours steamed milk into a cup and draws a leaf, close-up, soft morning light.
A girl in a yellow raincoat jumps into puddles on a city street at night, neon reflections.
A chef tosses vegetables in a flaming wok in a busy kitchen.
A horse gallops through shallow water, backlit by the setting sun.
Paper lanterns rise into the night sky above a lake.
A golden retriever runs along a beach at sunset, tracking shot.""".splitlines()
REWARDS = ["palette", "motion", "pickscore", "clip"]


class UserError(ValueError):
    """Something that the user typed, or a file that they named, is wrong: shown as one line, exit code 2."""


def config_fields() -> dict[str, tuple[str, str, str]]:
    """{field: (topic, help, accepted)}, read from Config's source, where each is written beside its field."""
    found, topic = {}, ""
    for line in inspect.getsource(Config).splitlines():
        if heading := re.fullmatch(r"    # (.+)", line):
            topic = heading[1]
        if field := re.fullmatch(r"    (\w+): .*?  # (.+?)(?: \{(.+)\})?", line):
            found[field[1]] = (topic, field[2], field[3] or "")
    return found


def check_accepted(name: str, value: Any, accepted: str) -> None:
    """Raise UserError unless a value is among the accepted ones: `a|b|c`, or a range `low..high` (`0<..` = above 0)."""
    if "|" in accepted and value not in accepted.split("|"):
        raise UserError(f"--{name} {value}: choose one of {accepted.replace('|', ', ')}")
    if ".." in accepted and value is not None:
        low, high = accepted.split("..")
        inside = value > 0 if low == "0<" else value >= float(low)
        if not inside or not math.isfinite(value) or (high and value > float(high)):
            limit = "above 0" if low == "0<" else f"at least {low}"
            raise UserError(f"--{name} {value}: must be {limit}{f' and at most {high}' if high else ''}")


def fill(config: Config) -> Config:
    """Return a copy with the unset fields filled: by the method's row, the model's row, then what follows from them."""
    method = config.method or ("flash-shared" if config.model == "tiny" else "flash")
    check_accepted("method", method, "|".join(METHODS))
    if config.model not in MODELS and "/" not in config.model and not os.path.isdir(config.model):
        raise UserError(f"--model {config.model}: choose one of {', '.join(MODELS)}, a folder or owner/name")
    config = replace(config, method=method, num_updates=config.num_updates or (10**9 if config.max_nfe else None))
    rows = METHODS[method] | MODELS.get(config.model, WAN)
    config = replace(config, **{n: v for n, v in rows.items() if n != "repo" and getattr(config, n) is None})
    derived = {
        "window": f"0:{max(1, config.num_steps // 2)}",
        "flow_shift": 5.0 if min(config.height, config.width) >= 700 else 3.0,
        "eta": 0.3 if config.sde == "dance" else 0.7,
        "guidance_scale_2": config.guidance_scale,
        "run_name": f"{Path(config.model).name}-{config.method}-seed{config.seed}",
    }
    return replace(config, **{name: value for name, value in derived.items() if getattr(config, name) is None})


def window_of(config: Config) -> tuple[int, int]:
    """The (start, stop) of the steps that may be stochastic. Raises UserError unless they lie in the schedule."""
    n, match = config.num_steps, re.fullmatch(r"(?:(-?\d+):)?(-?\d+)", config.window)
    start, stop = (int(match[1] or 0), int(match[2])) if match else (0, 0)
    start, stop = start + n * (start < 0), stop + n * (stop < 0)
    if not 0 <= start < stop <= n:
        raise UserError(f"--window {config.window}: give start:stop inside the steps 0:{n}, such as 0:{max(1, n // 2)}")
    return start, stop


def validate(config: Config, world_size: int = 1, job: str = "train") -> None:
    """Check a filled Config without loading anything. Raises UserError that names flag, value and what is accepted."""

    def need(condition: bool, name: str, accepted: str) -> None:
        if not condition:
            raise UserError(f"--{name} {getattr(config, name)}: {accepted}")

    for name, (_, _, accepted) in config_fields().items():
        check_accepted(name, getattr(config, name), accepted)
    (start, stop), n, tiny = window_of(config), config.num_steps, config.model == "tiny"
    need(config.sde_steps <= stop - start, "sde_steps", f"the window {config.window} has only {stop - start} steps")
    need(not config.window_every or stop < n, "window", f"to move, it must end before the last step: stop at {n - 1}")
    need(config.sde != "cps" or stop < n, "window", f"the last step of cps has std 0: stop at {n - 1} or before")
    need(config.sde != "wan" or n > 1, "num_steps", "a wan SDE of a single step has std 0: take 2 steps or more")
    unit = world_size // math.gcd(world_size, config.group_size)
    fits = f"its videos do not divide over {world_size} processes: take a multiple of {unit}"
    need(config.prompts_per_update % unit == 0, "prompts_per_update", fits)
    need(world_size % (config.shard_size or 1) == 0, "shard_size", f"must divide the {world_size} processes")
    need(not (config.kl and config.full), "kl", "needs an adapter to switch off for the reference: drop --full")
    space = 32 if "5b" in config.model.lower() else 16  # pixels: the VAE's factor times the patch
    for name, unit, rest, only in (("height", space, 0, 16), ("width", space, 0, 16), ("num_frames", 4, 1, 6)):
        value = getattr(config, name)
        above = (value - rest) // unit * unit + rest + unit
        need(tiny or value % unit == rest, name, f"must be {unit} n{' + 1' * rest}, such as {above}")
        need(not tiny or value == only, name, f"the tiny model makes 6 frames of 16 x 16 pixels: {only}")
    need(bool(config.lora_targets.strip(", ")), "lora_targets", "name at least one module, such as to_q,to_v")
    need(not re.search(r"[/\\]|^\.*$", config.run_name), "run_name", "give a plain name; its parent is --output_dir")
    parse_reward(config.reward)
    load_prompts(config, "prompts")
    need(len(load_prompts(config, "eval_prompts")) > 1, "eval_prompts", "holds one prompt; its interval needs two")
    folder = Path(config.output_dir) / config.run_name
    free = config.resume or job != "train" or not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    need(free, "run_name", f"{folder} already holds a run; continue it with --resume or take another name")


def parse_reward(text: str) -> list[tuple[str, str, float]]:
    """The parts (kind, argument, weight) of --reward. Raises UserError."""
    parts = []
    shape = r"(?P<what>.+\.py:[A-Za-z_]\w*|https?://\S+?:\d+|\w+)(?:@(?P<model>[^:]+))?(?::(?P<weight>-?\d*\.?\d+))?"
    for part in map(str.strip, text.split(",")):
        match = re.fullmatch(shape, part)
        kind = argument = match["what"] if match else part
        if ".py:" in argument:
            kind, (path, name) = "file", argument.rsplit(":", 1)
            source = Path(path).read_text(errors="replace") if Path(path).is_file() else ""
            if not re.search(rf"^(def|class) {name}\b", source, re.M):
                raise UserError(f"--reward {part}: there is no function {name} in a file {path}")
        elif match and "://" in argument:
            kind = "http"
        elif match and kind in REWARDS:
            argument = match["model"] or ""
        else:
            raise UserError(f"--reward {part}: choose of {', '.join(REWARDS)}, http://host:port, file.py:function")
        parts.append((kind, argument, float(match["weight"] or 1)))
    return parts


def load_prompts(config: Config, flag: str) -> list[dict]:
    """The training (`prompts`) or held-out (`eval_prompts`) prompts, as dicts of `prompt` and free metadata."""
    file, tiny = getattr(config, flag), config.model == "tiny"
    if file is None:
        every = TINY_PROMPTS if tiny else WAN_PROMPTS
        wanted = flag == "eval_prompts"  # a quarter is held out, of each colour alike
        return [{"prompt": p} for i, p in enumerate(every) if ((i + i // 6) % 4 == 0) == wanted]
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--{flag} {file}: cannot be read as UTF-8 text: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            item = json.loads(line) if file.endswith(".jsonl") and line.strip() else {"prompt": line.strip()}
        except ValueError:
            item = None
        if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
            raise UserError(f'--{flag} {file}: line {number} must be a JSON object with a text "prompt"')
        if tiny and item["prompt"] not in ["", *TINY_PROMPTS]:
            raise UserError(f'--{flag} {file}: line {number} must be like "a red circle moving left" for tiny')
        prompts += [item] if item["prompt"].strip() else []
    if not prompts:
        raise UserError(f"--{flag} {file}: holds no prompt; give one a line")
    return prompts


def parse_args(argv: list[str]) -> tuple[str, Config]:
    """The job of a command line (train or serve) and its filled Config. Exits with 2 on an error."""
    job, argv = ("serve", argv[1:]) if argv[:1] == ["serve"] else ("train", argv)
    how = {"usage": "flash_grpo.py [serve] [--flag value ...]; --no_x turns a switch --x off; in brackets: the values"}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, **how)
    groups, types = {}, {field.name: field.type for field in fields(Config)}
    for name, (topic, text, accepted) in config_fields().items():
        groups[topic] = group = groups.get(topic) or parser.add_argument_group(topic)
        kind = next(t for t in (bool, int, float, str) if t in (types[name], *getattr(types[name], "__args__", ())))
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", help=text)
            group.add_argument(f"--no_{name}", action="store_false", dest=name, help=argparse.SUPPRESS)
        else:
            group.add_argument(f"--{name}", type=kind, help=text, metavar=accepted or kind.__name__)

    def error(message: str) -> None:
        raise UserError(message.removeprefix("argument "))

    parser.error = error
    try:
        given, unknown = parser.parse_known_args([a for a in argv if a not in ("-h", "--help")])
        if unknown:
            raise UserError(f"{unknown[0]}: no such flag; --help lists all")
        config = fill(Config(**vars(given)))
        if "-h" in argv or "--help" in argv:
            for action in (action for action in parser._actions if action.help != argparse.SUPPRESS):
                action.help = f"{action.help} [{getattr(config, action.dest)}]".replace("%", "%%")
            parser.print_help()
            sys.exit(0)
        validate(config, int(os.environ.get("WORLD_SIZE", "1")), job)
    except UserError as problem:
        print(f"flash_grpo.py: error: {problem}", file=sys.stderr)
        sys.exit(2)
    return job, config


# The arguments are read before the heavy imports, so that --help and a typing error answer at once.
JOB, CONFIG = parse_args(sys.argv[1:]) if __name__ == "__main__" else ("", None)

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if JOB != "serve":  # a reward server may run in an environment that has none of these
    import imageio.v3 as iio
    import numpy as np
    from accelerate import Accelerator, InitProcessGroupKwargs, init_empty_weights
    from accelerate.utils import gather_object
    from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
    from einops import rearrange, repeat
    from huggingface_hub import snapshot_download
    from matplotlib.figure import Figure
    from peft import LoraConfig, get_peft_model_state_dict
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file, save_file
    from tqdm import tqdm

# ==== The algorithm, 1: schedule and stochastic step ================================================================


def make_sigmas(num_steps: int, shift: float) -> Tensor:
    """Noise levels of a flow-matching sampler, float64 [num_steps + 1], falling from 1 to 0; shift f > 0.

    Raises ValueError for num_steps < 1 or shift <= 0.
    """
    if num_steps < 1 or not shift > 0:
        raise ValueError(f"need num_steps >= 1 and shift > 0, got {num_steps} and {shift}")
    return shift_sigma(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift)


def shift_sigma(u: Tensor, shift: float) -> Tensor:
    """sigma(u) = f u / (1 + (f - 1) u): the larger the shift f, the more steps are spent at high noise."""
    return torch.where(u == 1, 1.0, shift * u / (1 + (shift - 1) * u))  # exactly 1, also where the ratio rounds


def sde_coefficients(
    sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, kind: str = "wan", eta: float = 0.7
) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers (a, b, std) of a stochastic step, for all kinds: x' = a x + b v + std z.

    For an SDE with the noise level s that keeps the marginals of the flow dx = v dt (dt = sigma' - sigma < 0):
        a = 1 + s^2 / (2 sigma) dt,   b = (1 + s^2 (1 - sigma) / (2 sigma)) dt,   std = s sqrt(-dt)
    where `wan` has s = sigma_max sigma (Flash-GRPO's code: sigma_max falling to the last sigma, 0), `flow` has
    s = eta sqrt(sigma / (1 - sigma)) (Flow-GRPO's code: in 1 - sigma, 1 counts as sigma_max), and `dance` s = eta.
    `cps` (arXiv 2509.05952) is another rule, on x0 = x - sigma v and eps = x + (1 - sigma) v:
        x' = (1 - sigma') x0 + sigma' cos(eta pi / 2) eps + sigma' sin(eta pi / 2) z

    Args: float64 tensors of one shape; 0 <= sigma' < sigma <= 1. Raises ValueError for other ones or an unknown kind.
    """
    if not bool(((sigma > 0) & (sigma <= 1) & (sigma_next >= 0) & (sigma_next < sigma)).all()):
        raise ValueError("need 0 <= sigma_next < sigma <= 1")
    if kind == "cps":
        cos, sin = math.cos(eta * math.pi / 2), math.sin(eta * math.pi / 2)
        a = (1 - sigma_next) + sigma_next * cos
        b = -sigma * (1 - sigma_next) + (1 - sigma) * sigma_next * cos
        return a, b, sigma_next * sin
    if kind == "wan":
        s = sigma_max * sigma
    elif kind == "flow":
        s = eta * (sigma / (1 - torch.where(sigma == 1, sigma_max, sigma))).sqrt()
    elif kind == "dance":
        s = torch.full_like(sigma, eta)
    else:
        raise ValueError(f"unknown SDE {kind!r}: choose wan, flow, dance or cps")
    dt = sigma_next - sigma
    return 1 + s**2 / (2 * sigma) * dt, (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt, s * (-dt).sqrt()


def sde_step(
    x: Tensor, v: Tensor, sigma, sigma_next, sigma_max, kind: str = "wan", eta: float = 0.7
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and gradient scale of one stochastic step (see sde_coefficients for the formulas).

    Since grad_v log p = z (d mean / d v) / std, the policy gradient of a step is proportional to
    lambda = |d mean / d v| / std = |b| / std (Flash-GRPO's temporal gradient rectification divides by it).

    Args:
        x, v: latents and velocity, [B, C, T, H, W].
        sigma, sigma_next, sigma_max: scalars or [B]; sigma_max is the schedule's second value.
    Returns: mean like x; std and grad_scale, [B or 1, 1, 1, 1, 1].
    Raises ValueError as sde_coefficients, and for a step whose std is 0: it has no density.
    """
    levels = torch.broadcast_tensors(*(torch.as_tensor(s, dtype=torch.float64) for s in (sigma, sigma_next, sigma_max)))
    a, b, std = sde_coefficients(*levels, kind, eta)
    if not bool((std > 0).all()):
        raise ValueError("this step has std 0 and so no density")
    a, b, std, grad_scale = (c.to(x).reshape(-1, *[1] * (x.ndim - 1)) for c in (a, b, std, b.abs() / std))
    return a * x + b * v, std, grad_scale


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """log N(x'; mean, std^2), averaged (the field's convention) over all but the batch axis. Returns [B]."""
    log_prob = -((x_next - mean) ** 2) / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
    return log_prob.flatten(1).mean(1)


def dpm2_step(x: Tensor, x0: Tensor, x0_prev: Tensor | None, sigma_prev, sigma, sigma_next) -> Tensor:
    """One deterministic step of DPM-Solver++(2M) (arXiv 2211.01095) with alpha = 1 - sigma and h the log-SNR step.

    Args: x at sigma, its data prediction x0 = x - sigma v, and that of the step before, which None (or a last step, to
    sigma' = 0) lowers to first order, equal to Euler. sigma_*: float64, broadcastable to x. Returns x at sigma'.
    """
    if x0_prev is not None:
        h, h_prev = torch.logit(sigma) - torch.logit(sigma_next), torch.logit(sigma_prev) - torch.logit(sigma)
        half_inverse_r = torch.where(torch.isfinite(h), h / (2 * h_prev), 0.0)
        x0 = x0 + half_inverse_r.to(x) * (x0 - x0_prev)
    ratio = sigma_next / sigma
    # alpha' (1 - exp(-h)), written so that it also holds at sigma = 1 and sigma' = 0.
    return ratio.to(x) * x + ((1 - sigma_next) - ratio * (1 - sigma)).to(x) * x0


# ==== The algorithm, 2: which steps are stochastic and trained; advantages, weights, loss ===========================


def generator(*key: Any) -> torch.Generator:
    """A CPU random generator seeded by the key, whatever the rank, the device or what was drawn before."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_sde_mask(
    num_prompts: int, group_size: int, num_steps: int, window: tuple[int, int], sde_steps: int = 1,
    grouping: str = "iso", window_every: int = 0, update: int = 0, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Which steps of which video are stochastic: bool [num_prompts * group_size, num_steps], prompt by prompt.

    sde_steps of the window's steps are drawn uniformly (0 = all): afresh for each prompt and update and shared by the
    prompt's videos (`iso`: iso-temporal grouping), or for each video (`random`). The window moves on by one step every
    window_every updates until it meets the last step (MixGRPO). A pure function: every rank draws the same mask.
    """
    start, stop = window
    if window_every:
        moved = min(update // window_every, num_steps - 1 - stop)
        start, stop = start + moved, stop + moved
    mask = torch.zeros(num_prompts * group_size, num_steps, dtype=torch.bool)
    for i in range(len(mask)):
        slot, member = divmod(i, group_size)
        key = (seed, "mask", update, slot) + ((member,) if grouping == "random" else ())
        steps = torch.randperm(stop - start, generator=generator(*key))
        mask[i, start + steps[: sde_steps or None]] = True
    return mask


def draw_train_mask(sde_mask: Tensor, fraction: float, update: int = 0, seed: int = 0) -> Tensor:
    """The stochastic steps that are trained: a random share (DanceGRPO: 0.6), equally many for all videos."""
    mask = torch.zeros_like(sde_mask)
    for i, row in enumerate(sde_mask):
        steps = row.nonzero()[:, 0]
        keep = max(1, round(fraction * len(steps)))
        order = torch.randperm(len(steps), generator=generator(seed, "train", update, i))
        mask[i, steps[order[:keep]]] = True
    return mask


def draw_masks(config: Config, update: int) -> tuple[Tensor, Tensor]:
    """The stochastic and the trained steps of an update's whole global batch, each bool [B, N]."""
    row = (config.num_steps, window_of(config), config.sde_steps, config.grouping, config.window_every)
    sde_mask = draw_sde_mask(config.prompts_per_update, config.group_size, *row, update, config.seed)
    return sde_mask, draw_train_mask(sde_mask, config.train_fraction, update, config.seed)


def group_advantages(rewards: Tensor, group_ids: Tensor, std: str = "global", clip: float = 5.0) -> Tensor:
    """A = (r - mean of its group) / (std + 1e-4), clipped to +-clip; std over the batch (the paper) or the group.

    Args: rewards [B]; group_ids int [B] (a sample's position in the batch, not its prompt's text). Returns float32 [B],
    exactly 0 for a group of equal rewards. Raises ValueError for other shapes, a non-finite reward or another `std`.
    """
    fits = rewards.ndim == 1 and rewards.shape == group_ids.shape and std in ("global", "group")
    if not fits or not bool(torch.isfinite(rewards).all()):
        raise ValueError("need rewards and group_ids [B], finite rewards, and std 'global' or 'group'")
    rewards = rewards.double()
    advantages = torch.zeros_like(rewards)
    for g in group_ids.unique():
        group = rewards[group_ids == g]
        if bool((group != group[0]).any()):  # else a mean that rounds in its last bit would become a signal
            scale = group.std() if std == "group" else rewards.std()
            advantages[group_ids == g] = (group - group.mean()) / (scale + 1e-4)
    return advantages.clamp(-clip, clip).float()


def grad_scales(config: Config) -> Tensor:
    """lambda of every step of the Config's schedule, float64 [N], computed for any schedule (inf where std is 0)."""
    sigmas = make_sigmas(config.num_steps, config.flow_shift)
    _, b, std = sde_coefficients(sigmas[:-1], sigmas[1:], sigmas[1].expand(config.num_steps), config.sde, config.eta)
    return b.abs() / std


def rectification_weights(grad_scale: Tensor) -> Tensor:
    """w = (1 / lambda) / mean(1 / lambda): equal pull for every timestep, mean weight 1 over the whole global batch.

    Args: grad_scale [B], lambda of every trained transition of the update, on all processes. Returns float32 [B].
    """
    inverse = 1 / grad_scale.double().flatten()
    return (inverse / inverse.mean()).float()


def grpo_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, weights: Tensor, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate -mean(w min(A rho, A clip(rho, 1 - c, 1 + c))) with rho = exp(log p - log p_old).

    Args: all [B]. Returns the scalar loss and detached stats: ratio_dev_max = max|rho - 1|, clip_fraction.
    """
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = -(weights * torch.minimum(advantages * ratio, advantages * clipped)).mean()
    deviation = (ratio - 1).detach().abs()
    return loss, {"ratio_dev_max": deviation.max(), "clip_fraction": (deviation > clip_range).float().mean()}


# ==== The Wan policy ==================================================================================================

CACHE = Path(os.environ.get("FLASH_GRPO_CACHE", Path.home() / ".cache" / "flash_grpo"))

# fmt: off
# True sizes of the presets for --weights random: what differs from the classes' defaults, which are those of 14B.
ARCHITECTURES: dict[str, dict] = {
    "tiny": {
        "patch_size": (2, 4, 4), "num_attention_heads": 4, "attention_head_dim": 32, "in_channels": 3,
        "out_channels": 3, "text_dim": 32, "freq_dim": 64, "ffn_dim": 512, "num_layers": 3, "rope_max_seq_len": 32,
    },
    "wan1.3b": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "wan14b": {},
    "wan2.2-5b": {
        "num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48,
    },
    "wan2.2-a14b": {},
}
VAE_5B = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12,
    "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
}
# fmt: on


@contextmanager
def timed(seconds: dict, phase: str, device: torch.device):
    """Add the time spent inside to seconds[phase]; waits for the GPU, so that work counts where it was asked for."""
    started = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started


def resolve_folder(config: Config) -> Path | None:
    """The local folder of the model's diffusers pipeline, made or downloaded first; None for random weights."""
    if config.weights == "random":
        if config.model not in ARCHITECTURES:
            raise UserError(f"--weights random: needs a preset, one of {', '.join(ARCHITECTURES)}, not {config.model}")
        return None
    if config.model == "tiny" or os.path.isdir(config.model):
        return pretrained_tiny() if config.model == "tiny" else Path(config.model)
    repo = MODELS.get(config.model, {}).get("repo", config.model)
    try:
        return Path(snapshot_download(repo, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except Exception as error:
        raise UserError(f"--model {config.model}: cannot download {repo}: {str(error).splitlines()[0]}") from error


def local_slice(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This process's part of a possibly sharded parameter, and where it lies in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, n) for n in parameter.shape)
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))


def global_max(value: int, policy: "WanPolicy") -> int:
    """The largest value over the processes of a sharded model, which must all call it."""
    if policy.mesh is None:
        return value
    largest = torch.tensor(value, device=policy.device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)


class WanPolicy:
    """The policy: one Wan transformer (or Wan 2.2's two experts, the high-noise one first), guidance, prompts, decoder.

    trained: {name: parameter}; latent_shape: (C, T, H, W); nfe: transformer evaluations of this process so far;
    seconds: spent by phase; vae: None for tiny. Raises UserError.
    """

    def __init__(self, config: Config, device: torch.device, mesh=None):
        self.config, self.device, self.mesh, self.nfe, self.seconds = config, device, mesh, 0, {}
        self.folder, tiny, is_5b = resolve_folder(config), config.model == "tiny", config.model == "wan2.2-5b"
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16")
        index = {"transformer_2": [config.model == "wan2.2-a14b"], "expand_timesteps": is_5b}
        if self.folder and not tiny and (file := self.folder / "model_index.json").exists():
            index = json.loads(file.read_text())
        self.parts = ["transformer", *["transformer_2"] * bool(index.get("transformer_2", [None])[0])]
        self.boundary = (index.get("boundary_ratio") or 0.875) if len(self.parts) == 2 else None
        self.expand_timesteps = index.get("expand_timesteps", False)
        self.experts = [self._load_transformer(part) for part in self.parts]
        self.trained = {}
        for part, expert in zip(self.parts, self.experts, strict=True):
            self.trained |= {f"{part}.{name}": p for name, p in expert.named_parameters() if p.requires_grad}
        self.vae, space, frames, self.text_length = None, 1, 1, 5
        if not tiny:
            if self.folder:
                self.vae = AutoencoderKLWan.from_pretrained(self.folder, subfolder="vae", use_safetensors=True)
            else:
                self.vae = AutoencoderKLWan(**(VAE_5B if is_5b else {}))
            self.vae.to(device).eval().requires_grad_(False)
            space, frames = self.vae.config.scale_factor_spatial, self.vae.config.scale_factor_temporal
            self.text_length = 512
        arch = self.experts[0].config
        size = ((config.num_frames - 1) // frames + 1, config.height // space, config.width // space)
        self.latent_shape, self.embeddings = (arch.in_channels, *size), {}

    # ---- weights -----------------------------------------------------------------------------------------------------

    def _load_transformer(self, part: str):
        """Build on the meta device, add the adapter, shard, and only then let each process fill its own slices."""
        config, low = self.config, torch.bfloat16 if self.config.dtype == "bf16" else torch.float32
        arch = ARCHITECTURES.get(config.model)
        if self.folder:
            file = self.folder / part / "config.json"
            if not file.exists():
                raise UserError(f"--model {config.model}: {file} is missing, so it is no Wan pipeline")
            arch = json.loads(file.read_text())
        with init_empty_weights():  # parameters on meta; the rotary tables are buffers and stay real
            model = WanTransformer3DModel.from_config(arch).eval().requires_grad_(config.full)
        if not config.full:
            targets = config.lora_targets.replace(" ", "").strip(",").split(",")
            names = [f".{name}" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
            if wrong := [target for target in targets if not any(name.endswith(f".{target}") for name in names)]:
                exist = ", ".join(sorted({re.sub(r"^\.(blocks\.\d+\.)?", "", name) for name in names}))
                raise UserError(f"--lora_targets {wrong[0]}: matches nothing; there are {exist}")
            with init_empty_weights():
                model.add_adapter(LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets))
        for name, p in model.named_parameters():
            precise = p.requires_grad or any(key in name.split(".") for key in model._keep_in_fp32_modules)
            p.data = p.data.to(torch.float32 if precise else low)
        # bf16 cannot tell t = 999 from 1000, so autocast must not reach the layers that embed it.
        embedder = model.condition_embedder.time_embedder
        embedder.forward = torch.autocast(self.device.type, enabled=False)(embedder.forward)
        if config.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        if self.mesh is not None:
            # Not cast_forward_inputs: it would round t to bf16. Blocks that are trained whole are gathered in bf16.
            gathered = MixedPrecisionPolicy(low if config.full else None, torch.float32, cast_forward_inputs=False)
            for block in model.blocks:
                fully_shard(block, mesh=self.mesh, mp_policy=gathered)
            fully_shard(model, mesh=self.mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to_empty(device=self.device)
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
        self._fill(model, part)
        return model

    @torch.no_grad()
    def _fill(self, model, part: str) -> None:
        """Read this process's slice of each parameter from safetensors, or draw it; adapters start at A random, B 0."""
        files = sorted((self.folder / part).glob("*.safetensors")) if self.folder else []
        where = {key: file for file in (safe_open(f, "pt") for f in files) for key in file.keys()}  # noqa: SIM118
        for name, p in model.named_parameters():
            (local, index), key = local_slice(p), name.replace(".base_layer.", ".")
            if "lora_A" in name:  # peft's initialization, Kaiming uniform, but the same for any number of processes
                whole = torch.rand(p.shape, generator=generator(self.config.seed, "lora", part, name))
                local.copy_(((2 * whole - 1) / math.sqrt(p.shape[1]))[index])
            elif "lora_B" in name or not local.numel():
                local.zero_()
            elif key in where:
                local.copy_(where[key].get_slice(key)[index])
            elif self.folder:
                raise UserError(f"--model {self.config.model}: {self.folder / part} has no weight {key} in safetensors")
            elif p.ndim > 1:
                torch.manual_seed(generator(part, name, index[0].start).initial_seed())
                local.normal_(0, 1 / math.sqrt(p[0].numel()))
            else:
                local.fill_(float("norm" in name and name.endswith("weight")))

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def encode(self, prompts: list[str], is_writer: bool = True, wait: Callable[[], None] = lambda: None) -> None:
        """Fill self.embeddings ({prompt: float32 [L, D] on the CPU}) through the disk cache, then free the encoder.

        The writer encodes what the cache lacks, by WanPipeline.encode_prompt; behind the barrier `wait` all read.
        """
        prompts = sorted({*prompts, self.config.negative_prompt})
        if self.config.model == "tiny" or not self.folder:
            shape, tiny = (64, self.experts[0].config.text_dim), self.config.model == "tiny"
            for p in prompts:
                self.embeddings[p] = tiny_embedding(p) if tiny else torch.randn(shape, generator=generator(p))
            return
        probes = ["a red circle", "two dogs run through the rain at night"]
        dtype = torch.bfloat16 if self.config.dtype == "bf16" else torch.float32
        encoder_files = sorted((self.folder / "text_encoder").resolve().glob("*"))
        made_by = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in encoder_files]
        key = {p: f"{generator(made_by, dtype, p).initial_seed():016x}.safetensors" for p in {*prompts, *probes}}
        path = {p: CACHE / "prompts" / key[p] for p in key}
        missing = [p for p in path if not path[p].exists()]
        if missing and is_writer:
            none = {"transformer": None, "transformer_2": None, "vae": None}
            pipe = WanPipeline.from_pretrained(self.folder, dtype=dtype, use_safetensors=True, **none)
            pipe.text_encoder.to(self.device)
            (CACHE / "prompts").mkdir(parents=True, exist_ok=True)
            for prompt in missing:
                with torch.no_grad():
                    rows = pipe.encode_prompt(prompt, None, False, max_sequence_length=512, device=self.device)[0][0]
                used = int(rows.ne(0).any(1).nonzero().max()) + 1  # without the zeros behind the prompt's end
                partial = CACHE / "prompts" / f".{os.getpid()}.tmp"
                save_file({"embedding": rows[:used].cpu().contiguous()}, partial)
                partial.rename(path[prompt])
            del pipe
            torch.cuda.empty_cache()
        wait()
        loaded = {p: load_file(path[p])["embedding"].float() for p in path}
        a, b = (loaded[probe].mean(0) for probe in probes)
        if not float((a - b).norm()) > 1e-3 * float(a.norm()):
            raise UserError(f"--model {self.config.model}: all prompts are embedded alike; are tied weights missing?")
        self.embeddings = {p: loaded[p] for p in prompts}

    def _text(self, prompts: list[str]) -> Tensor:
        rows = [self.embeddings[prompt] for prompt in prompts]
        padded = [torch.nn.functional.pad(row, (0, 0, 0, self.text_length - len(row))) for row in rows]
        return torch.stack(padded).to(self.device)

    # ---- velocity and video ------------------------------------------------------------------------------------------

    def velocity(self, x: Tensor, sigma: Tensor, prompts: list[str]) -> Tensor:
        """The guided velocity v(x, sigma, prompt): one function for rollout and training, so that rho starts at 1.

        Args: x float32 [B, C, T, H, W]; sigma float64 [B] on the CPU; prompts [B]. Returns float32, like x.
        Counts self.nfe: one per sample and forward (two with guidance), two more for a backward, one for recomputation.
        On a sharded model all processes must call it equally often; B may be 0, and an idle expert runs on zeros.
        """
        high = torch.ones(len(x), dtype=torch.bool) if self.boundary is None else sigma >= self.boundary
        v, idle = torch.zeros_like(x), 0.0
        for i, expert in enumerate(self.experts):
            rows = (high if i == 0 else ~high).nonzero()[:, 0]
            scale = (self.config.guidance_scale, self.config.guidance_scale_2)[i]
            needed = self.mesh is not None and (self.boundary is None or global_max(len(rows), self))
            if len(rows):
                with timed(self.seconds, "transformer", self.device):
                    part = self._guided(expert, x[rows], sigma[rows], [prompts[r] for r in rows], scale)
                v = part if len(rows) == len(x) else v.index_put((rows.to(x.device),), part)
                backward = torch.is_grad_enabled() * (2 + bool(self.config.gradient_checkpointing))
                self.nfe += len(rows) * (1 if scale == 1 else 2) * (1 + backward)
            elif needed:  # another process runs this expert, whose weights and gradients all must help to gather
                blank = x.new_zeros(1, *self.latent_shape)
                idle += 0 * self._guided(expert, blank, torch.ones(1), [self.config.negative_prompt], scale).sum()
        return v if isinstance(idle, float) else v + idle

    def _guided(self, expert, x: Tensor, sigma: Tensor, prompts: list[str], scale: float) -> Tensor:
        t = (1000 * sigma).float().to(x.device)
        if self.expand_timesteps:  # TI2V-5B takes one timestep per token
            tokens = math.prod(n // p for n, p in zip(x.shape[2:], expert.config.patch_size, strict=True))
            t = repeat(t, "b -> b tokens", tokens=tokens)
        text = self._text(prompts)
        with self.autocast:
            if scale == 1:
                return expert(x, t, text, return_dict=False)[0].float()
            no_text = self._text([self.config.negative_prompt] * len(x))
            if self.config.cfg_batch:
                both = expert(torch.cat([x, x]), torch.cat([t, t]), torch.cat([text, no_text]), return_dict=False)[0]
                cond, uncond = both.float().chunk(2)
            else:
                cond, uncond = (expert(x, t, c, return_dict=False)[0].float() for c in (text, no_text))
        return uncond + scale * (cond - uncond)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, T, H, W] to videos uint8 [B, T', H', W', 3] on the CPU; tiny's latents are pixels."""
        videos = []
        for video in latents.split(1):
            if self.vae is not None:
                stats = (self.vae.config.latents_mean, self.vae.config.latents_std)
                mean, std = (torch.tensor(values).to(video).view(1, -1, 1, 1, 1) for values in stats)
                video = self.vae.decode(video * std + mean, return_dict=False)[0]
            pixels = rearrange(video[0].float() / 2 + 0.5, "c t h w -> t h w c").clamp(0, 1)
            videos.append((pixels * 255).round().to(torch.uint8).cpu())
        return torch.stack(videos)


# ==== The tiny world: captioned videos of moving shapes, and a small Wan that draws them ==============================


def tiny_videos(prompts: list[str], rng: torch.Generator) -> Tensor:
    """Videos [B, 3, 6, 16, 16] in [-1, 1] of "a <colour> <shape> moving <direction>", a pixel a frame, on black."""
    words = [prompt.split() for prompt in prompts]
    color = torch.tensor([COLORS[w[1]] for w in words], dtype=torch.float32)
    is_circle = torch.tensor([w[2] == "circle" for w in words])[:, None, None, None]
    direction = torch.tensor([DIRECTIONS[w[4]] for w in words], dtype=torch.float32)
    room = 3 - 2.5 * direction.abs()  # how far the middle of the path may lie from the middle of the frame
    middle = 8 + (2 * torch.rand(len(words), 2, generator=rng) - 1) * room
    path = middle[:, None] + direction[:, None] * (torch.arange(6) - 2.5)[None, :, None]
    pixel = torch.arange(16) + 0.5
    dx = pixel[None, None, None, :] - path[:, :, 0, None, None]
    dy = pixel[None, None, :, None] - path[:, :, 1, None, None]
    outside = torch.where(is_circle, (dx**2 + dy**2).sqrt() - 3.2, torch.maximum(dx.abs(), dy.abs()) - 2.85)
    return (0.5 - outside).clamp(0, 1)[:, None] * color[:, :, None, None, None] * 2 - 1


def tiny_embedding(prompt: str) -> Tensor:
    """The tiny model's text encoder: a fixed random vector per word, float32 [words, 32]."""
    words = [torch.randn(32, generator=generator("word", word)) for word in prompt.split()]
    return torch.stack(words) if words else torch.zeros(0, 32)


def pretrained_tiny(num_updates: int = 1000, batch: int = 16) -> Path:
    """The folder of the tiny Wan, pretrained by flow matching at first use (over a minute) and cached whole."""
    made_by = (inspect.getsource(pretrained_tiny), inspect.getsource(tiny_videos), ARCHITECTURES["tiny"], TINY_PROMPTS)
    key = f"{generator(made_by, torch.__version__).initial_seed():016x}"
    folder, weights = CACHE / f"tiny-{key}", "transformer/diffusion_pytorch_model.safetensors"
    try:
        with safe_open(folder / weights, "pt") as file:
            if (file.metadata() or {}).get("key") == key:
                return folder
    except (OSError, SafetensorError):
        pass  # missing or damaged: make it
    torch.manual_seed(0)
    model, rng = WanTransformer3DModel(**ARCHITECTURES["tiny"]), torch.Generator().manual_seed(0)
    average = {name: p.detach().clone() for name, p in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_updates, pct_start=0.1)
    text = {prompt: tiny_embedding(prompt) for prompt in TINY_PROMPTS}
    for _ in tqdm(range(num_updates), "pretraining the tiny Wan, once", unit=" steps", dynamic_ncols=True):
        prompts = [TINY_PROMPTS[i] for i in torch.randint(len(TINY_PROMPTS), (batch,), generator=rng)]
        x0 = tiny_videos(prompts, rng)
        noise = torch.randn(x0.shape, generator=rng)
        sigma = shift_sigma((torch.arange(batch) + torch.rand(batch, generator=rng)) / batch, 1.5)
        x = torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1, 1))
        v = model(x, 1000 * sigma, torch.stack([text[p] for p in prompts]), return_dict=False)[0]
        loss = (v - (noise - x0)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        for name, p in model.state_dict().items():
            average[name].lerp_(p, 0.02)
    partial = CACHE / f".tiny-{os.getpid()}"
    (partial / "transformer").mkdir(parents=True, exist_ok=True)
    model.save_config(partial / "transformer")
    save_file(average, partial / weights, {"key": key, "format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


# ==== Rewards =========================================================================================================
# A reward is a callable reward(videos, prompts, metadata) -> Tensor [B], higher is better, with videos uint8
# [B, T, H, W, 3], prompts a list of B texts and metadata a list of B dicts (the lines of a .jsonl prompt file). If it
# cannot score a video it must raise or give NaN: a failure never becomes a number. Yours is --reward my_file.py:score,
# where `score` is a function, or a class that is built without arguments.


class RewardError(RuntimeError):
    """A reward raised, timed out, or gave something other than one finite number per video."""


def palette_reward(videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """For the tiny model: in every frame one round, clean patch of the prompt's colour, as large as a shape is.

    The mean over frames of size (area near the colour over a shape's, 12 % of the frame, counting down beyond it) plus
    roundness (a disc's outline over the frame's total variation), each at most 1: filling the frame, grain, stray
    colours or ragged edges do not pay. Real videos get 1.68.
    """
    pixels = videos.float() / 255
    colors = torch.tensor([COLORS[prompt.split()[1]] for prompt in prompts], dtype=torch.float32)[:, None, None, None]
    area = torch.exp(-(pixels - colors).pow(2).sum(-1) / 0.1).sum((2, 3))
    framed = torch.nn.functional.pad(pixels, (0, 0, 1, 1, 1, 1))
    slope_x, slope_y = framed[:, :, :-1, 1:] - framed[:, :, :-1, :-1], framed[:, :, 1:, :-1] - framed[:, :, :-1, :-1]
    outline = (slope_x**2 + slope_y**2).sum(-1).sqrt().sum((2, 3)) / colors.norm(dim=-1)[:, 0, 0]
    size = area / (0.12 * pixels[0, 0, :, :, 0].numel())
    return (torch.minimum(size, 2 - size).clamp(min=0) + (4 * math.pi * area).sqrt() / (outline + 1)).mean(1)


def motion_reward(videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """Mean absolute change of a pixel from frame to frame, in [0, 1]: mix it in against rewards that freeze a video."""
    return (videos[:, 1:].float() - videos[:, :-1].float()).abs().mean((1, 2, 3, 4)) / 255


CLIP_MODELS = {  # (model, processor) on the hub
    "clip": ("openai/clip-vit-large-patch14", "openai/clip-vit-large-patch14"),
    "pickscore": ("yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"),
}


class ClipReward:
    """CLIP's or PickScore's image-text score (the model's logits_per_image), a mean over a video's best frames."""

    def __init__(self, model: str, processor: str, config: Config, device: torch.device):
        from transformers import AutoTokenizer, CLIPModel
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        self.model = CLIPModel.from_pretrained(model, use_safetensors=True).to(device).eval().requires_grad_(False)
        self.images = CLIPImageProcessorPil.from_pretrained(processor)
        self.text = AutoTokenizer.from_pretrained(processor)
        self.frames, self.top, self.device = config.reward_frames, config.reward_top or 1.0, device

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        last, rewards = videos.shape[1] - 1, []
        picked = torch.linspace(0, last, min(self.frames, last + 1)).round().long()
        for video, prompt in zip(videos[:, picked], prompts, strict=True):
            images = self.images(list(video.numpy()), return_tensors="pt").to(self.device)
            text = self.text(prompt, truncation=True, max_length=77, return_tensors="pt").to(self.device)
            scores = self.model(**text, **images).logits_per_image[:, 0].float().cpu()
            rewards.append(scores.topk(max(1, round(self.top * len(scores)))).values.mean())
        return torch.stack(rewards)


class HttpReward:
    """A reward behind `flash_grpo.py serve`; of several addresses (a+b) each is asked in turn."""

    def __init__(self, addresses: str, config: Config):
        self.addresses, self.timeout = itertools.cycle(addresses.split("+")), config.reward_timeout
        self.headers = {"Authorization": os.environ.get("FLASH_GRPO_TOKEN", "")}

    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        head = json.dumps({"shape": list(videos.shape), "items": metadata}).encode()
        for pause in (1, 2, 4, 8, 16, 0):  # seconds; a server that restarts has half a minute
            request = Request(next(self.addresses), head + b"\n" + videos.numpy().tobytes(), self.headers)
            try:
                with urlopen(request, timeout=self.timeout) as reply:
                    return torch.tensor(json.load(reply), dtype=torch.float32)
            except (OSError, ValueError, TypeError, HTTPException) as error:
                failure = f"{request.full_url}: {error}"
                if getattr(error, "code", 500) < 500:
                    break  # refused: asking again is no use
            time.sleep(pause)
        raise RewardError(failure)


class Reward:
    """All parts of --reward (names) behind one call, which returns checked numbers or an error."""

    def __init__(self, config: Config, device: torch.device):
        specs = parse_reward(config.reward)
        if config.model != "tiny" and "palette" in [kind for kind, _, _ in specs]:
            raise UserError(f"--reward {config.reward}: palette knows only the tiny model's prompts")
        try:
            self.parts = [self.build(kind, argument, config, device) for kind, argument, _ in specs]
        except Exception as error:
            raise UserError(f"--reward {config.reward}: {type(error).__name__}: {error}") from error
        self.names = [argument.rsplit(":", 1)[1] if kind == "file" else kind for kind, argument, _ in specs]
        self.weights = torch.tensor([weight for _, _, weight in specs])
        self.standardize = config.reward_mix == "standardize" and len(specs) > 1

    @staticmethod
    def build(kind: str, argument: str, config: Config, device: torch.device) -> Callable:
        """One part of --reward; only what that part needs is imported."""
        if kind == "file":
            path, name = argument.rsplit(":", 1)
            found = runpy.run_path(path)[name]
            return found() if inspect.isclass(found) else found
        if kind in CLIP_MODELS:
            return ClipReward(*([argument] * 2 if argument else CLIP_MODELS[kind]), config, device)
        if kind == "http":
            return HttpReward(argument, config)
        return {"palette": palette_reward, "motion": motion_reward}[kind]

    def __call__(self, videos: Tensor, items: list[dict]) -> tuple[Tensor, RewardError | None, float]:
        """Scores float32 [B, parts], all NaN if a part failed, the error if so, and the seconds it took."""
        started, columns, prompts, error = time.perf_counter(), [], [item["prompt"] for item in items], None
        for name, part in zip(self.names, self.parts, strict=True):
            try:
                scores = part(videos, prompts, items)
                if tuple(scores.shape) != (len(items),) or not bool(torch.isfinite(scores).all()):
                    raise ValueError(f"it gave {scores}, not a Tensor of {len(items)} finite numbers")
                columns.append(scores.detach().float().cpu())
            except Exception as cause:
                error = RewardError(f"reward {name}: {type(cause).__name__}: {cause}")
                error.__cause__, columns = cause, torch.full((len(self.parts), len(items)), math.nan)
                break
        return torch.stack(list(columns), 1), error, time.perf_counter() - started

    def mix(self, scores: Tensor, scale: list[list[float]] | None = None) -> Tensor:
        """The reward to train on [B]: the parts' weighted sum, standardized with (means, stds) or the batch's."""
        if self.standardize:
            mean, std = torch.tensor(scale) if scale else torch.stack([scores.mean(0), scores.std(0)])
            scores = (scores - mean) / (std + 1e-6)
        return scores @ self.weights

    def check(self, config: Config, item: dict) -> None:
        """Score a blank and a noise video before anything is trained. Raises UserError if that fails."""
        videos = torch.zeros(2, config.num_frames, config.height, config.width, 3, dtype=torch.uint8)
        videos[1] = torch.randint(0, 256, videos.shape[1:], dtype=torch.uint8, generator=generator("check"))
        _, error, _ = self(videos, [item] * 2)
        if error:
            raise UserError(f"--reward {config.reward}: fails on a blank and a noise video: {error}") from error


def serve(config: Config) -> None:
    """Answer POST (a line of JSON, then the raw uint8 videos) with a JSON list of rewards, GET with --reward."""
    reward = Reward(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    token, one_at_a_time = os.environ.get("FLASH_GRPO_TOKEN", ""), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = 60  # seconds that a client may stay silent

        def answer(self, content: Any) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self) -> None:  # /health
            self.answer(config.reward)

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), token.encode()):
                return self.send_error(401, "wrong or missing token")
            if not length.isdecimal() or int(length) > 2 << 30:
                return self.send_error(413, "send a Content-Length of at most 2 GiB")
            try:
                head, _, pixels = self.rfile.read(int(length)).partition(b"\n")
                shape, items = (json.loads(head)[key] for key in ("shape", "items"))
                videos = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
                if videos.ndim != 5 or len(videos) != len([item["prompt"] + "" for item in items]):
                    raise ValueError("need a shape [B, T, H, W, 3] and B items with a prompt")
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                return self.send_error(400, ascii(f"no request for rewards: {error}"))
            with one_at_a_time:
                scores, error, _ = reward(videos, items)
            self.send_error(500, ascii(str(error))) if error else self.answer((scores @ reward.weights).tolist())

    with ThreadingHTTPServer((config.host, config.port), Handler) as server:
        print(f"reward {config.reward} at http://{config.host}:{server.server_port}", flush=True)
        server.serve_forever()


# ==== Rollout =========================================================================================================


class Schedule:
    """What a mask of stochastic steps [B, N] means for each video: its sigmas, and which videos are still one.

    grid [B, N + 1]: sigmas up to the last stochastic step, then a tail with the share `compress` of the other steps.
    length, first, last [B]: a video's number of steps, its first and its last stochastic one.
    """

    def __init__(self, sde_mask: Tensor, config: Config, groups: list[int]):
        n = sde_mask.shape[1]
        steps, u = torch.arange(n), torch.linspace(1, 0, n + 1, dtype=torch.float64)
        self.first = torch.where(sde_mask, steps, n).amin(1).tolist()
        self.last = torch.where(sde_mask, steps, -1).amax(1).tolist()
        self.groups = groups if config.group_noise == "shared" else None
        self.grid, self.length = torch.zeros(len(sde_mask), n + 1, dtype=torch.float64), []
        for row, last in zip(self.grid, self.last, strict=True):
            rest = n - last - 1
            kept = math.ceil(config.compress * rest - 1e-9)
            tail = u[last + 1 :] if kept == rest else u[last + 1] * torch.linspace(1, 0, kept + 1, dtype=u.dtype)
            row[: last + kept + 2] = shift_sigma(torch.cat([u[: last + 1], tail]), config.flow_shift)
            self.length.append(last + 1 + kept)

    def owners(self, t: int) -> dict[int, int]:
        """{video: the video whose latent stands for it} for the videos that take a step t: one evaluation per owner.

        A group with shared noise is one video up to and including the latent that its first stochastic step leaves.
        """
        found: dict[Any, int] = {}
        live = [i for i, length in enumerate(self.length) if t < length]
        one = [self.groups[i] if self.groups and t <= self.first[i] else (i,) for i in live]
        return {i: found.setdefault(key, i) for i, key in zip(live, one, strict=True)}


@dataclass
class Rollout:
    """Videos, and the transitions to train on. Videos that share a latent share its row in `states`: training too takes
    one evaluation for all of them."""

    latents: Tensor  # [B, C, T, H, W], final
    states: Tensor  # [S, C, T, H, W], the distinct latents from which trained steps start
    x_next: Tensor  # [M, C, T, H, W], where each of the M trained transitions ended
    log_prob: Tensor  # [M], under the policy that made it
    state: Tensor  # [M], its row in states
    video: Tensor  # [M], its row in latents
    step: Tensor  # [M], its step


def micro_batches(rows: list[int], policy: WanPolicy) -> list[list[int]]:
    """Split rows into batches of --micro_batch; on a sharded model equally many, perhaps empty, on every process."""
    size = policy.config.micro_batch
    return [rows[j * size : (j + 1) * size] for j in range(global_max(math.ceil(len(rows) / size), policy))]


@torch.no_grad()
def rollout(
    policy: WanPolicy, config: Config, prompts: list[str], noise: Tensor, sde_mask: Tensor, keys: list[tuple],
    train_mask: Tensor | None = None, groups: list[int] | None = None,
) -> Rollout:  # fmt: skip
    """Denoise videos: a stochastic step where sde_mask says so, else a deterministic one (Euler; dpm2 after the last).

    Args: prompts [B]; noise [B, C, T, H, W], latents at sigma = 1; sde_mask bool [B, N]; keys [B], the seeds of each
    video's step noise; train_mask bool [B, N], the transitions to keep (default: all stochastic ones); groups [B],
    which videos share their noise if config.group_noise is "shared".
    """
    train_mask = sde_mask if train_mask is None else train_mask
    plan = Schedule(sde_mask, config, groups or list(range(len(prompts))))
    sigma_max = make_sigmas(sde_mask.shape[1], config.flow_shift)[1]
    x, x0_prev = noise.clone(), torch.zeros_like(noise)
    states, x_next, log_prob, index = [], [], [], []  # index: (state, video, step) of each kept transition
    row_of: dict[tuple[int, int], int] = {}  # (owner, step) -> its row in states
    for t in range(global_max(max(plan.length), policy)):
        # 1. One velocity per distinct latent.
        owner = plan.owners(t)
        live, distinct = list(owner), list(dict.fromkeys(owner.values()))
        v = [policy.velocity(x[b], plan.grid[b, t], [prompts[i] for i in b]) for b in micro_batches(distinct, policy)]
        if not live:
            continue  # on a sharded model, where other processes have longer schedules
        v, before = torch.cat(v)[[distinct.index(i) for i in owner.values()]], x[live]
        # 2. Deterministic steps; of second order where there is a history since the last stochastic step.
        sigma_prev, sigma, sigma_next = (plan.grid[live, s].view(-1, 1, 1, 1, 1) for s in (max(t - 1, 0), t, t + 1))
        after = before + v * (sigma_next - sigma).to(v)
        if config.solver == "dpm2":
            x0 = before - sigma.to(v) * v
            j = [j for j, i in enumerate(live) if t > plan.last[i] + 1]
            if j:
                after[j] = dpm2_step(before[j], x0[j], x0_prev[live][j], sigma_prev[j], sigma[j], sigma_next[j])
            x0_prev[live] = x0
        # 3. Stochastic steps; of those that are trained, both ends are kept.
        j = [j for j, i in enumerate(live) if sde_mask[i, t]]
        if j:
            levels = (sigma[j].flatten(), sigma_next[j].flatten(), sigma_max)
            mean, std, _ = sde_step(before[j], v[j], *levels, config.sde, config.eta)
            z = [torch.randn(x.shape[1:], generator=generator(*keys[live[k]], t)) for k in j]
            after[j] = mean + std * torch.stack(z).to(x)
            for k, value in zip(j, gaussian_log_prob(after[j], mean, std), strict=True):
                i = live[k]
                if train_mask[i, t]:
                    row = row_of.setdefault((owner[i], t), len(states))
                    states += [before[k]] if row == len(states) else []
                    x_next.append(after[k])
                    log_prob.append(value)
                    index.append((row, i, t))
        x[live] = after
    kept = [torch.stack(part) if part else x[:0] for part in (states, x_next, log_prob)]
    return Rollout(x, *kept, *torch.tensor(index, dtype=torch.long).reshape(-1, 3).T)


def evaluations(config: Config, update: int = 0) -> int:
    """Transformer evaluations of an update by formula: what `nfe` grows by (the two are tested to be equal)."""
    sde_mask, train_mask = draw_masks(config, update)
    plan = Schedule(sde_mask, config, [i // config.group_size for i in range(len(sde_mask))])
    training, total = (3 + bool(config.gradient_checkpointing) + (config.kl > 0)) * config.ppo_epochs, 0
    for owner, trained in ((plan.owners(t), train_mask[:, t]) for t in range(max(plan.length))):
        total += len({*owner.values()}) + training * len({o for i, o in owner.items() if trained[i]})
    return total * (1 if config.guidance_scale == 1 else 2)


# ==== Checkpoints =====================================================================================================


class State:
    """All that changes in training. What is random is seeded by (seed, update, ...), so no generator is among it."""

    def __init__(self, accelerator: "Accelerator", policy: WanPolicy, config: Config):
        self.accelerator, self.policy, params = accelerator, policy, list(policy.trained.values())
        self.counters = {"update": 0, "nfe": 0, "ema_steps": 0, "bad_updates": 0, "eval_scale": None}
        self.ema = {name: p.detach().clone() for name, p in policy.trained.items()}  # average of the trained weights
        self.optimizer = torch.optim.AdamW(params, config.lr, eps=config.adam_eps, weight_decay=config.weight_decay)
        for p in params:  # AdamW's moments, made at once so that every checkpoint has them
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.optimizer.state[p] = {"step": torch.tensor(0.0), **moments}

    def tensors(self) -> dict[str, Tensor]:
        """A checkpoint's tensors by name; sharded ones are DTensors, which any number of processes can load."""
        tensors = {}
        for name, p in self.policy.trained.items():
            moments = {key: self.optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")}
            parts = {"weight": p.detach(), "ema": self.ema[name], **moments}
            tensors |= {f"{part}.{name}": tensor for part, tensor in parts.items()}
        return tensors

    def step_ema(self, decay: float) -> None:
        """Move the average, with a warm-up so that a short run does not carry its start along."""
        steps = self.counters["ema_steps"]
        for average, ours in zip(self.ema.values(), self.policy.trained.values(), strict=True):
            local_slice(average)[0].lerp_(local_slice(ours.detach())[0], 1 - min(decay, (1 + steps) / (10 + steps)))
        self.counters["ema_steps"] += 1

    @contextmanager
    def ema_weights(self):
        """Inside, the policy has the averaged weights."""
        ours = [local_slice(p.detach())[0] for p in self.policy.trained.values()]
        kept = [p.clone() for p in ours]
        torch._foreach_copy_(ours, [local_slice(average)[0] for average in self.ema.values()])
        try:
            yield
        finally:
            torch._foreach_copy_(ours, kept)


# What a resumed run may change: where, how long and how fast it runs, not what comes out.
FREE = """num_updates max_nfe micro_batch cfg_batch gradient_checkpointing shard_size timeout max_bad_updates
reward_on_error reward_timeout host port eval_every eval_videos save_every keep output_dir run_name
resume tracker fps""".split()


def settings(config: Config) -> dict:
    """The settings that decide the numbers of a run."""
    return {name: value for name, value in asdict(config).items() if name not in FREE}


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing: a killed process leaves the old one."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text)
    partial.replace(path)


def save_checkpoint(state: State, config: Config, folder: Path) -> None:
    """Write checkpoints/<update>/ under a temporary name, rename it when whole, keep the newest K, and export.

    Tensors go through torch.distributed.checkpoint into safetensors (its own format pickles), all else into JSON.
    """
    final, partial = folder / "checkpoints" / f"{state.counters['update']:06d}", folder / "checkpoints" / ".partial"
    if state.accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    state.accelerator.wait_for_everyone()
    writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
    dcp.save(state.tensors(), storage_writer=writer, no_dist=not torch.distributed.is_initialized())
    state.accelerator.wait_for_everyone()
    if state.accelerator.is_main_process:
        steps = {name: float(state.optimizer.state[p]["step"]) for name, p in state.policy.trained.items()}
        files = {file.name: file.stat().st_size for file in partial.iterdir()}
        content = {"counters": state.counters, "steps": steps, "files": files, "settings": settings(config)}
        write_atomically(partial / "state.json", json.dumps(content))
        if final.exists():  # a damaged one, or the same update again
            final.rename(final.with_name(".replaced"))
        partial.rename(final)
        shutil.rmtree(final.with_name(".replaced"), ignore_errors=True)
        for old in sorted((folder / "checkpoints").glob("[0-9]*"))[: -config.keep]:
            shutil.rmtree(old)
    export(state, config, folder / "lora")


def load_checkpoint(state: State, config: Config, folder: Path) -> Path | None:
    """Load the newest whole checkpoint, whatever number of processes wrote it, and return its path; None without one.

    A damaged one is named on stderr and passed over. Raises UserError for one that was made with other settings.
    """
    for path in sorted((folder / "checkpoints").glob("[0-9]*"), reverse=True):
        try:
            content = json.loads((path / "state.json").read_text())
            damaged = [name for name, size in content["files"].items() if (path / name).stat().st_size != size]
        except (OSError, ValueError, KeyError) as error:
            damaged = [str(error)]
        if damaged:
            print(f"checkpoint {path} is damaged ({', '.join(damaged)}); trying the one before", file=sys.stderr)
            continue
        ours = json.loads(json.dumps(settings(config)))
        for name, theirs in content["settings"].items():
            if ours.get(name) != theirs:
                raise UserError(f"--{name} {ours.get(name)}: the run in {folder} has {theirs}; take that or a new name")
        reader = dcp.HuggingFaceStorageReader(str(path))
        dcp.load(state.tensors(), storage_reader=reader, no_dist=not torch.distributed.is_initialized())
        for name, p in state.policy.trained.items():
            state.optimizer.state[p]["step"].fill_(content["steps"][name])
        state.counters = content["counters"]
        return path
    return None


def export(state: State, config: Config, folder: Path) -> None:
    """Write the averaged weights as diffusers reads them: adapters for load_lora_weights, or whole transformers."""
    partial, is_main = folder.with_name(".export"), state.accelerator.is_main_process
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)
    for number, (part, expert) in enumerate(zip(state.policy.parts, state.policy.experts, strict=True), 1):
        weights = {}
        for name, average in state.ema.items():
            if name.startswith(f"{part}."):  # gathering is collective, so all processes do it
                whole = average.full_tensor() if isinstance(average, DTensor) else average
                weights[name.removeprefix(f"{part}.")] = whole.cpu().clone() if is_main else None
        if is_main and config.full:
            expert.save_config(partial / part)
            save_file(weights, partial / part / "diffusion_pytorch_model.safetensors", {"format": "pt"})
        elif is_main:
            layers, adapter = get_peft_model_state_dict(expert, weights), expert.peft_config["default"].to_dict()
            file = "pytorch_lora_weights.safetensors" if number == 1 else f"pytorch_lora_weights_{number}.safetensors"
            WanPipeline.save_lora_weights(partial, layers, weight_name=file, transformer_lora_adapter_metadata=adapter)
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


# ==== Evaluation and pictures =========================================================================================


def evaluate(state: State, config: Config, reward: Reward, prompts: list[dict], folder: Path) -> dict:
    """Reward on held-out prompts: deterministic steps, averaged weights, and noise that is the same for every seed.

    Writes videos/<update>/. Returns eval_* metrics (eval_ci: half the 95 % interval over prompts). Raises RewardError.
    """
    policy, target, videos = state.policy, folder / "videos" / f"{state.counters['update']:06d}", []
    rank, world, nfe = state.accelerator.process_index, state.accelerator.num_processes, policy.nfe
    mine = [min(j * world + rank, len(prompts) - 1) for j in range(math.ceil(len(prompts) / world))]
    sampler = replace(config, solver="euler", compress=1.0, group_noise="independent")
    with state.ema_weights():
        for batch in micro_batches(mine, policy):
            noise = torch.stack([torch.randn(policy.latent_shape, generator=generator("eval", i)) for i in batch])
            texts, no_sde = [prompts[i]["prompt"] for i in batch], torch.zeros(len(batch), config.eval_num_steps) > 0
            done = rollout(policy, sampler, texts, noise.to(policy.device), no_sde, [()] * len(batch))
            videos += policy.decode(done.latents)
    policy.nfe = nfe  # a run's cost is that of its training
    scores, error, _ = reward(torch.stack(videos), [prompts[i] for i in mine])
    if errors := [text for text in gather_object([error and str(error)]) if text]:
        raise error or RewardError(f"on another process: {errors[0]}")
    by_prompt = dict(gather_object(list(zip(mine, scores.tolist(), strict=True))))
    scores = torch.tensor([by_prompt[i] for i in range(len(prompts))])
    if state.counters["eval_scale"] is None:
        state.counters["eval_scale"] = [scores.mean(0).tolist(), scores.std(0).tolist()]
    rewards = reward.mix(scores, state.counters["eval_scale"]).tolist()
    for i, video in zip(mine, videos, strict=True):
        if i < config.eval_videos:
            write_video(target / f"{i:03d}.mp4", video, config.fps)
    if rank == 0 and config.eval_videos:
        index = [{"file": f"{i:03d}.mp4", **item, "reward": rewards[i]} for i, item in enumerate(prompts)]
        write_atomically(target / "index.jsonl", "".join(f"{json.dumps(row)}\n" for row in index[: config.eval_videos]))
    mean, half_width = mean_and_interval(rewards)
    metrics = {"eval_reward": mean, "eval_ci": half_width, "eval_rewards": rewards}
    return metrics | {f"eval/{name}": mean for name, mean in zip(reward.names, scores.mean(0).tolist(), strict=True)}


def mean_and_interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval, by Student's t (from the normal quantile: Cornish and Fisher)."""
    n, z, mean = len(values), 1.959964, sum(values) / len(values)
    t = z + (z**3 + z) / (4 * (n - 1)) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * (n - 1) ** 2)
    return mean, t * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def write_video(path: Path, video: Tensor, fps: int) -> None:
    """Write uint8 [T, H, W, 3] as mp4; a small one is enlarged by nearest neighbour to about 256 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    factor = max(1, 256 // max(video.shape[1:3]))
    frames = repeat(video, "t h w c -> t (h a) (w b) c", a=factor, b=factor).numpy()
    iio.imwrite(path, frames, fps=fps, macro_block_size=2, quality=9, output_params=["-loglevel", "error"])


def draw_pictures(folder: Path, history: list[dict]) -> None:
    """reward.png: training and held-out reward. before_after.png: frames of the first and the newest evaluation."""
    updates, tests = [m for m in history if "reward_mean" in m], [m for m in history if "eval_reward" in m]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    curve = [[m[key] for m in updates] for key in ("update", "reward_mean")]
    points = [[m[key] for m in tests] for key in ("update", "eval_reward", "eval_ci")]
    axes.plot(*curve, lw=1, alpha=0.6, label="training videos, stochastic sampler")
    axes.errorbar(*points, marker="o", capsize=3, label="held-out prompts, deterministic sampler (95 % over prompts)")
    axes.set(xlabel="update", ylabel="reward", title=folder.name)
    axes.legend()
    figure.savefig(folder / "reward.png", dpi=130)
    first, last = (folder / "videos" / f"{m['update']:06d}" for m in (tests[0], tests[-1]))
    rows = [json.loads(line) for file in first.glob("index.jsonl") if first != last for line in open(file)][:8]
    figure = Figure(figsize=(12, len(rows) + 0.4), layout="constrained")
    for i, axes in enumerate(figure.subplots(len(rows), 2, squeeze=False).flat if rows else []):
        frames = iio.imread((first, last)[i % 2] / rows[i // 2]["file"])
        frames = frames[np.linspace(0, len(frames) - 1, 6).round().astype(int)]
        axes.imshow(np.concatenate([np.pad(f, ((0, 0), (0, 8), (0, 0)), constant_values=255) for f in frames], 1))
        axes.set(xticks=[], yticks=[], title=("before", "after")[i] if i < 2 else "")
        axes.set_ylabel("" if i % 2 else rows[i // 2]["prompt"][:30], rotation=0, ha="right", va="center")
    if rows:
        figure.savefig(folder / "before_after.png", dpi=100)


# ==== Training ========================================================================================================


def collect(state: State, config: Config, reward: Reward, items: list[dict], mine: range):
    """Make this process's videos of an update (rows `mine` of the global batch; items: its prompts) and score them.

    Whole groups at a time, as many as fit --micro_batch; the reward works in the background while the next are made.
    Returns Rollouts (whose `video` counts in mine), scores [b, parts] (NaN: it failed) and a RewardError or None.
    """
    policy, update = state.policy, state.counters["update"]
    sde_mask, train_mask = (mask[mine.start : mine.stop] for mask in draw_masks(config, update))
    place = [divmod(i, config.group_size) for i in mine]  # (prompt slot, sample)
    size, rolled, jobs = max(1, config.micro_batch // config.group_size) * config.group_size, [], []
    with ThreadPoolExecutor(1) as background:
        for start in range(0, len(mine), size):
            rows, part, ours = (sequence[start : start + size] for sequence in (range(len(mine)), place, mine))
            groups, keys = [slot for slot, _ in part], [(config.seed, "step", update, *p) for p in part]
            # A group that shares its noise starts as one video; otherwise each starts from its own.
            noise_keys = [p[:1] if config.group_noise == "shared" else p for p in part]
            rngs = [generator(config.seed, "noise", update, *key) for key in noise_keys]
            noise = torch.stack([torch.randn(policy.latent_shape, generator=rng) for rng in rngs]).to(policy.device)
            texts, masks = [items[i]["prompt"] for i in ours], (sde_mask[rows], keys, train_mask[rows])
            with timed(policy.seconds, "rollout", policy.device):
                done = rollout(policy, config, texts, noise, *masks, groups)
            with timed(policy.seconds, "decode", policy.device):
                videos = policy.decode(done.latents)
            rolled.append(replace(done, video=done.video + start))
            for slot in dict.fromkeys(groups):
                group = [row for row in range(len(groups)) if groups[row] == slot]
                jobs.append(background.submit(reward, videos[group], [items[ours[row]] for row in group]))
        with timed(policy.seconds, "reward_wait", policy.device):  # what of "reward" was not hidden
            scores, errors, seconds = zip(*(job.result() for job in jobs), strict=True)
    policy.seconds["reward"] = sum(seconds)
    return rolled, torch.cat(scores), next(filter(None, errors), None)


def learn(
    state: State, config: Config, rollouts: list[Rollout], texts: list[str], advantages: Tensor, weights: Tensor,
    total: int,
) -> dict[str, float]:  # fmt: skip
    """One optimizer step on this process's transitions. A non-finite gradient skips it, on all processes alike.

    Args: texts [b], advantages [b] and weights [b, N] of this process's videos; total, all processes' transitions.
    """
    policy, sigmas = state.policy, make_sigmas(config.num_steps, config.flow_shift)
    batches = [(r, batch) for r in rollouts for batch in micro_batches(list(range(len(r.states))), policy)]
    sums, deviation = torch.zeros(3), 0.0
    for number, (rolled, batch) in enumerate(batches, 1):
        for expert in policy.experts if policy.mesh is not None else []:
            # Reduce gradients once, after the last batch. Shards that are trained whole: each time, or every process
            # would hold the whole gradient.
            expert.set_requires_gradient_sync(number == len(batches) or (config.full and policy.mesh.size(1) > 1))
        rows = torch.isin(rolled.state, torch.tensor(batch, dtype=torch.long)).nonzero()[:, 0]
        at = rolled.state[rows] - (batch[0] if batch else 0)  # the batch's row of each transition's state
        one = [int(rows[(at == j).nonzero()[0]]) for j in range(len(batch))]  # some transition of each state
        x, sigma, prompts = rolled.states[batch], sigmas[rolled.step[one]], [texts[rolled.video[i]] for i in one]
        v = policy.velocity(x, sigma, prompts)
        if not batch:
            v.sum().backward()
            continue
        step = (sigmas[rolled.step[rows]], sigmas[rolled.step[rows] + 1], sigmas[1], config.sde, config.eta)
        mean, std, _ = sde_step(x[at], v[at], *step)
        log_prob = gaussian_log_prob(rolled.x_next[rows], mean, std)
        a, w = advantages[rolled.video[rows]].to(x), weights[rolled.video[rows], rolled.step[rows]].to(x)
        loss, stats = grpo_loss(log_prob, rolled.log_prob[rows], a, w, config.clip_range)
        kl = torch.zeros_like(loss)
        if config.kl:  # between Gaussians of one std
            with torch.no_grad():
                _ = [expert.disable_adapters() for expert in policy.experts]
                reference, _, _ = sde_step(x[at], policy.velocity(x, sigma, prompts)[at], *step)
                _ = [expert.enable_adapters() for expert in policy.experts]
            kl = ((mean - reference) ** 2 / (2 * std**2)).flatten(1).mean(1).mean()
        # FSDP averages gradients over the processes, but this is their sum: each adds its share of the global mean.
        share = len(rows) / total
        with timed(policy.seconds, "transformer", policy.device):
            ((loss + config.kl * kl) * share * state.accelerator.num_processes).backward()
        sums += share * torch.stack([loss.detach(), kl.detach(), stats["clip_fraction"]]).cpu()
        deviation = max(deviation, stats["ratio_dev_max"].item())
    norm = torch.nn.utils.clip_grad_norm_(list(policy.trained.values()), config.max_grad_norm)
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if math.isfinite(norm):
        state.optimizer.step()
    state.counters["bad_updates"] = 0 if math.isfinite(norm) else state.counters["bad_updates"] + 1
    state.optimizer.zero_grad()
    gathered = gather_object([(sums, deviation)])
    loss, kl, clip_fraction = sum(part for part, _ in gathered).tolist()
    stats = {"loss": loss, "kl": kl, "clip_fraction": clip_fraction, "ratio_dev_max": max(d for _, d in gathered)}
    # eps's share of Adam's denominator; near 1 it throttles the step. With 1e-8 it is 6 % for tiny, whose log p is a
    # mean of 4,608 numbers, and gradients fall with the square root of that number (2 million for Wan): hence 1e-15.
    squares = [local_slice(m["exp_avg_sq"])[0].flatten() for m in state.optimizer.state.values()]
    root = (torch.cat(squares) / (1 - 0.999 ** (state.counters["update"] + 1))).sqrt()
    eps_share = (config.adam_eps / (root[root > 0] + config.adam_eps)).mean().item()
    return stats | {"grad_norm": norm, "adam_eps_share": eps_share}


def train(config: Config, progress: bool = True) -> list[dict]:
    """Train as the Config says; returns metrics.jsonl as a list of dicts, one per update and one per evaluation.

    Writes output_dir/run_name/: config.json, metrics.jsonl, reward.png, before_after.png, videos/, checkpoints/, lora/.
    Unset fields are filled and all checked first. Raises UserError for wrong settings, RewardError if a reward fails.
    """
    config = fill(config)
    validate(config, int(os.environ.get("WORLD_SIZE", "1")))
    folder, tracker = Path(config.output_dir) / config.run_name, None if config.tracker == "none" else config.tracker
    kwargs = {"kwargs_handlers": [InitProcessGroupKwargs(timeout=timedelta(seconds=config.timeout))]}
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), log_with=tracker, project_dir=folder, **kwargs)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    is_main, mesh = accelerator.is_main_process, None
    say = print if is_main and progress else (lambda *_: None)
    if world > 1:
        shards = config.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", world))
        mesh = init_device_mesh(device.type, (world // shards, shards), mesh_dim_names=("replicate", "shard"))
    prompts, held_out = load_prompts(config, "prompts"), load_prompts(config, "eval_prompts")
    reward = Reward(config, device)
    reward.check(config, prompts[0])
    policy = WanPolicy(config, device, mesh)
    texts = [item["prompt"] for item in prompts + held_out]
    policy.encode(texts, accelerator.is_local_main_process, accelerator.wait_for_everyone)
    state, history = State(accelerator, policy, config), []
    say(describe(state, config))
    # Begin, or continue from the newest whole checkpoint.
    folder.mkdir(parents=True, exist_ok=True)
    found = load_checkpoint(state, config, folder) if config.resume else None
    counters = state.counters
    if found:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        metrics = [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may leave half a line
        history = [m for m in metrics if m["update"] <= counters["update"]]
        say(f"resuming after update {counters['update']}, from {found}")
    accelerator.wait_for_everyone()  # all have read the metrics that the main process now rewrites
    if is_main:
        write_atomically(folder / "metrics.jsonl", "".join(f"{json.dumps(m)}\n" for m in history))
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
        packages = {name: version(name) for name in ("torch", "diffusers", "transformers", "accelerate", "peft")}
        about = asdict(config) | {"versions": packages, "commit": commit}
        write_atomically(folder / "config.json", json.dumps(about, indent=1))
    if tracker:
        accelerator.init_trackers("logs", {k: v for k, v in settings(config).items() if v is not None})

    def log(metrics: dict) -> None:
        history.append(metrics)
        if is_main:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(metrics) + "\n")
            accelerator.log({k: v for k, v in metrics.items() if isinstance(v, int | float)}, step=metrics["update"])

    def test() -> None:
        if any("eval_reward" in m and m["update"] == counters["update"] for m in history):
            return  # before the checkpoint that was resumed
        with timed(policy.seconds, "eval", device):
            result = evaluate(state, config, reward, held_out, folder)
        log({"update": counters["update"], "nfe": counters["nfe"], **result, "seconds_eval": policy.seconds["eval"]})
        if is_main:
            draw_pictures(folder, history)

    stop: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    unit, goal = ("nfe", config.max_nfe) if config.max_nfe else ("update", config.num_updates)
    bar = tqdm(total=goal, unit=f" {unit}s", disable=not (is_main and progress), dynamic_ncols=True)
    try:
        if counters["update"] % (config.eval_every or 10**9) == 0:
            test()
        while counters[unit] < goal:
            # 1. Videos of the current policy, and their scores.
            started, update, evaluated, policy.seconds = time.perf_counter(), counters["update"], policy.nfe, {}
            order = torch.randperm(len(prompts), generator=generator(config.seed, "prompts", update)).tolist()
            slots = [order[slot % len(order)] for slot in range(config.prompts_per_update)]
            items = [prompts[i] for i in slots for _ in range(config.group_size)]
            mine = range(rank * len(items) // world, (rank + 1) * len(items) // world)
            rolled, scores, error = collect(state, config, reward, items, mine)
            if any(gather_object([bool(stop)])):
                say(f"SIGTERM: stopping after update {update}; continue with --resume")
                break
            scores, errors = torch.tensor(gather_object(scores.tolist())), gather_object([error and str(error)])
            # 2. Advantages within each prompt's group. A group that lost a reward is left out, or the run stops.
            group = torch.arange(len(items)) // config.group_size
            failed = scores.isnan().any(1).view(-1, config.group_size).any(1)
            if any(errors) and (config.reward_on_error == "stop" or failed.all()):
                raise error or RewardError(f"on another process: {next(filter(None, errors))}")
            kept, advantages = ~failed[group], torch.zeros(len(items))
            rewards = reward.mix(scores[kept])
            advantages[kept] = group_advantages(rewards, group[kept], config.adv_std)
            # 3. Weights that divide the gradient scale of each trained step out, with mean 1 over the global batch.
            train_mask = draw_masks(config, update)[1] & kept[:, None]
            weights, scales = torch.zeros(train_mask.shape), grad_scales(config).expand(train_mask.shape)[train_mask]
            weights[train_mask] = rectification_weights(scales) if config.rectify else torch.ones(len(scales))
            # 4. The loss and the step.
            texts, here = [items[i]["prompt"] for i in mine], slice(mine.start, mine.stop)
            with timed(policy.seconds, "train", device):
                one_pass = (rolled, texts, advantages[here], weights[here], len(scales))
                passes = [learn(state, config, *one_pass) for _ in range(config.ppo_epochs)]
            counters["update"] += 1
            if counters["update"] % config.ema_every == 0:
                state.step_ema(config.ema_decay)
            # 5. What happened.
            counters["nfe"] += sum(gather_object([policy.nfe - evaluated]))
            by_group = rewards.view(-1, config.group_size)
            metrics = {
                "update": counters["update"], "nfe": counters["nfe"], "reward_mean": rewards.mean().item(),
                "reward_std": rewards.std().item(), **passes[-1], "ratio_dev_max": passes[0]["ratio_dev_max"],
                "zero_std_groups": int((by_group == by_group[:, :1]).all(1).sum()), "dropped_groups": int(failed.sum()),
                "bad_updates": counters["bad_updates"], "seconds": time.perf_counter() - started,
                **{f"seconds_{phase}": spent for phase, spent in policy.seconds.items()},
            }  # fmt: skip
            parts = zip(reward.names, scores[kept].mean(0).tolist(), strict=True)
            log(metrics | {f"reward/{name}": mean for name, mean in parts})
            bar.update(min(counters[unit], goal) - bar.n)
            bar.set_postfix({key: f"{metrics[key]:.2e}" for key in ("reward_mean", "loss", "grad_norm")})
            if update == 0 and metrics["ratio_dev_max"] > config.clip_range:
                say(f"warning: ratio_dev_max is {metrics['ratio_dev_max']:.1e} on the first pass, above --clip_range: "
                    "rounding alone makes PPO clip the batch; use --dtype fp32 or a larger --clip_range")  # fmt: skip
            if counters["bad_updates"] >= config.max_bad_updates:
                raise FloatingPointError(f"{config.max_bad_updates} updates in a row had a non-finite gradient")
            if config.eval_every and counters["update"] % config.eval_every == 0:
                test()
            if config.save_every and counters["update"] % config.save_every == 0:
                save_checkpoint(state, config, folder)
        else:
            test()
        save_checkpoint(state, config, folder)
    except (RewardError, FloatingPointError):
        save_checkpoint(state, config, folder)
        raise
    finally:
        bar.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        accelerator.end_training()
    say("" if stop else summary(history, folder))
    return history


def summary(history: list[dict], folder: Path) -> str:
    """The table at the end of a run."""
    tests, updates = [m for m in history if "eval_reward" in m], [m for m in history if "reward_mean" in m]
    gains = [b - a for a, b in zip(tests[0]["eval_rewards"], tests[-1]["eval_rewards"], strict=True)]
    rows = {"before": tests[0]["eval_rewards"], "after": tests[-1]["eval_rewards"], "gain": gains}
    lines = ["held-out reward {:9}{:.3f} +- {:.3f}".format(name, *mean_and_interval(row)) for name, row in rows.items()]
    spent = {name[8:]: sum(m[name] for m in updates) for name in updates[-1] if name.startswith("seconds_")}
    outside = 1 - (spent["transformer"] + spent["decode"] + spent["reward_wait"]) / sum(m["seconds"] for m in updates)
    seconds = "  ".join(f"{phase} {value:.1f}" for phase, value in spent.items())
    lines.append(f"{tests[-1]['update']} updates, {history[-1]['nfe']:,} evaluations; 95 % over {len(gains)} prompts")
    lines.append(f"seconds: {seconds}; {100 * outside:.1f} % outside of transformer, decoder and reward")
    return "\n".join([*lines, f"{folder}: reward.png, before_after.png, videos/, lora/, metrics.jsonl"])


def describe(state: State, config: Config) -> str:
    """The settings after filling and the sharding plan, as printed at the start of a run."""
    policy, mesh = state.policy, state.policy.mesh
    replicas, shards = (mesh.size(0), mesh.size(1)) if mesh is not None else (1, 1)
    weights = sum(p.numel() * p.element_size() for expert in policy.experts for p in expert.parameters())
    trained = sum(p.numel() for p in policy.trained.values())
    megabytes = [f"{part / shards / 1e6:,.1f}" for part in (weights, 4 * trained, 12 * trained)]
    return f"""{"  ".join(f"{name}={value}" for name, value in settings(config).items() if value is not None)}
{replicas} replicas x {shards} shards; {trained:,} trained numbers; {evaluations(config):,} evaluations an update
flow shift {config.flow_shift:g}; MB a process: weights, gradients, optimizer and average {", ".join(megabytes)}"""


if __name__ == "__main__":
    try:
        serve(CONFIG) if JOB == "serve" else train(CONFIG)
    except UserError as problem:
        print(f"flash_grpo.py: error: {problem}", file=sys.stderr)
        sys.exit(2)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
