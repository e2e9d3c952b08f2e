"""Flash-GRPO in one file: align Wan video diffusion models with a reward, training one denoising step per video.

    accelerate launch flash_grpo.py                                    # a small Wan on a laptop's CPU, in minutes
    accelerate launch flash_grpo.py --model wan1.3b --reward pickscore # a real Wan on the GPUs of this machine
    accelerate launch flash_grpo.py --model wan14b --reward http://127.0.0.1:8000   # 14B, sharded; HPSv3 behind a server
    accelerate launch flash_grpo.py --method flow                      # the neighbours: flow, dance, mix, mix-flash
    python flash_grpo.py --model wan14b --dry_run                      # the plan and the cost, without weights
    python flash_grpo.py serve --reward hpsv3 --port 8000              # a reward behind HTTP, in its own environment
    python flash_grpo.py bench                                         # where the seconds of an update go

Flash-GRPO (He et al., ICML 2026, arXiv 2605.15980) is GRPO for flow-matching models with three changes:

1. One-step policy. A rollout is deterministic except for ONE stochastic step k, and only that transition is trained.
2. Iso-temporal grouping. All videos of a prompt share k, so advantages compare policies and not timesteps.
3. Temporal gradient rectification. The gradient at a step is proportional to lambda = |d mean / d velocity| / std, which
   varies over the schedule; each sample's loss is divided by its lambda, so that every timestep pulls alike.

The file reads in the order of the idea: the configuration; then the algorithm as pure functions (schedule and SDE, masks,
advantages, loss); then the Wan policy, the tiny world, rewards, rollout, sharding and checkpoints, evaluation, and the
training loop. A reader can stop after "The loss" and have the algorithm.

Tensors of videos are [B, C, T, H, W]: latents in float32, noise level sigma from 1 (noise) to 0 (data).
"""

import argparse
import ast
import dataclasses
import difflib
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

# ======================================================================================================================
# Configuration
# ======================================================================================================================


@dataclass
class Config:
    """Every setting of a run. A field left at None is filled from the method's row, the model's row, or DEFAULTS.

    The comment behind a field is its help text, and the comment line above a block its topic in `--help`.
    """

    # Model
    model: str = "tiny"  # tiny, wan1.3b, wan14b, wan2.2-5b, wan2.2-a14b, or a folder or hub name of a Wan T2V pipeline
    weights: str = "pretrained"  # pretrained | random: the true architecture without a download, to try your hardware
    height: int | None = None  # pixels
    width: int | None = None  # pixels
    num_frames: int | None = None  # frames of a video (Wan: 4 n + 1)
    num_steps: int | None = None  # denoising steps of a rollout
    flow_shift: float | None = None  # shift f of the sigma schedule; by default 3 below 720p and 5 from 720p on
    guidance_scale: float | None = None  # classifier-free guidance; 1 switches it off
    guidance_scale_2: float | None = None  # guidance of Wan 2.2's low-noise expert; by default as guidance_scale
    negative_prompt: str = ""  # what guidance steers away from
    dtype: str | None = None  # bf16 (autocast, frozen weights stored in bf16) | fp32
    compile: bool = False  # compile the transformer blocks, once for rollout and training
    gradient_checkpointing: bool | None = None  # recompute activations in the backward pass: less memory, 4/3 the time
    cfg_batch: bool | None = None  # guidance's two forwards in one batch (faster) or one after the other (less memory)

    # Method: a row of METHODS, each part of which can be set on its own
    method: str = "flash"  # flash, flow, dance, mix, mix-flash
    sde: str | None = None  # noise of a stochastic step: wan, flow, dance, cps
    eta: float | None = None  # noise level of flow (0.7), dance (0.3) and cps (0.7); the wan SDE has none
    window: str | None = None  # steps that may be stochastic, as a slice start:stop; by default the first half
    window_every: int | None = None  # updates after which the window moves on by one step; 0 = never
    sde_steps: int | None = None  # stochastic steps drawn from the window for each video; 0 = all of them
    train_fraction: float | None = None  # share of the stochastic steps that are trained
    grouping: str | None = None  # iso: a prompt's videos share their stochastic steps | random: each draws its own
    group_noise: str | None = (
        None  # initial noise of a prompt's videos: independent | shared (and its prefix computed once)
    )
    rectify: bool | None = None  # divide the time-dependent gradient scale out of the loss
    solver: str | None = None  # solver after the last stochastic step: euler | dpm2 (DPM-Solver++ 2M)
    compress: float | None = None  # share of the steps after the last stochastic one that is kept

    # Training
    seed: int = 0  # seeds everything; noise depends on (seed, update, prompt, sample) and never on the rank
    num_updates: int | None = None  # optimizer updates (each of prompts_per_update x group_size videos)
    max_nfe: int | None = None  # end the run at this many transformer evaluations instead
    prompts_per_update: int | None = None  # prompts of an update, over all processes
    group_size: int | None = None  # videos per prompt, compared with one another
    ppo_epochs: int = 1  # optimizer steps on the same videos
    micro_batch: int | None = None  # videos per forward pass on one process
    lr: float | None = None  # AdamW's learning rate
    weight_decay: float = 1e-4  # AdamW's weight decay
    adam_eps: float = 1e-15  # AdamW's epsilon; gradients here are tiny, see Trainer.step
    max_grad_norm: float = 1.0  # clip the gradient norm
    clip_range: float = 1e-3  # PPO clip; small because log-probabilities are averaged over the latent
    adv_std: str = "global"  # standard deviation in the advantage: global (whole batch) | group
    kl: float = 0.0  # weight of the KL to the model without its adapter
    full: bool = False  # train all weights instead of a LoRA adapter
    lora_rank: int = 16  # rank of the adapter
    lora_alpha: int = 32  # scale of the adapter: alpha / rank
    lora_targets: str = "to_q,to_k,to_v,to_out.0"  # modules that get an adapter: endings of their names
    ema_decay: float = 0.9  # moving average of the trained weights, used for evaluation and export
    ema_every: int | None = None  # updates between two steps of the moving average
    max_bad_updates: int = 5  # stop after this many non-finite updates in a row
    shard_size: int | None = None  # processes that share one copy of the model (FSDP2); 1 = a copy on each
    timeout: int = 1800  # seconds after which a process that waits for another gives up

    # Prompts and rewards
    prompts: str | None = None  # file with a prompt a line, or .jsonl with "prompt" and metadata for the reward
    reward: str | None = None  # name[@model][:weight],... | file.py:function (its code is run) | http://host:port,...
    reward_mix: str = "standardize"  # several rewards: standardize each over the batch before adding | raw
    reward_frames: int = 8  # evenly spaced frames that image rewards look at
    reward_top: float | None = None  # share of the best frames that is averaged (hpsv3: 0.3 as in the paper, others 1)
    reward_on_error: str = "stop"  # stop | drop the groups of videos whose reward failed
    reward_timeout: float = 300.0  # seconds for one request to a reward server
    reward_token: str | None = (
        None  # shared secret of trainer and reward server (or FLASH_GRPO_TOKEN in the environment)
    )

    # Evaluation, pictures, files
    eval_every: int | None = None  # updates between evaluations; 0 = only before and after
    eval_prompts: str | None = None  # file of held-out prompts; by default the tail of the built-in list
    eval_videos: int = 12  # videos saved at each evaluation
    eval_num_steps: int | None = None  # deterministic steps of the evaluation sampler
    save_every: int | None = None  # updates between checkpoints; 0 = only the last
    keep: int = 2  # checkpoints that are kept
    output_dir: str = "runs"  # parent of the run's folder
    run_name: str | None = None  # the run's folder; by default model-method-seed
    resume: bool = False  # continue the run in that folder from its newest whole checkpoint
    tracker: str = "tensorboard"  # tensorboard | wandb | none
    fps: int | None = None  # frames a second of the saved videos

    # Side jobs
    dry_run: bool = False  # print the plan (mesh, memory, cost) and stop; needs no weights and no GPU
    num_gpus: int | None = None  # GPUs that the dry run plans for; by default those that were launched
    host: str = "127.0.0.1"  # serve: the address to listen on
    port: int = 8000  # serve: the port to listen on


# A model's row: its repository and what differs from DEFAULTS. Settings are the paper's for 1.3B and its steps for 14B.
WAN = dict(
    height=480, width=832, num_frames=81, num_steps=20, guidance_scale=4.5, dtype="bf16", gradient_checkpointing=True,
    cfg_batch=False, num_updates=300, prompts_per_update=24, group_size=4, micro_batch=1, lr=1e-4, ema_every=8,
    reward="hpsv3", eval_every=25, eval_num_steps=50, save_every=25, fps=16, shard_size=1,
)  # fmt: skip
MODELS: dict[str, dict] = {
    "tiny": dict(
        height=16, width=16, num_frames=6, num_steps=10, flow_shift=3.0, guidance_scale=1.0, dtype="fp32",
        gradient_checkpointing=False, cfg_batch=True, num_updates=60, prompts_per_update=6, group_size=8,
        micro_batch=48, lr=2e-4, ema_every=1, reward="palette", eval_every=10, eval_num_steps=20, save_every=20,
        fps=4, shard_size=1,
    ),
    "wan1.3b": WAN | dict(repo="Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
    "wan14b": WAN | dict(repo="Wan-AI/Wan2.1-T2V-14B-Diffusers", num_steps=12, shard_size=0),
    "wan2.2-5b": WAN | dict(
        repo="Wan-AI/Wan2.2-TI2V-5B-Diffusers", height=704, width=1280, num_frames=121, flow_shift=5.0, fps=24
    ),
    "wan2.2-a14b": WAN | dict(repo="Wan-AI/Wan2.2-T2V-A14B-Diffusers", num_steps=12, shard_size=0),
}  # fmt: skip

# A method's row: which steps are stochastic (and so are trained), their noise, their weight, and how the rest is solved.
ALL_BUT_LAST = dict(
    sde="flow", window="0:-1", window_every=0, sde_steps=0, train_fraction=1.0, grouping="iso",
    group_noise="independent", rectify=False, solver="euler", compress=1.0,
)  # fmt: skip
METHODS: dict[str, dict] = {
    "flash": ALL_BUT_LAST | dict(sde="wan", window=None, sde_steps=1, rectify=True),
    "flow": ALL_BUT_LAST,  # Flow-GRPO, arXiv 2505.05470
    "dance": ALL_BUT_LAST | dict(sde="dance", train_fraction=0.6, group_noise="shared"),  # DanceGRPO, arXiv 2505.07818
    "mix": ALL_BUT_LAST | dict(window="0:4", window_every=25),  # MixGRPO, arXiv 2507.21802
    "mix-flash": ALL_BUT_LAST | dict(window="0:4", window_every=25, solver="dpm2", compress=0.4),
}

CHOICES = {
    "weights": ["pretrained", "random"], "dtype": ["bf16", "fp32"], "method": list(METHODS),
    "sde": ["wan", "flow", "dance", "cps"], "grouping": ["iso", "random"], "group_noise": ["independent", "shared"],
    "solver": ["euler", "dpm2"], "adv_std": ["global", "group"], "reward_mix": ["standardize", "raw"],
    "reward_on_error": ["stop", "drop"], "tracker": ["tensorboard", "wandb", "none"],
}  # fmt: skip
REWARDS = ["palette", "brightness", "motion", "pickscore", "clip", "hpsv3"]
# The least and, where there is one, the most that a number may be; None = unbounded, and * marks an open end.
BOUNDS = {
    "height": "1..", "width": "1..", "num_frames": "1..", "num_steps": "1..", "flow_shift": "*0..",
    "guidance_scale": "0..", "guidance_scale_2": "0..", "eta": "*0..", "window_every": "0..", "sde_steps": "0..",
    "train_fraction": "*0..1", "compress": "*0..1", "num_updates": "1..", "max_nfe": "1..", "prompts_per_update": "1..",
    "group_size": "2..", "ppo_epochs": "1..", "micro_batch": "1..", "lr": "*0..", "weight_decay": "0..",
    "adam_eps": "*0..", "max_grad_norm": "*0..", "clip_range": "*0..", "kl": "0..", "lora_rank": "1..",
    "lora_alpha": "1..", "ema_decay": "0..1", "ema_every": "1..", "max_bad_updates": "1..", "shard_size": "0..",
    "timeout": "1..", "reward_frames": "1..", "reward_top": "*0..1", "reward_timeout": "*0..", "eval_every": "0..",
    "eval_num_steps": "1..", "save_every": "0..", "keep": "1..", "eval_videos": "0..", "fps": "1..", "num_gpus": "1..", "port": "1..65535",
    "seed": "0..",
}  # fmt: skip
ETA = {"wan": 0.7, "flow": 0.7, "dance": 0.3, "cps": 0.7}


class UserError(ValueError):
    """Something that the user typed or a file that they named is wrong; shown as one line, exit code 2."""


def nearest(word: str, words: list[str]) -> str:
    """A suggestion for a mistyped word, to be appended to an error message."""
    match = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f" (did you mean {match[0]}?)" if match else ""


def fill(config: Config) -> Config:
    """Return a copy whose unset fields are filled: the method's row, then the model's, then what follows from them."""
    if config.method not in METHODS:
        raise UserError(
            f"--method {config.method}: choose one of {', '.join(METHODS)}{nearest(config.method, list(METHODS))}"
        )
    looks_like_path = "/" in config.model or os.path.isdir(config.model)
    if config.model not in MODELS and not looks_like_path:
        known = list(MODELS)
        raise UserError(f"--model {config.model}: choose one of {', '.join(known)}, a folder or owner/name"
                        f"{nearest(config.model, known)}")  # fmt: skip
    rows = METHODS[config.method] | MODELS.get(config.model, WAN)
    config = dataclasses.replace(
        config, **{k: v for k, v in rows.items() if k != "repo" and getattr(config, k) is None}
    )
    derived = dict(
        window=f"0:{max(1, config.num_steps // 2)}",
        flow_shift=5.0 if min(config.height, config.width) >= 700 else 3.0,
        eta=ETA.get(config.sde, 0.7),
        guidance_scale_2=config.guidance_scale,
        run_name=f"{Path(config.model).name}-{config.method}-seed{config.seed}",
    )
    return dataclasses.replace(config, **{k: v for k, v in derived.items() if getattr(config, k) is None})


def window_of(config: Config) -> tuple[int, int]:
    """The (start, stop) of the steps that may be stochastic, from the text `start:stop` or `length`."""
    match = re.fullmatch(r"(?:(-?\d+)?:)?(-?\d+)?", config.window)
    if not match or not config.window:
        raise UserError(f"--window {config.window}: give start:stop, as in 0:{config.num_steps // 2}")
    start, stop, n = int(match[1] or 0), config.num_steps if match[2] is None else int(match[2]), config.num_steps
    start, stop = start + n * (start < 0), stop + n * (stop < 0)
    if not 0 <= start < stop <= n:
        raise UserError(f"--window {config.window}: must lie inside the schedule's steps 0:{n} and hold at least one")
    return start, stop


def validate(config: Config, world_size: int = 1) -> None:
    """Check a filled Config without loading anything. Raises UserError that names flag, value and what is accepted."""
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if value not in choices:
            raise UserError(f"--{name} {value}: choose one of {', '.join(choices)}{nearest(str(value), choices)}")
    for name, bounds in BOUNDS.items():
        value = getattr(config, name)
        low, high = bounds.lstrip("*").split("..")
        if value is None:
            continue
        too_low = value <= float(low) if bounds.startswith("*") else value < float(low)
        if not math.isfinite(value) or too_low or (high and value > float(high)):
            above = f"above {low}" if bounds.startswith("*") else f"at least {low}"
            raise UserError(f"--{name} {value}: must be {above}{f' and at most {high}' if high else ''}")
    start, stop = window_of(config)
    if config.sde_steps > stop - start:
        raise UserError(f"--sde_steps {config.sde_steps}: the window {config.window} has only {stop - start} steps")
    if config.window_every and stop > config.num_steps - 1:
        raise UserError(
            f"--window {config.window}: a window that moves must end before the last step, {config.num_steps - 1}"
        )
    if config.sde == "cps" and stop == config.num_steps:
        raise UserError(
            f"--window {config.window}: the last step of cps ends at sigma 0 and has std 0; stop at {stop - 1}"
        )
    if config.num_steps == 1 and config.sde == "wan":
        raise UserError("--num_steps 1: a wan SDE of one step has std 0; use at least 2 steps or --sde flow")
    videos = config.prompts_per_update * config.group_size
    if videos % world_size:
        ok = world_size // math.gcd(world_size, config.group_size)
        low = config.prompts_per_update // ok * ok
        raise UserError(
            f"--prompts_per_update {config.prompts_per_update}: {config.prompts_per_update} x {config.group_size} videos "
            f"do not divide over {world_size} processes; {f'{low} or ' if low else ''}{low + ok} prompts would"
        )
    if config.shard_size and world_size % config.shard_size:
        raise UserError(f"--shard_size {config.shard_size}: must divide the {world_size} processes")
    if config.kl and config.full:
        raise UserError(f"--kl {config.kl}: needs the adapter to switch off for the reference; drop --full")
    spatial, temporal = (4, 2) if config.model == "tiny" else (32 if config.model == "wan2.2-5b" else 16, 4)
    for name in ("height", "width"):
        value = getattr(config, name)
        if value % spatial:
            near = max(spatial, round(value / spatial) * spatial)
            raise UserError(f"--{name} {value}: must be a multiple of {spatial}, for example {near}")
    rest = 0 if config.model == "tiny" else 1
    if config.num_frames % temporal != rest:
        near = config.num_frames // temporal * temporal + rest
        raise UserError(
            f"--num_frames {config.num_frames}: must be {temporal} n{' + 1' * rest}, for example {near or temporal}"
        )
    if config.model == "tiny" and (config.height, config.width, config.num_frames) != (16, 16, 6):
        raise UserError(f"--height {config.height}: the tiny model was made for 16 x 16 pixels and 6 frames")
    if not config.lora_targets.strip(", "):
        raise UserError("--lora_targets '': name at least one module, for example to_q,to_v")
    parse_reward(config.reward)
    load_prompts(config.prompts, "prompts", config)
    load_prompts(config.eval_prompts, "eval_prompts", config)
    if not config.dry_run and re.search(r"[/\\]|^\.*$", config.run_name):
        raise UserError(f"--run_name {config.run_name}: give a plain folder name; its parent is --output_dir")
    folder = Path(config.output_dir) / config.run_name
    if not config.dry_run and not config.resume and folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"--run_name {config.run_name}: {folder} already holds a run; --resume continues it, or choose another name"
        )


def parse_reward(text: str) -> list[tuple[str, str, float]]:
    """Split a `--reward` text into (kind, argument, weight) parts. Raises UserError for what does not exist."""
    if text.startswith(("http://", "https://")):
        return [("http", text, 1.0)]
    parts = []
    for part in text.split(","):
        file = re.fullmatch(r"(.+\.py):(\w+)(?::([-+.\deE]+))?", part.strip())
        named = re.fullmatch(r"(\w+)(?:@([^:]+))?(?::([-+.\deE]+))?", part.strip())
        match = file or named
        try:
            weight = float(match[3] or 1) if match else math.nan
        except ValueError:
            weight = math.nan
        if not match or not math.isfinite(weight):
            raise UserError(
                f"--reward {part}: give name[:weight], name@model[:weight], file.py:function or http://host:port"
            )
        if file:
            try:
                tree = ast.parse(Path(file[1]).read_text())
            except (OSError, SyntaxError, UnicodeDecodeError) as error:
                raise UserError(f"--reward {part}: cannot read {file[1]}: {error}") from None
            names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
            if file[2] not in names:
                raise UserError(f"--reward {part}: {file[1]} has no function {file[2]}{nearest(file[2], names)}")
            parts.append(("file", f"{file[1]}:{file[2]}", weight))
        elif named[1] in REWARDS:
            parts.append((named[1], named[2] or "", weight))
        else:
            raise UserError(
                f"--reward {part}: choose of {', '.join(REWARDS)}{nearest(named[1], REWARDS)}, file.py:function or http://host:port"
            )
    return parts


def load_prompts(file: str | None, flag: str, config: Config) -> list[dict]:
    """Prompts as dicts with the key `prompt` and free metadata; from a file, or the built-in ones for None."""
    if file is None:
        every = TINY_PROMPTS if config.model == "tiny" else WAN_PROMPTS
        held_out = every[::4] if config.model == "tiny" else every[-4:]
        return [{"prompt": p} for p in every if (p in held_out) == (flag == "eval_prompts")]
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--{flag} {file}: cannot be read as UTF-8 text: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        item = {"prompt": line.strip()}
        if file.endswith(".jsonl"):
            try:
                item = json.loads(line)
                assert isinstance(item["prompt"], str)
            except (ValueError, TypeError, KeyError, AssertionError):
                raise UserError(f'--{flag} {file}: line {number} is not a JSON object with a text "prompt"') from None
        prompts.append(item)
    if not prompts:
        raise UserError(f"--{flag} {file}: holds no prompt; give one a line")
    for item in prompts if config.model == "tiny" else []:
        if item["prompt"] not in TINY_PROMPTS:
            near = nearest(item["prompt"], TINY_PROMPTS)
            raise UserError(
                f'--{flag} {file}: the tiny model knows prompts like "a red circle moving left", not "{item["prompt"]}"{near}'
            )
    return prompts


# The tiny model's whole language: 6 colours x 2 shapes x 4 directions. Every fourth prompt is held out for evaluation.
COLORS = {
    "red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "magenta": (1, 0, 1), "cyan": (0, 1, 1),
}  # fmt: skip
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
TINY_PROMPTS = [f"a {c} {s} moving {d}" for d in DIRECTIONS for s in ("circle", "square") for c in COLORS]
WAN_PROMPTS = """\
A golden retriever runs along a beach at sunset, spray flying from its paws, tracking shot.
A barista pours steamed milk into a cup and draws a leaf, close-up, soft morning light.
Waves break against a lighthouse in a storm, slow motion, dramatic sky.
A red vintage car drives along a mountain road in autumn, aerial view.
A girl in a yellow raincoat jumps into puddles on a city street at night, neon reflections.
A potter shapes a clay bowl on a spinning wheel, hands in focus.
A hummingbird hovers at a purple flower, macro shot, blurred background.
Fireworks bloom over a river while people watch from a bridge.
An astronaut walks across a field of tall grass towards a distant rocket.
A chef tosses vegetables in a flaming wok in a busy kitchen.
Snow falls on a quiet wooden cabin with a glowing window, evening.
A black cat stretches on a windowsill while rain runs down the glass.
A sailing boat crosses a turquoise bay, seen from above.
A violinist plays on an empty stage under a single spotlight.
A train winds through rice terraces at dawn, mist in the valleys.
Paper lanterns rise into the night sky above a lake.
A horse gallops through shallow water, backlit by the setting sun.
A robot waters plants in a sunny greenhouse.
Two children build a sandcastle while the tide comes in.
A hot-air balloon drifts over canyons in the first light of day.""".splitlines()


def parse_args(argv: list[str]) -> tuple[str, Config]:
    """The job (train, serve or bench) and the filled Config of a command line. Exits with 2 on an error, 0 after help."""
    job = argv[0] if argv[:1] in (["serve"], ["bench"]) else "train"
    argv = argv[1:] if job != "train" else argv
    source = inspect.getsource(Config)
    parser = argparse.ArgumentParser(
        prog="flash_grpo.py", add_help=False, allow_abbrev=False, usage="accelerate launch flash_grpo.py [--flag value ...]",
        description="Align a Wan video diffusion model with a reward. Also: flash_grpo.py serve | bench",
    )  # fmt: skip
    parser.error = lambda message: (_ for _ in ()).throw(UserError(message.removeprefix("argument ")))
    types = {f.name: f.type for f in dataclasses.fields(Config)}
    group = parser
    for line in source.splitlines():
        if topic := re.fullmatch(r"    # (.+)", line):
            group = parser.add_argument_group(topic[1])
        if field := re.match(r"    (\w+): .*?  # (.+)", line):
            name, text = field[1], field[2].replace("%", "%%")
            kind = next(t for t in (bool, int, float, str) if t in (types[name], *getattr(types[name], "__args__", ())))
            if kind is bool:
                group.add_argument(f"--{name}", action="store_true", default=argparse.SUPPRESS, help=text)
                group.add_argument(
                    f"--no_{name}", action="store_false", dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS
                )
            else:
                group.add_argument(f"--{name}", type=kind, metavar=kind.__name__, default=argparse.SUPPRESS, help=text)
    try:
        given, unknown = parser.parse_known_args([a for a in argv if a not in ("-h", "--help")])
        if unknown:
            flags = [option for action in parser._actions for option in action.option_strings]
            raise UserError(f"{unknown[0]}: no such flag{nearest(unknown[0], flags)}; --help lists all")
        config = fill(Config(**vars(given)))
        if "-h" in argv or "--help" in argv:
            for action in parser._actions:
                action.help = action.help and f"{action.help} [{getattr(config, action.dest)}]".replace("[]", "")
            parser.epilog = f"Values in brackets are the defaults for --model {config.model} --method {config.method}."
            parser.print_help()
            sys.exit(0)
        if job == "train":
            validate(config, int(os.environ.get("WORLD_SIZE", 1)))
        else:
            parse_reward(config.reward)
        return job, config
    except UserError as error:
        print(f"flash_grpo.py: error: {error}", file=sys.stderr)
        sys.exit(2)


# The arguments are read before the heavy imports, so that --help and a typing error answer at once.
JOB, CONFIG = parse_args(sys.argv[1:]) if __name__ == "__main__" else ("import", None)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

# ======================================================================================================================
# The algorithm, 1: schedule and stochastic step
# ======================================================================================================================


def make_sigmas(num_steps: int, shift: float) -> Tensor:
    """Noise levels of a flow-matching sampler: sigma(u) = f u / (1 + (f - 1) u) for u = 1, 1 - 1/N, ..., 0.

    Args: num_steps N; shift f > 0 (Wan: 3 at 480p, 5 at 720p). Returns float64 [N + 1], from 1 to 0.
    Raises ValueError for num_steps < 1 or shift <= 0.
    """
    if num_steps < 1 or not shift > 0:
        raise ValueError(f"need num_steps >= 1 and shift > 0, got {num_steps} and {shift}")
    return shift_sigma(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift)


def shift_sigma(u: Tensor, shift: float) -> Tensor:
    """sigma(u) = f u / (1 + (f - 1) u): the larger the shift f, the more steps are spent at high noise."""
    return shift * u / (1 + (shift - 1) * u)


def sde_coefficients(
    sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, kind: str = "wan", eta: float = 0.7
) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers (a, b, std) of a stochastic step, for all kinds: x' = a x + b v + std z.

    For an SDE with the noise level s that keeps the marginals of the flow dx = v dt (dt = sigma' - sigma < 0):
        a = 1 + s^2 / (2 sigma) dt,   b = (1 + s^2 (1 - sigma) / (2 sigma)) dt,   std = s sqrt(-dt)
    with s by kind: `wan` s = sigma_max sigma (Flash-GRPO's code: from sigma_max down to the last sigma, 0);
    `flow` s = eta sqrt(sigma / (1 - sigma)), where 1 - sigma is kept at 1 - sigma_max or more (Flow-GRPO);
    `dance` s = eta (DanceGRPO). `cps` (arXiv 2509.05952) is another rule, on x0 = x - sigma v and eps = x + (1 - sigma) v:
        x' = (1 - sigma') x0 + sigma' cos(eta pi / 2) eps + sigma' sin(eta pi / 2) z

    Args: float64 tensors of one shape; 0 <= sigma' < sigma <= 1. Raises ValueError for another order or an unknown kind.
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
        s = eta * (sigma / (1 - torch.minimum(sigma, sigma_max))).sqrt()
    elif kind == "dance":
        s = torch.full_like(sigma, eta)
    else:
        raise ValueError(f"unknown SDE {kind!r}: choose one of {', '.join(CHOICES['sde'])}")
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
    """log N(x'; mean, std^2), averaged (the field's convention, not summed) over all but the batch axis. Returns [B]."""
    log_prob = -((x_next - mean) ** 2) / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
    return log_prob.flatten(1).mean(1)


def dpm2_step(x: Tensor, x0: Tensor, x0_prev: Tensor | None, sigma_prev, sigma, sigma_next) -> Tensor:
    """One deterministic step of DPM-Solver++(2M) (arXiv 2211.01095) with alpha = 1 - sigma and h the log-SNR step.

    Args: x at sigma, its data prediction x0 = x - sigma v, and that of the step before, which None (or a last step, to
    sigma' = 0) lowers to first order, equal to Euler. sigma_*: float64, broadcastable to x. Returns x at sigma'.
    """

    def log_snr(s):
        return torch.log1p(-s) - torch.log(s)

    if x0_prev is not None:
        h, h_prev = log_snr(sigma_next) - log_snr(sigma), log_snr(sigma) - log_snr(sigma_prev)
        half_inverse_r = torch.where(torch.isfinite(h), h / (2 * h_prev), 0.0)
        x0 = x0 + half_inverse_r.to(x) * (x0 - x0_prev)
    ratio = sigma_next / sigma
    # alpha' (1 - exp(-h)), written so that it also holds at sigma = 1 and sigma' = 0.
    return ratio.to(x) * x + ((1 - sigma_next) - ratio * (1 - sigma)).to(x) * x0


# ======================================================================================================================
# The algorithm, 2: which steps are stochastic
# ======================================================================================================================


def generator(*key: Any) -> torch.Generator:
    """A CPU random generator seeded by the key, whatever the rank, the device or what was drawn before."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_sde_mask(
    num_prompts: int, group_size: int, num_steps: int, window: tuple[int, int], sde_steps: int = 1, grouping: str = "iso",
    window_every: int = 0, update: int = 0, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Which steps of which video are stochastic: bool [num_prompts * group_size, num_steps], the prompts one after another.

    sde_steps of the window's steps are drawn uniformly (0 = all): afresh for each prompt and update and shared by the
    prompt's videos (`iso`: iso-temporal grouping), or for each video (`random`). The window moves on by one step every
    window_every updates until it touches the last step (MixGRPO). A pure function: every rank draws the same mask.
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
    """The stochastic steps that are trained: a random share of each video's (DanceGRPO: 0.6), the same number for all."""
    mask = torch.zeros_like(sde_mask)
    for i, row in enumerate(sde_mask):
        steps = row.nonzero()[:, 0]
        keep = max(1, round(fraction * len(steps)))
        order = torch.randperm(len(steps), generator=generator(seed, "train", update, i))
        mask[i, steps[order[:keep]]] = True
    return mask


# ======================================================================================================================
# The algorithm, 3: advantages, weights, the loss
# ======================================================================================================================


def group_advantages(rewards: Tensor, group_ids: Tensor, std: str = "global", clip: float = 5.0) -> Tensor:
    """A = (r - mean of its group) / (std + 1e-4), clipped to +-clip. std over the whole batch (the paper) or the group.

    Args: rewards [B]; group_ids integer [B] (a sample's position in the batch, never its prompt's text). Returns float32 [B].
    A group of equal rewards gets exactly 0. Raises ValueError for shapes that differ, a non-finite reward, another `std`.
    """
    if rewards.shape != group_ids.shape or rewards.ndim != 1 or not bool(torch.isfinite(rewards).all()):
        raise ValueError("rewards and group_ids must be [B], and every reward finite")
    if std not in ("global", "group"):
        raise ValueError(f"std must be 'global' or 'group', got {std!r}")
    if not len(rewards):
        return torch.zeros(0)
    rewards = rewards.double()
    advantages = torch.zeros_like(rewards)
    for g in group_ids.unique():
        rows = group_ids == g
        group = rewards[rows]
        if not bool(
            (group == group[0]).all()
        ):  # equal rewards: a mean rounded in the last bit must not become a signal
            advantages[rows] = (group - group.mean()) / ((group if std == "group" else rewards).std() + 1e-4)
    return advantages.clamp(-clip, clip).float()


def rectification_weights(grad_scale: Tensor) -> Tensor:
    """w = (1 / lambda) / mean(1 / lambda): equal pull for every timestep, mean weight 1 over the whole global batch.

    Args: grad_scale lambda of every trained transition of the update, of all ranks and micro-batches. Returns float32 [B].
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


# ======================================================================================================================
# The Wan policy
# ======================================================================================================================

CACHE = Path(os.environ.get("FLASH_GRPO_CACHE", Path.home() / ".cache" / "flash_grpo"))

# True sizes of the presets, for --weights random and --dry_run: the transformer's config beside Wan's defaults.
WAN_14B = dict(num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, num_layers=40)
ARCHITECTURES: dict[str, dict] = {
    "tiny": dict(
        patch_size=(2, 4, 4), num_attention_heads=4, attention_head_dim=32, in_channels=3, out_channels=3, text_dim=32,
        freq_dim=64, ffn_dim=512, num_layers=3, rope_max_seq_len=32,
    ),
    "wan1.3b": dict(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=30),
    "wan14b": WAN_14B,
    "wan2.2-5b": dict(
        num_attention_heads=24, attention_head_dim=128, ffn_dim=14336, num_layers=30, in_channels=48, out_channels=48
    ),
    "wan2.2-a14b": WAN_14B,
}  # fmt: skip
VAE_5B = dict(
    base_dim=160, decoder_base_dim=256, z_dim=48, is_residual=True, in_channels=12, out_channels=12, patch_size=2,
    scale_factor_spatial=16, latents_mean=[0.0] * 48, latents_std=[1.0] * 48,
)  # fmt: skip


def resolve_folder(config: Config) -> Path | None:
    """The local folder of the model's diffusers pipeline, downloaded (safetensors only) or made first; None for random."""
    if config.weights == "random":
        return None
    if config.model == "tiny":
        return pretrained_tiny()
    if os.path.isdir(config.model):
        return Path(config.model)
    from huggingface_hub import snapshot_download

    repo = MODELS.get(config.model, {}).get("repo", config.model)
    try:
        return Path(snapshot_download(repo, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except Exception as error:
        raise UserError(f"--model {config.model}: cannot download {repo}: {str(error).splitlines()[0]}") from error


def local_slice(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This process's part of a possibly sharded parameter, and where it lies in the whole."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, n) for n in parameter.shape)
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(s, s + n) for s, n in zip(start, shape))


class WanPolicy:
    """The policy: one Wan transformer (or Wan 2.2's two experts), its guidance, prompts and decoder.

    Attributes: experts (list of WanTransformer3DModel, the high-noise one first), trained ({name: parameter}),
    latent_shape (C, T, H, W), nfe (transformer evaluations of this process so far).
    """

    def __init__(self, config: Config, device: torch.device, mesh=None):
        from diffusers import AutoencoderKLWan

        self.config, self.device, self.mesh = config, device, mesh
        self.folder = resolve_folder(config)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16")
        self.nfe, self.seconds = 0, 0.0
        index = self._json("model_index.json")
        two_experts = config.model == "wan2.2-a14b" if self.folder is None else index.get("transformer_2", [None])[0]
        is_5b = config.model == "wan2.2-5b"
        self.boundary = (index.get("boundary_ratio") or 0.875) if two_experts else None
        self.expand_timesteps = index.get("expand_timesteps", is_5b)
        self.experts = [self._load_transformer("transformer")]
        if two_experts:
            self.experts.append(self._load_transformer("transformer_2"))
        self.trained = {
            f"transformer{'_2' * i}.{name}": parameter
            for i, expert in enumerate(self.experts)
            for name, parameter in expert.named_parameters()
            if parameter.requires_grad
        }
        self.vae = None
        if config.model != "tiny":
            if self.folder is None:
                self.vae = AutoencoderKLWan(**(VAE_5B if is_5b else {}))
            else:
                self.vae = AutoencoderKLWan.from_pretrained(self.folder, subfolder="vae", use_safetensors=True)
            self.vae.to(device, torch.float32).eval().requires_grad_(False)
        arch = self.experts[0].config
        space, frames = (
            (self.vae.config.scale_factor_spatial, self.vae.config.scale_factor_temporal) if self.vae else (1, 1)
        )
        for name, value, unit in [
            ("height", config.height, space * arch.patch_size[1]), ("width", config.width, space * arch.patch_size[2]),
        ]:  # fmt: skip
            if value % unit:
                raise UserError(
                    f"--{name} {value}: must be a multiple of {unit} for this model, for example {value // unit * unit + unit}"
                )
        self.latent_shape = (
            arch.in_channels, (config.num_frames - 1) // frames + 1, config.height // space, config.width // space
        )  # fmt: skip
        self.text_length = 512 if config.model != "tiny" else 5
        self.embeddings: dict[str, Tensor] = {}

    def _json(self, name: str) -> dict:
        file = self.folder / name if self.folder else None
        return json.loads(file.read_text()) if file and file.exists() else {}

    # --- weights ------------------------------------------------------------------------------------------------------

    def _load_transformer(self, subfolder: str):
        """Build on the meta device, add the adapter, shard, and only then fill each process's own slice from the files."""
        from accelerate import init_empty_weights
        from diffusers import WanTransformer3DModel
        from peft import LoraConfig

        config, cls = self.config, WanTransformer3DModel
        arch = self._json(f"{subfolder}/config.json") or ARCHITECTURES.get(config.model, {})
        if self.folder and not (self.folder / subfolder / "config.json").exists():
            raise UserError(
                f"--model {config.model}: {self.folder} has no {subfolder}/config.json, so is no Wan pipeline"
            )
        with init_empty_weights():  # parameters on meta; the rotary table, a buffer, stays real
            model = cls.from_config(arch).eval().requires_grad_(config.full)
            if not config.full:
                targets = [t.strip() for t in config.lora_targets.split(",") if t.strip()]
                names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
                for target in targets:
                    if not any(name == target or name.endswith("." + target) for name in names):
                        endings = sorted({re.sub(r"^blocks\.\d+\.", "", name) for name in names})
                        raise UserError(f"--lora_targets {target}: matches nothing; the model has {', '.join(endings)}")
                lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets)
                model.add_adapter(lora)
        keep = cls._keep_in_fp32_modules
        for name, parameter in model.named_parameters():
            low = config.dtype == "bf16" and not parameter.requires_grad and not any(k in name.split(".") for k in keep)
            parameter.data = parameter.data.to(torch.bfloat16 if low else torch.float32)
        # The sinusoids of t must not pass through bf16 (1000 and 1001 are one number there): no autocast for their layers.
        embedder = model.condition_embedder.time_embedder
        embedder.forward = torch.autocast(self.device.type, enabled=False)(embedder.forward)
        if config.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        if config.compile:
            model.compile_repeated_blocks()
        if self.mesh is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            # cast_forward_inputs would round t to bf16; autocast does the casting. Full training gathers in bf16.
            low = torch.bfloat16 if config.full and config.dtype == "bf16" else None
            plain = MixedPrecisionPolicy(cast_forward_inputs=False)
            for block in model.blocks:
                policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
                fully_shard(block, mesh=self.mesh, mp_policy=policy)
            fully_shard(model, mesh=self.mesh, mp_policy=plain)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to_empty(device=self.device)
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
        self._fill(model, subfolder)
        return model

    @torch.no_grad()
    def _fill(self, model, subfolder: str) -> None:
        """Read each parameter's local slice from safetensors (or draw it); adapters start as A ~ Kaiming, B = 0."""
        from safetensors import safe_open

        files = sorted((self.folder / subfolder).glob("*.safetensors")) if self.folder else []
        handles = [safe_open(file, framework="pt") for file in files]
        where = {key: handle for handle in handles for key in handle.keys()}
        for name, parameter in model.named_parameters():
            local, index = local_slice(parameter)
            key = name.replace(".base_layer.", ".")
            if "lora_A" in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                whole = torch.rand(parameter.shape, generator=generator(self.config.seed, "lora", subfolder, name))
                local.copy_((bound * (2 * whole - 1))[index])
            elif "lora_B" in name:
                local.zero_()
            elif self.folder is None:
                torch.manual_seed(generator(subfolder, name, index[0].start).initial_seed())
                if parameter.ndim > 1:
                    local.normal_(0, 1 / math.sqrt(parameter[0].numel()))
                else:
                    local.fill_(float("norm" in name and name.endswith("weight")))
            elif key in where:
                local.copy_(where[key].get_slice(key)[index] if local.numel() else local)
            else:
                raise UserError(
                    f"--model {self.config.model}: {self.folder / subfolder} holds no weight {key} as safetensors"
                )

    # --- prompts ------------------------------------------------------------------------------------------------------

    def encode(self, prompts: list[str], is_writer: bool = True, wait: Callable[[], None] = lambda: None) -> None:
        """Fill self.embeddings ({prompt: [L, D]}, CPU) from the disk cache; the writer encodes what is missing there.

        `wait` is a barrier: the other processes read what the writer has stored. Wan's encoder is WanPipeline's own.
        """
        prompts = sorted({*prompts, self.config.negative_prompt})
        if self.config.model == "tiny":
            self.embeddings = {prompt: tiny_embedding(prompt) for prompt in prompts}
            return
        if self.folder is None:
            shape = (64, self.experts[0].config.text_dim)
            self.embeddings = {prompt: torch.randn(shape, generator=generator("text", prompt)) for prompt in prompts}
            return
        from safetensors.torch import load_file, save_file

        files = sorted((self.folder / "text_encoder").glob("*"))
        made_by = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files] + [str(self.folder.resolve())]
        probes = ["a red circle", "two dogs run through the rain at night"]
        paths = {}
        for prompt in [*prompts, *probes]:
            digest = hashlib.blake2b(repr((made_by, prompt)).encode(), digest_size=16).hexdigest()
            paths[prompt] = CACHE / "prompts" / f"{digest}.safetensors"
        missing = [prompt for prompt, path in paths.items() if not path.exists()]
        if missing and is_writer:
            from diffusers import WanPipeline

            dtype = torch.bfloat16 if self.config.dtype == "bf16" else torch.float32
            pipe = WanPipeline.from_pretrained(
                self.folder, transformer=None, transformer_2=None, vae=None, torch_dtype=dtype, use_safetensors=True
            )  # fmt: skip
            pipe.set_progress_bar_config(disable=True)
            encoder = pipe.text_encoder.to(self.device)
            (CACHE / "prompts").mkdir(parents=True, exist_ok=True)
            for prompt in missing:
                with torch.no_grad():
                    rows = pipe.encode_prompt(
                        prompt, do_classifier_free_guidance=False, max_sequence_length=512, device=self.device
                    )[0][0]
                used = int(rows.ne(0).any(1).nonzero().max()) + 1  # stored without the zeros behind the prompt's end
                partial = paths[prompt].with_suffix(f".{os.getpid()}.tmp")
                save_file({"embedding": rows[:used].cpu().contiguous()}, partial)
                partial.rename(paths[prompt])
            del pipe, encoder
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        wait()
        for prompt, path in paths.items():
            self.embeddings[prompt] = load_file(path)["embedding"].float()
        a, b = (self.embeddings.pop(probe) if probe not in prompts else self.embeddings[probe] for probe in probes)
        a, b = a.mean(0), b.mean(0)
        if not float((a - b).norm()) > 1e-3 * float(a.norm()):
            raise UserError(
                f"--model {self.config.model}: its text encoder gives every prompt the same embedding; are its tied weights missing?"
            )

    def _text(self, prompts: list[str]) -> Tensor:
        rows = [self.embeddings[p] for p in prompts]
        padded = [torch.nn.functional.pad(r, (0, 0, 0, self.text_length - len(r))) for r in rows]
        return torch.stack(padded).to(self.device)

    # --- velocity -----------------------------------------------------------------------------------------------------

    def velocity(self, x: Tensor, sigma: Tensor, prompts: list[str]) -> Tensor:
        """The guided velocity v(x, sigma, prompt), the same function in rollout and in training.

        Args: x float32 [B, C, T, H, W]; sigma float64 [B] on the CPU; prompts [B]. Returns float32, like x.
        Counts self.nfe: one per sample and forward, two with guidance, two more for a backward, one for its recomputation.
        On sharded experts every process must call this equally often; B may be 0 (its experts then run on zeros).
        """
        started = time.perf_counter()
        high = torch.full((len(x),), True) if self.boundary is None else sigma >= self.boundary
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (high if i == 0 else ~high).nonzero()[:, 0]
            needed = global_max(len(rows), self.device) if self.mesh is not None else len(rows)
            if len(rows):
                scale = (self.config.guidance_scale, self.config.guidance_scale_2)[i]
                everyone = len(rows) == len(x)
                part = x if everyone else x[rows.to(x.device)]
                v = self._guided(expert, part, sigma[rows], [prompts[r] for r in rows], scale)
                out = v if everyone else out.index_put((rows.to(x.device),), v)
                cost = (1 if scale == 1 else 2) * (
                    1 + torch.is_grad_enabled() * (2 + bool(self.config.gradient_checkpointing))
                )
                self.nfe += len(rows) * cost
            elif needed:  # another process needs this expert: take part in its collectives, and in their gradients
                blank = x.new_zeros(1, *self.latent_shape)
                v = self._guided(
                    expert, blank, torch.ones(1), [self.config.negative_prompt], self.config.guidance_scale
                )
                out = out + 0 * v.sum()
        self.seconds += time.perf_counter() - started
        return out

    def _guided(self, expert, x: Tensor, sigma: Tensor, prompts: list[str], scale: float) -> Tensor:
        t = (1000 * sigma).float().to(x.device)
        if self.expand_timesteps:  # TI2V-5B takes one timestep per token
            patch = expert.config.patch_size
            t = t[:, None].expand(-1, x.shape[2] // patch[0] * (x.shape[3] // patch[1]) * (x.shape[4] // patch[2]))
        text = self._text(prompts)
        with self.autocast:
            if scale == 1:
                return expert(x, t, text, return_dict=False)[0].float()
            no_text = self._text([self.config.negative_prompt] * len(x))
            if self.config.cfg_batch:
                both = expert(torch.cat([x, x]), torch.cat([t, t]), torch.cat([text, no_text]), return_dict=False)[0]
                cond, uncond = both.float().chunk(2)
            else:
                cond = expert(x, t, text, return_dict=False)[0].float()
                uncond = expert(x, t, no_text, return_dict=False)[0].float()
        return uncond + scale * (cond - uncond)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, T, H, W] to video uint8 [B, T', H', W', 3] on the CPU. The tiny model's latents are its pixels."""
        videos = []
        for latent in latents:
            video = latent[None]
            if self.vae is not None:
                mean, std = (
                    torch.tensor(c).to(latent).view(1, -1, 1, 1, 1)
                    for c in (self.vae.config.latents_mean, self.vae.config.latents_std)
                )
                video = self.vae.decode(video * std + mean, return_dict=False)[0]
            video = (video[0].float() / 2 + 0.5).clamp(0, 1).permute(1, 2, 3, 0)
            videos.append((video * 255).round().to(torch.uint8).cpu())
        return torch.stack(videos)

    @contextmanager
    def reference(self):
        """Inside, the experts run without their adapters: the model before training."""
        for expert in self.experts:
            expert.disable_adapters()
        try:
            yield
        finally:
            for expert in self.experts:
                expert.enable_adapters()


# ======================================================================================================================
# The tiny world: captioned videos of moving shapes, and a small Wan that draws them
# ======================================================================================================================


def tiny_videos(prompts: list[str], rng: torch.Generator) -> Tensor:
    """Videos [B, 3, 6, 16, 16] in [-1, 1] of "a <colour> <shape> moving <direction>", a pixel a frame, on black."""
    words = [prompt.split() for prompt in prompts]
    color = torch.tensor([COLORS[w[1]] for w in words], dtype=torch.float32)
    is_circle = torch.tensor([w[2] == "circle" for w in words])[:, None, None, None]
    direction = torch.tensor([DIRECTIONS[w[4]] for w in words], dtype=torch.float32)
    frame = torch.arange(6) - 2.5
    room = 3 - 2.5 * direction.abs()  # how far the centre of the path may lie from the centre of the frame
    centre = 8 + (2 * torch.rand(len(words), 2, generator=rng) - 1) * room
    path = centre[:, None] + direction[:, None] * frame[None, :, None]
    grid = torch.arange(16) + 0.5
    dx = grid[None, None, None, :] - path[:, :, 0, None, None]
    dy = grid[None, None, :, None] - path[:, :, 1, None, None]
    outside = torch.where(is_circle, (dx**2 + dy**2).sqrt() - 3.2, torch.maximum(dx.abs(), dy.abs()) - 2.85)
    return (0.5 - outside).clamp(0, 1)[:, None] * color[:, :, None, None, None] * 2 - 1


def tiny_embedding(prompt: str) -> Tensor:
    """The tiny model's text encoder: a fixed random vector per word, [words, 32]."""
    words = [torch.randn(32, generator=generator("word", word)) for word in prompt.split()]
    return torch.stack(words) if words else torch.zeros(0, 32)


def pretrained_tiny(num_updates: int = 1000, batch: int = 16) -> Path:
    """The folder of the pretrained tiny Wan: made by flow matching on tiny_videos at first use (a minute), then cached.

    The cache is keyed by the code that makes it, and only a whole one is ever seen: it is renamed into place.
    """
    import diffusers
    from diffusers import WanTransformer3DModel
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
    from tqdm import tqdm

    made_by = (inspect.getsource(pretrained_tiny), inspect.getsource(tiny_videos), ARCHITECTURES["tiny"], TINY_PROMPTS)
    key = hashlib.blake2b(repr((made_by, torch.__version__, diffusers.__version__)).encode(), digest_size=8).hexdigest()
    folder = CACHE / f"tiny-{key}"
    try:
        with safe_open(folder / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as file:
            if file.metadata().get("key") == key:
                return folder
    except (OSError, SafetensorError, AttributeError):
        pass
    torch.manual_seed(0)
    model = WanTransformer3DModel(**ARCHITECTURES["tiny"])
    average = {name: p.detach().clone() for name, p in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_updates, pct_start=0.1)
    rng = torch.Generator().manual_seed(0)
    text = {prompt: tiny_embedding(prompt) for prompt in TINY_PROMPTS}
    for _ in tqdm(range(num_updates), desc="pretraining the tiny Wan (only once)", unit=" steps", dynamic_ncols=True):
        prompts = [TINY_PROMPTS[i] for i in torch.randint(len(TINY_PROMPTS), (batch,), generator=rng)]
        x0 = tiny_videos(prompts, rng)
        noise = torch.randn(x0.shape, generator=rng)
        sigma = shift_sigma((torch.arange(batch) + torch.rand(batch, generator=rng)) / batch, 1.5)
        wide = sigma.view(-1, 1, 1, 1, 1)
        v = model(
            (1 - wide) * x0 + wide * noise, 1000 * sigma, torch.stack([text[p] for p in prompts]), return_dict=False
        )[0]
        loss = (v - (noise - x0)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        for name, p in model.state_dict().items():
            average[name].lerp_(p, 0.02)
    partial = CACHE / f".tiny-{os.getpid()}"
    (partial / "transformer").mkdir(parents=True)
    save_file(average, partial / "transformer" / "diffusion_pytorch_model.safetensors", {"key": key, "format": "pt"})
    model.save_config(partial / "transformer")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


# ======================================================================================================================
# Rewards
# ======================================================================================================================
#
# A reward is a callable   reward(videos, prompts, metadata) -> Tensor [B]  or  {name: Tensor [B]}
# with videos uint8 [B, T, H, W, 3], prompts a list of B texts, metadata a list of B dicts (the prompt file's other keys).
# Of a dict, the key `total` is trained on, or the sum where there is none; every entry is logged. Higher is better. A
# reward that cannot score must raise (or return NaN): a failure never becomes a number. Yours: --reward my_file.py:my_reward


class RewardError(RuntimeError):
    """A reward raised, timed out, or gave something other than a finite number per video."""


def palette_reward(videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """The tiny model's reward: every pixel should be the prompt's colour or the black background.

    The area near the colour counts up to the size that a shape has (12 % of the frame, in each frame) and no further, so it
    cannot be won by filling the frame; the share of pixels that are neither counts against. About 1 for a perfect video.
    """
    pixels = videos.float() / 255
    color = torch.tensor([COLORS[p.split()[1]] for p in prompts], dtype=torch.float32)[:, None, None, None]
    near = torch.exp(-(pixels - color).pow(2).sum(-1) / 0.1)
    background = torch.exp(-pixels.pow(2).sum(-1) / 0.1)
    area = (near.mean((2, 3)) / 0.12).clamp(max=1).mean(1)
    neither = (1 - near - background).clamp(min=0).mean((1, 2, 3))
    return area - 10 * neither


def brightness_reward(videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """A reward without a ceiling in sight, for comparing methods: brightness in the prompt's colour less that in the others."""
    pixels = videos.float() / 255
    color = torch.tensor([COLORS[p.split()[1]] for p in prompts], dtype=torch.float32)[:, None, None, None]
    return 10 * (pixels * color).sum(-1).mean((1, 2, 3)) - 10 * (pixels * (1 - color)).sum(-1).mean((1, 2, 3))


def motion_reward(videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """Mean absolute change of a pixel from frame to frame, in [0, 1]: mix it in against rewards that freeze the video."""
    pixels = videos.float() / 255
    return (pixels[:, 1:] - pixels[:, :-1]).abs().mean((1, 2, 3, 4))


def best_frames(scores: Tensor, top: float) -> Tensor:
    """Mean of the best share of each video's frames: scores [B, T] to [B]. At least one frame counts."""
    keep = max(1, math.ceil(top * scores.shape[1]))
    return scores.topk(keep, dim=1).values.mean(1)


def some_frames(videos: Tensor, count: int) -> Tensor:
    """`count` evenly spaced frames of each video (all, if there are fewer): [B, T, H, W, 3] to [B, min(T, count), ...]."""
    count = min(count, videos.shape[1])
    return videos[:, torch.linspace(0, videos.shape[1] - 1, count).round().long()]


class ClipReward:
    """CLIP's or PickScore's image-text score (the model's logits_per_image), over some frames of each video."""

    def __init__(self, model: str, processor: str, config: Config, device: torch.device):
        from transformers import AutoTokenizer, CLIPModel
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        self.model = CLIPModel.from_pretrained(model, use_safetensors=True).to(device).eval().requires_grad_(False)
        self.images = CLIPImageProcessorPil.from_pretrained(processor)
        self.tokenizer = AutoTokenizer.from_pretrained(processor)
        self.frames, self.top, self.device = config.reward_frames, config.reward_top or 1.0, device

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        scores = []
        for video, prompt in zip(some_frames(videos, self.frames), prompts):
            pixels = self.images(list(video.numpy()), return_tensors="pt").to(self.device)
            text = self.tokenizer(prompt, truncation=True, max_length=77, padding=True, return_tensors="pt").to(
                self.device
            )
            scores.append(self.model(**text, **pixels).logits_per_image[:, 0].float().cpu())
        return best_frames(torch.stack(scores), self.top)


class HPSv3Reward:
    """HPSv3 (MizzenAI, package `hpsv3`): mean of the best 30 % of frames, as in the paper. Runs best behind `serve`."""

    def __init__(self, config: Config, device: torch.device):
        try:
            from hpsv3 import HPSv3RewardInferencer
        except ImportError as error:
            raise UserError(
                f"--reward hpsv3: {error}; its package needs another transformers than Wan does, so start it in its own "
                "environment (python flash_grpo.py serve --reward hpsv3) and train with --reward http://127.0.0.1:8000"
            ) from error
        from accelerate.state import AcceleratorState, PartialState

        # Building it overwrites accelerate's process-wide state: put ours back.
        saved = dict(PartialState._shared_state), dict(AcceleratorState._shared_state)
        self.model = HPSv3RewardInferencer(device=str(device))
        for state, before in zip((PartialState, AcceleratorState), saved):
            state._shared_state.clear()
            state._shared_state.update(before)
        self.frames, self.top = config.reward_frames, config.reward_top or 0.3

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        import tempfile

        import imageio.v3 as iio

        scores = []
        with tempfile.TemporaryDirectory() as folder:
            for video, prompt in zip(some_frames(videos, self.frames), prompts):
                paths = [f"{folder}/{i}.png" for i in range(len(video))]
                for path, frame in zip(paths, video.numpy()):
                    iio.imwrite(path, frame)
                scored = self.model.reward(
                    prompts=[prompt] * len(paths), image_paths=paths
                )  # [mean, uncertainty] per frame
                scores.append(torch.tensor([float(score[0]) for score in scored]))
        return best_frames(torch.stack(scores), self.top)


class HttpReward:
    """A reward behind `flash_grpo.py serve`. Several addresses are used in turn, and each other's stand-in when one fails."""

    def __init__(self, urls: str, config: Config):
        self.urls, self.calls = urls.split(","), 0
        self.timeout, self.token = config.reward_timeout, config.reward_token or os.environ.get("FLASH_GRPO_TOKEN", "")

    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict]) -> dict[str, Tensor]:
        import urllib.error
        import urllib.request

        header = json.dumps({"shape": list(videos.shape), "prompts": prompts, "metadata": metadata}).encode()
        body = header + b"\n" + videos.contiguous().numpy().tobytes()
        self.calls += 1
        for attempt in range(5):
            url = self.urls[(self.calls + attempt) % len(self.urls)].rstrip("/") + "/score"
            try:
                request = urllib.request.Request(url, body, {"Authorization": f"Bearer {self.token}"})
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    scores = json.loads(reply.read(1 << 24))
                return {str(name): torch.tensor(values, dtype=torch.float32) for name, values in scores.items()}
            except urllib.error.HTTPError as error:  # the server's own answer: a request that it refuses stays refused
                reason = f"{url} answered {error.code}: {error.read(2000).decode(errors='replace').strip()}"
                if error.code < 500:
                    raise RewardError(reason) from None
            except (OSError, ValueError, TypeError, AttributeError) as error:
                reason = f"{url}: {error}"
            if attempt < 4:
                time.sleep(0.5 * 2**attempt)
        raise RewardError(f"no reward after 5 tries; the last: {reason}")


def build_part(kind: str, argument: str, config: Config, device: torch.device) -> Callable:
    """The reward of one (kind, argument) part of `--reward`; only what that part needs is imported."""
    if kind == "http":
        return HttpReward(argument, config)
    if kind == "file":
        import importlib.util

        path, name = argument.rsplit(":", 1)
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        reward = getattr(module, name)
        return reward() if inspect.isclass(reward) else reward
    if kind == "hpsv3":
        return HPSv3Reward(config, device)
    if kind == "clip":
        model = argument or "openai/clip-vit-large-patch14"
        return ClipReward(model, model, config, device)
    if kind == "pickscore":
        return ClipReward(
            argument or "yuvalkirstain/PickScore_v1",
            argument or "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
            config,
            device,
        )
    return {"palette": palette_reward, "brightness": brightness_reward, "motion": motion_reward}[kind]


class Reward:
    """All parts of `--reward` behind one call that returns checked numbers or raises RewardError.

    `names` are the columns of the result: the parts' names, and the named sub-scores of a part that gives a dict.
    """

    def __init__(self, config: Config, device: torch.device):
        self.specs = parse_reward(config.reward)
        if config.model != "tiny" and any(kind in ("palette", "brightness") for kind, _, _ in self.specs):
            raise UserError(f"--reward {config.reward}: palette and brightness know only the tiny model's prompts")
        self.parts = [build_part(kind, argument, config, device) for kind, argument, _ in self.specs]
        self.weights = torch.tensor([weight for _, _, weight in self.specs])
        self.raw = config.reward_mix == "raw" or len(self.parts) == 1
        self.names = [kind if kind != "file" else argument.rsplit(":", 1)[1] for kind, argument, _ in self.specs]
        self.extra: list[str] = []

    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """Scores float32 [B, parts + sub-scores]. Raises RewardError, with the reward's own traceback as its cause."""
        columns, extra = [], {}
        for name, part in zip(self.names, self.parts):
            try:
                scores = part(videos, prompts, metadata)
            except RewardError:
                raise
            except Exception as error:
                raise RewardError(f"reward {name} raised {type(error).__name__}: {error}") from error
            named = scores if isinstance(scores, dict) else {"total": scores}
            for key, value in named.items():
                if not isinstance(value, Tensor) or tuple(value.shape) != (len(prompts),):
                    shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                    raise RewardError(f"reward {name} gave {shape} for {key}, not a Tensor of shape ({len(prompts)},)")
                if not bool(torch.isfinite(value).all()):
                    raise RewardError(f"reward {name} gave a non-finite {key}: {value.flatten().tolist()[:8]}")
            if not named:
                raise RewardError(f"reward {name} gave an empty dict")
            columns.append(named["total"] if "total" in named else torch.stack(list(named.values())).sum(0))
            extra |= {f"{name}/{key}": value for key, value in named.items() if key != "total"}
        if self.extra and sorted(extra) != self.extra:
            raise RewardError(f"the reward's sub-scores changed from {self.extra} to {sorted(extra)}")
        self.extra = sorted(extra)
        return torch.stack(columns + [extra[key] for key in self.extra], 1).float().cpu()

    def mix(self, scores: Tensor, scale: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The trained reward [B]: the weighted sum of the parts, standardized with (mean, std) or over this batch."""
        parts = scores[:, : len(self.parts)]
        if not self.raw:
            mean, std = scale or (parts.mean(0), parts.std(0))
            parts = (parts - mean) / (std + 1e-6)
        return parts @ self.weights

    def check(self, config: Config) -> None:
        """One call on a blank and on a noise video, before anything is trained. Raises UserError."""
        videos = torch.zeros(2, config.num_frames, config.height, config.width, 3, dtype=torch.uint8)
        videos[1] = torch.randint(0, 256, videos.shape[1:], generator=generator("check"))
        prompts = (load_prompts(config.prompts, "prompts", config) * 2)[:2]
        try:
            self(videos, [p["prompt"] for p in prompts], [p for p in prompts])
        except RewardError as error:
            raise UserError(f"--reward {config.reward}: fails on a blank and a noise video: {error}") from error


def serve(config: Config) -> None:
    """Answer POST /score (a JSON line, then raw uint8 frames) with JSON scores, and GET /health. Nothing is unpickled."""
    import hmac
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    reward = Reward(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    token = config.reward_token or os.environ.get("FLASH_GRPO_TOKEN", "")
    one_at_a_time, limit = threading.Lock(), 4 << 30

    class Handler(BaseHTTPRequestHandler):
        timeout = 60  # seconds that a client may stay silent

        def answer(self, code: int, content: dict) -> None:
            body = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            known = self.path == "/health"
            self.answer(
                200 if known else 404,
                {"reward": config.reward} if known else {"error": "try GET /health or POST /score"},
            )

        def do_POST(self) -> None:
            sent = self.headers.get("Authorization", "")
            if token and not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
                return self.answer(401, {"error": "wrong or missing token"})
            try:
                length = int(self.headers.get("Content-Length", ""))
            except ValueError:
                return self.answer(411, {"error": "send a Content-Length"})
            if self.path != "/score" or not 0 < length <= limit:
                return self.answer(
                    413 if length > limit else 404, {"error": f"POST /score takes at most {limit} bytes"}
                )
            try:
                header, _, frames = self.rfile.read(length).partition(b"\n")
                asked = json.loads(header)
                shape, prompts, metadata = asked["shape"], asked["prompts"], asked["metadata"]
                if (
                    len(shape) != 5
                    or shape[0] != len(prompts)
                    or len(prompts) != len(metadata)
                    or math.prod(shape) != len(frames)
                ):
                    raise ValueError("shape, prompts, metadata and the number of bytes do not agree")
                videos = torch.frombuffer(bytearray(frames), dtype=torch.uint8).view(shape)
            except Exception as error:
                return self.answer(400, {"error": f"not a request for scores: {error}"})
            try:
                with one_at_a_time:
                    scores = reward(videos, prompts, metadata)
                    names = reward.names + reward.extra
                parts = {name: scores[:, i].tolist() for i, name in enumerate(names)}
                self.answer(200, {"total": reward.mix(scores).tolist()} | (parts if len(names) > 1 else {}))
            except RewardError as error:
                self.answer(500, {"error": str(error)})

        def log_message(self, text: str, *values: Any) -> None:
            print(f"{self.address_string()} {text % values}", flush=True)

    with ThreadingHTTPServer((config.host, config.port), Handler) as server:
        print(
            f"reward {config.reward} at http://{config.host}:{server.server_port} (POST /score, GET /health)",
            flush=True,
        )
        server.serve_forever()


# ======================================================================================================================
# Rollout
# ======================================================================================================================


@dataclass
class Rollout:
    """Videos of one rollout and the transitions to train on; nothing else of the trajectory is kept.

    Videos that share a latent (shared group noise, up to their first stochastic step) share its row in `states`, so that
    training too evaluates the transformer once for all of them.
    """

    latents: Tensor  # [B, C, T, H, W], final
    states: Tensor  # [S, C, T, H, W], the distinct latents that trained steps start from
    x_next: Tensor  # [M, C, T, H, W], where each of the M trained transitions ended
    state: Tensor  # [M], its row in states
    video: Tensor  # [M], its row in latents
    step: Tensor  # [M], its step
    log_prob: Tensor  # [M], under the policy that made it

    @staticmethod
    def cat(parts: list["Rollout"]) -> "Rollout":
        """Join rollouts, renumbering the rows."""
        joined: dict[str, list] = {f.name: [] for f in dataclasses.fields(Rollout)}
        states = videos = 0
        for part in parts:
            for name, values in joined.items():
                values.append(getattr(part, name) + {"state": states, "video": videos}.get(name, 0))
            states, videos = states + len(part.states), videos + len(part.latents)
        return Rollout(**{name: torch.cat(values) for name, values in joined.items()})


class Schedule:
    """What a mask of stochastic steps [B, N] means for each video: its sigmas, and which latents coincide when.

    grid: float64 [B, N + 1], each video's sigmas: the schedule up to its last stochastic step, and a tail that keeps the
    share `compress` of the steps after it (0 behind its end). length [B]: its number of steps. first, last [B]: its first
    and last stochastic step (N and -1 without one).
    """

    def __init__(self, sde_mask: Tensor, config: Config, groups: list[int]):
        count, n = sde_mask.shape
        u = torch.linspace(1, 0, n + 1, dtype=torch.float64)
        steps = torch.arange(n)
        self.first = torch.where(sde_mask, steps, n).amin(1).tolist()
        self.last = torch.where(sde_mask, steps, -1).amax(1).tolist()
        self.grid, self.length = torch.zeros(count, n + 1, dtype=torch.float64), []
        for i, last in enumerate(self.last):
            rest = n - last - 1
            kept = min(rest, math.ceil(config.compress * rest - 1e-9))
            tail = u[last + 1] * torch.linspace(1, 0, kept + 1, dtype=torch.float64) if kept < rest else u[last + 1 :]
            self.length.append(last + 1 + kept)
            self.grid[i, : self.length[i] + 1] = shift_sigma(torch.cat([u[: last + 1], tail]), config.flow_shift)
        self.shared, self.groups = config.group_noise == "shared", groups

    def owners(self, t: int) -> dict[int, int]:
        """{video: the video whose latent stands for it} for all videos that take a step t: one evaluation per owner.

        With shared group noise a group is one video up to and including the latent that its first stochastic step leaves.
        """
        found: dict[Any, int] = {}
        return {
            i: found.setdefault(self.groups[i] if self.shared and t <= self.first[i] else (i, "own"), i)
            for i in range(len(self.length))
            if t < self.length[i]
        }


def micro_batches(count: int, size: int, policy: WanPolicy) -> list[list[int]]:
    """Split range(count) into batches of at most `size`; on a sharded model, equally many (perhaps empty) on every process."""
    calls = math.ceil(count / size)
    if policy.mesh is not None:
        calls = global_max(calls, policy.device)
    return [list(range(count))[j * size : (j + 1) * size] for j in range(calls)]


@torch.no_grad()
def rollout(
    policy: WanPolicy, config: Config, prompts: list[str], noise: Tensor, sde_mask: Tensor, keys: list[tuple],
    train_mask: Tensor | None = None, groups: list[int] | None = None,
) -> Rollout:  # fmt: skip
    """Denoise videos: stochastic steps where sde_mask says so, deterministic ones elsewhere (Euler; dpm2 after the last).

    Args: prompts [B]; noise [B, C, T, H, W], the latents at sigma = 1; sde_mask and train_mask bool [B, N] (the transitions
    to store; by default all stochastic ones); keys [B] seed each video's step noise; groups [B] tell whose noise is shared.
    """
    train_mask = sde_mask if train_mask is None else train_mask
    plan = Schedule(sde_mask, config, list(range(len(prompts))) if groups is None else groups)
    sigma_max = make_sigmas(sde_mask.shape[1], config.flow_shift)[1]
    x, x0_prev = noise.clone(), torch.zeros_like(noise)
    states, x_next, log_prob, index = [], [], [], []  # index: rows (state, video, step)
    ticks = max(plan.length) if policy.mesh is None else global_max(max(plan.length), policy.device)
    for t in range(ticks):
        owner = plan.owners(t)
        live, distinct = list(owner), list(dict.fromkeys(owner.values()))
        v = [
            policy.velocity(x[rows], plan.grid[rows, t], [prompts[i] for i in rows])
            for rows in (
                [distinct[j] for j in batch] for batch in micro_batches(len(distinct), config.micro_batch, policy)
            )
        ]
        if not live:
            continue
        v = torch.cat(v)[[distinct.index(owner[i]) for i in live]]
        sigma, sigma_next = plan.grid[live, t], plan.grid[live, t + 1]
        wide = [s.view(-1, 1, 1, 1, 1) for s in (plan.grid[live, max(t - 1, 0)], sigma, sigma_next)]
        before = x[live]
        after = before + v * (wide[2] - wide[1]).to(v)
        if config.solver == "dpm2":
            x0 = before - wide[1].to(v) * v
            second = [j for j, i in enumerate(live) if t > plan.last[i] + 1]
            if second:
                history = x0_prev[live][second]
                after[second] = dpm2_step(before[second], x0[second], history, *(s[second] for s in wide))
            x0_prev[live] = x0
        noisy = [j for j, i in enumerate(live) if sde_mask[i, t]]
        if noisy:
            mean, std, _ = sde_step(
                before[noisy], v[noisy], sigma[noisy], sigma_next[noisy], sigma_max, config.sde, config.eta
            )
            z = [torch.randn(x.shape[1:], generator=generator(*keys[live[j]], t)) for j in noisy]
            after[noisy] = mean + std * torch.stack(z).to(x)
            log_probs = gaussian_log_prob(after[noisy], mean, std)
            row_of: dict[int, int] = {}
            for j, value in zip(noisy, log_probs):
                i = live[j]
                if train_mask[i, t]:
                    if owner[i] not in row_of:
                        row_of[owner[i]] = len(states)
                        states.append(before[j].clone())
                    index.append((row_of[owner[i]], i, t))
                    x_next.append(after[j].clone())
                    log_prob.append(value)
        x[live] = after

    def stack(rows):
        return torch.stack(rows) if rows else x.new_zeros(0, *x.shape[1:])

    state, video, step = torch.tensor(index, dtype=torch.long).reshape(-1, 3).T
    return Rollout(
        x, stack(states), stack(x_next), state, video, step, torch.stack(log_prob) if log_prob else x.new_zeros(0)
    )


def evaluations(config: Config, update: int = 0) -> int:
    """Transformer evaluations of one update, by formula: what Metrics' `nfe` must grow by (tested to be equal)."""
    sde_mask, train_mask = draw_masks(config, update)
    plan = Schedule(sde_mask, config, [i // config.group_size for i in range(len(sde_mask))])
    cost_of_training = (3 + bool(config.gradient_checkpointing) + (config.kl > 0)) * config.ppo_epochs
    total = 0
    for t in range(max(plan.length)):
        owner = plan.owners(t)
        trained = {o for i, o in owner.items() if train_mask[i, t]}
        total += len(set(owner.values())) + cost_of_training * len(trained)
    return total * (1 if config.guidance_scale == 1 else 2)


def draw_masks(config: Config, update: int) -> tuple[Tensor, Tensor]:
    """The stochastic and the trained steps of an update's whole global batch."""
    sde_mask = draw_sde_mask(
        config.prompts_per_update, config.group_size, config.num_steps, window_of(config), config.sde_steps,
        config.grouping, config.window_every, update, config.seed,
    )  # fmt: skip
    return sde_mask, draw_train_mask(sde_mask, config.train_fraction, update, config.seed)


# ======================================================================================================================
# Processes, sharding, checkpoints
# ======================================================================================================================


def global_max(value: int, device: torch.device) -> int:
    """The largest value over all processes."""
    if not torch.distributed.is_initialized():
        return value
    shared = torch.tensor(value, device=device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return int(shared)


def gather_objects(item: Any) -> list:
    """Every process's item, in the order of ranks."""
    if not torch.distributed.is_initialized():
        return [item]
    items = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(items, item)
    return items


def shard_size_of(config: Config, world_size: int) -> int:
    """Processes that share one copy of the model; 0 means those of one machine."""
    return config.shard_size or min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))


@dataclass
class State:
    """All that changes while training. Everything random is seeded by (seed, update, ...), so no generator is among it."""

    policy: WanPolicy
    optimizer: torch.optim.Optimizer
    ema: dict[str, Tensor]
    update: int = 0
    nfe: int = 0
    ema_steps: int = 0
    bad_updates: int = 0
    eval_start: dict | None = None  # the evaluation before training: rewards per prompt, and the scale of each part

    @classmethod
    def new(cls, policy: WanPolicy, config: Config) -> "State":
        """Fresh AdamW moments (made at once, so that a checkpoint always has them) and a moving average at the start."""
        parameters = list(policy.trained.values())
        optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, eps=config.adam_eps)
        for p in parameters:
            zeros = {key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(0.0)} | zeros
        return cls(policy, optimizer, {name: p.detach().clone() for name, p in policy.trained.items()})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by name; sharded ones as DTensors, so that another number of processes can load them."""
        tensors = {}
        for name, p in self.policy.trained.items():
            moments = self.optimizer.state[p]
            tensors |= {f"weight.{name}": p.detach(), f"ema.{name}": self.ema[name]}
            tensors |= {f"{key}.{name}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
        return tensors

    @contextmanager
    def ema_weights(self):
        """Inside, the policy has the averaged weights. Swapped in place, one parameter at a time."""

        def swap():
            for name, p in self.policy.trained.items():
                ours, average = local_slice(p.detach())[0], local_slice(self.ema[name])[0]
                kept = ours.clone()
                ours.copy_(average)
                average.copy_(kept)

        swap()
        try:
            yield
        finally:
            swap()

    def check_replicas(self) -> None:
        """Raise RuntimeError if copies of the trained weights on different processes differ in a single bit."""
        total = sum(
            int(local_slice(p.detach())[0].contiguous().view(torch.int32).sum(dtype=torch.int64))
            for p in self.policy.trained.values()
        )
        part = self.policy.mesh.get_local_rank("shard") if self.policy.mesh is not None else 0
        sums: dict[int, set[int]] = {}
        for where, value in gather_objects((part, total)):
            sums.setdefault(where, set()).add(value)
        if any(len(values) > 1 for values in sums.values()):
            raise RuntimeError(f"the replicas' weights have drifted apart at update {self.update}: {sums}")


# Settings that may differ between a checkpoint and the run that resumes it: they change where and how long, not what.
FREE = {
    "num_updates", "max_nfe", "micro_batch", "shard_size", "timeout", "reward_token", "reward_timeout", "eval_every",
    "eval_videos", "save_every", "keep", "output_dir", "run_name", "resume", "tracker", "fps", "dry_run", "num_gpus",
    "host", "port", "cfg_batch", "gradient_checkpointing", "compile", "max_bad_updates", "reward_on_error",
}  # fmt: skip


def settings(config: Config) -> dict:
    """The settings that decide the numbers of a run."""
    return {name: value for name, value in asdict(config).items() if name not in FREE}


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing: a killed process leaves the old one."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text)
    partial.replace(path)


def save_checkpoint(state: State, config: Config, folder: Path, is_main: bool) -> None:
    """Write checkpoints/<update>/ under a temporary name, rename it when whole, keep the last K; then export the adapter.

    Tensors go through torch.distributed.checkpoint into safetensors (its default would pickle metadata), the rest to JSON.
    """
    import torch.distributed.checkpoint as dcp

    state.check_replicas()
    final, partial = folder / "checkpoints" / f"{state.update:06d}", folder / "checkpoints" / ".partial"
    if final.exists():
        return
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    wait_for_all()
    writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
    dcp.save(state.tensors(), storage_writer=writer, no_dist=not torch.distributed.is_initialized())
    wait_for_all()
    if is_main:
        steps = {name: float(state.optimizer.state[p]["step"]) for name, p in state.policy.trained.items()}
        content = dict(
            update=state.update, nfe=state.nfe, ema_steps=state.ema_steps, bad_updates=state.bad_updates,
            eval_start=state.eval_start, steps=steps, settings=settings(config),
            files={file.name: file.stat().st_size for file in sorted(partial.iterdir())},
        )  # fmt: skip
        write_atomically(partial / "state.json", json.dumps(content))
        partial.rename(final)
        for old in sorted((folder / "checkpoints").glob("[0-9]*"))[: -config.keep]:
            shutil.rmtree(old)
    export(state, config, folder / "lora", is_main)


def wait_for_all() -> None:
    """A barrier, where there is more than one process."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def newest_checkpoint(folder: Path) -> tuple[Path, dict] | None:
    """The newest whole checkpoint and its JSON. One with missing or truncated files is named on stderr and passed over."""
    for path in sorted((folder / "checkpoints").glob("[0-9]*"), reverse=True):
        try:
            content = json.loads((path / "state.json").read_text())
            for name, size in content["files"].items():
                found = (path / name).stat().st_size
                if found != size:
                    raise ValueError(f"{name} has {found} bytes instead of {size}")
            return path, content
        except (OSError, ValueError, KeyError) as error:
            print(f"checkpoint {path} is damaged ({error}); looking for an older one", file=sys.stderr)
    return None


def load_checkpoint(state: State, config: Config, path: Path, content: dict) -> None:
    """Load a checkpoint into the state, whatever number of processes wrote it. Raises UserError for other settings."""
    import torch.distributed.checkpoint as dcp

    ours = json.loads(json.dumps(settings(config)))
    for name, theirs in content["settings"].items():
        if ours.get(name) != theirs:
            raise UserError(
                f"--{name} {ours.get(name)}: the run in {path.parent.parent} has {theirs}; use that, or another --run_name"
            )
    tensors = state.tensors()
    dcp.load(
        tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=not torch.distributed.is_initialized()
    )
    for name, p in state.policy.trained.items():
        state.optimizer.state[p]["step"].fill_(content["steps"][name])
    for name in ("update", "nfe", "ema_steps", "bad_updates", "eval_start"):
        setattr(state, name, content[name])


def export(state: State, config: Config, folder: Path, is_main: bool) -> None:
    """Write the averaged weights as diffusers reads them: lora/ for load_lora_weights, or whole transformers for --full."""
    from diffusers import WanPipeline
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    partial = folder.with_name(".lora-partial")
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)
    with state.ema_weights():
        for i, expert in enumerate(state.policy.experts):
            weights = {}
            prefix = f"transformer{'_2' * i}."
            for name, p in state.policy.trained.items():
                if name.startswith(prefix):  # gathering is collective: on all processes, kept on the main one
                    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float().cpu()
                    weights[name.removeprefix(prefix)] = whole.clone() if is_main else None
            if not is_main:
                continue
            if config.full:
                target = partial / f"transformer{'_2' * i}"
                target.mkdir(parents=True, exist_ok=True)
                save_file(
                    {k: v.contiguous() for k, v in weights.items()},
                    target / "diffusion_pytorch_model.safetensors",
                    {"format": "pt"},
                )
                expert.save_config(target)
            else:
                WanPipeline.save_lora_weights(
                    partial, get_peft_model_state_dict(expert, weights), weight_name=f"pytorch_lora_weights{'_2' * i}.safetensors",
                    transformer_lora_adapter_metadata=expert.peft_config["default"].to_dict(),
                )  # fmt: skip
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


# ======================================================================================================================
# Evaluation and pictures
# ======================================================================================================================


def evaluate(
    state: State, config: Config, reward: Reward, prompts: list[dict], folder: Path, rank: int, world: int
) -> dict:
    """Reward on held-out prompts: deterministic steps, averaged weights, and the same noise whatever the seed or update.

    Writes videos/<update>/*.mp4 and index.jsonl. Returns eval_reward, its 95 % interval over prompts (eval_ci), eval_std
    (of the pixels) and the rewards; raises RewardError on every process if the reward fails on one.
    """
    policy, nfe = state.policy, state.policy.nfe
    mine = [i for j in range(math.ceil(len(prompts) / world)) for i in [min(j * world + rank, len(prompts) - 1)]]
    sampler = dataclasses.replace(
        config, num_steps=config.eval_num_steps, solver="euler", compress=1.0, group_noise="independent"
    )  # fmt: skip
    videos, found, error = [], [], None
    with state.ema_weights():
        for start in range(0, len(mine), config.micro_batch):
            rows = mine[start : start + config.micro_batch]
            noise = torch.stack([torch.randn(policy.latent_shape, generator=generator("eval", i)) for i in rows])
            no_step = torch.zeros(len(rows), config.eval_num_steps, dtype=torch.bool)
            texts = [prompts[i]["prompt"] for i in rows]
            done = rollout(policy, sampler, texts, noise.to(policy.device), no_step, [()] * len(rows))
            videos += list(policy.decode(done.latents))
    policy.nfe = nfe  # a run's cost is that of its training
    try:
        scores = reward(torch.stack(videos), [prompts[i]["prompt"] for i in mine], [prompts[i] for i in mine])
        found = [(i, row) for i, row in zip(mine, scores.tolist())]
    except RewardError as failure:
        error = failure
    target = folder / "videos" / f"{state.update:06d}"
    shown = [(i, video) for i, video in zip(mine, videos) if i < config.eval_videos]
    if shown:
        target.mkdir(parents=True, exist_ok=True)
        for i, video in shown:
            write_video(target / f"{i:03d}.mp4", video, config.fps)
    gathered = gather_objects((found, str(error) if error else None, float(torch.stack(videos).float().std())))
    raise_together(error, [e for _, e, _ in gathered])
    by_prompt = dict(pair for part, _, _ in gathered for pair in part)
    scores = torch.tensor([by_prompt[i] for i in range(len(prompts))])
    if state.eval_start is None:
        parts = scores[:, : len(reward.parts)]
        std = parts.std(0) if len(parts) > 1 else torch.ones(parts.shape[1])
        state.eval_start = {"mean": parts.mean(0).tolist(), "std": std.tolist()}
    rewards = reward.mix(scores, tuple(torch.tensor(state.eval_start[k]) for k in ("mean", "std")))
    state.eval_start.setdefault("rewards", rewards.tolist())
    if rank == 0 and config.eval_videos:
        index = [
            {"file": f"{i:03d}.mp4", **prompts[i], "reward": rewards[i].item()}
            for i in range(min(len(prompts), config.eval_videos))
        ]
        target.mkdir(parents=True, exist_ok=True)
        write_atomically(target / "index.jsonl", "".join(json.dumps(row) + "\n" for row in index))
    extra = {f"eval/{name}": scores[:, i].mean().item() for i, name in enumerate(reward.names + reward.extra)}
    return {
        "eval_reward": rewards.mean().item(), "eval_ci": confidence(rewards.tolist()), "eval_rewards": rewards.tolist(),
        "eval_pixel_std": min(std for _, _, std in gathered), **(extra if len(extra) > 1 else {}),
    }  # fmt: skip


def confidence(values: list[float]) -> float:
    """Half-width of the 95 % interval of a mean, by Student's t."""
    n, z = len(values), 1.959964
    if n < 2:
        return math.nan
    # The quantile of t from the normal one (Cornish-Fisher), to 3 digits from 6 values on.
    t = z + (z**3 + z) / (4 * (n - 1)) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * (n - 1) ** 2)
    return t * float(torch.tensor(values).std()) / n**0.5


def raise_together(own: Exception | None, errors: list[str | None]) -> None:
    """Raise on every process if one failed: the failing one with its own error, the others with its text."""
    if own is not None:
        raise own
    for rank, error in enumerate(errors):
        if error:
            raise RewardError(f"on process {rank}: {error}")


def write_video(path: Path, video: Tensor, fps: int) -> None:
    """Write uint8 [T, H, W, 3] as mp4, small ones enlarged by nearest neighbour to about 256 pixels."""
    import imageio

    factor = max(1, 256 // max(video.shape[1:3]))
    frames = video.repeat_interleave(factor, 1).repeat_interleave(factor, 2).numpy()
    imageio.mimwrite(path, frames, fps=fps, macro_block_size=2, quality=9, output_params=["-loglevel", "error"])


def draw_pictures(folder: Path, history: list[dict], warning: str = "") -> None:
    """reward.png (training and held-out reward) and before_after.png (frames of the first and the last evaluation)."""
    import imageio.v3 as iio
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    matplotlib.rcParams["font.size"] = 11
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    trained = [m for m in history if "reward_mean" in m]
    tested = [m for m in history if "eval_reward" in m]
    axes.plot(
        [m["update"] for m in trained],
        [m["reward_mean"] for m in trained],
        lw=1,
        alpha=0.6,
        label="training videos (stochastic sampler)",
    )
    bars = [m["eval_reward"] for m in tested]
    axes.errorbar([m["update"] for m in tested], bars, [m["eval_ci"] for m in tested], marker="o", capsize=3,
                  label="held-out prompts (deterministic sampler, EMA weights), 95 % interval")  # fmt: skip
    axes.set(xlabel="update", ylabel="reward", title=warning or folder.name)
    axes.legend(loc="lower right", fontsize=9)
    axes.grid(alpha=0.3)
    figure.savefig(folder / "reward.png", dpi=130)
    first, last = (folder / "videos" / f"{m['update']:06d}" for m in (tested[0], tested[-1]))
    names = [name for name in sorted(p.name for p in first.glob("*.mp4"))[:8] if (last / name).exists()]
    if first == last or not names:
        return
    prompts = {row["file"]: row["prompt"] for row in map(json.loads, (first / "index.jsonl").read_text().splitlines())}
    figure = Figure(figsize=(12, 0.95 * len(names) + 0.5), layout="constrained")
    for row, name in enumerate(names):
        for side, source in enumerate((first, last)):
            frames = iio.imread(source / name)
            picked = frames[np.linspace(0, len(frames) - 1, 6).round().astype(int)]
            axes = figure.add_subplot(len(names), 2, 2 * row + side + 1)
            axes.imshow(np.concatenate(list(np.pad(picked, ((0, 0), (4, 4), (4, 4), (0, 0)), constant_values=80)), 1))
            axes.set(xticks=[], yticks=[])
            axes.set_title((["before", "after"][side] if row == 0 else ""), fontsize=11)
            if side == 0:
                axes.set_ylabel(
                    "\n".join(re.findall(r".{1,18}(?:\s|$)", prompts[name])[:3]),
                    fontsize=7,
                    rotation=0,
                    ha="right",
                    va="center",
                )
    figure.savefig(folder / "before_after.png", dpi=110)


# ======================================================================================================================
# Training
# ======================================================================================================================


def collect(state: State, config: Config, reward: Reward, prompts: list[dict], rank: int, world: int, phases: dict):
    """Roll out this process's share of an update's videos and score them, in the background while the next are made.

    Returns the joined Rollout, this process's scores [b, columns] (NaN where the reward failed) and its RewardError or None.
    """
    from concurrent.futures import ThreadPoolExecutor

    policy, update, size = state.policy, state.update, config.group_size
    count = config.prompts_per_update * size // world
    sde_mask, train_mask = draw_masks(config, update)
    drawn = draw_prompts(config, prompts, update)
    batch = max(config.micro_batch // size, 1) * size  # whole groups, so that a shared prefix is computed once
    parts, jobs, error = [], [], None

    def score(videos, texts, items):
        started = time.perf_counter()
        return reward(videos, texts, items), time.perf_counter() - started

    with ThreadPoolExecutor(1) as background:
        for start in range(rank * count, (rank + 1) * count, batch):
            videos = list(range(start, min(start + batch, (rank + 1) * count)))
            items = [drawn[i] for i in videos]
            texts = [item["prompt"] for item in items]
            # With shared noise the videos of a group start from one latent; without, each from its own.
            keys = [
                (config.seed, "noise", update, *((i // size,) if config.group_noise == "shared" else divmod(i, size)))
                for i in videos
            ]
            noise = torch.stack([torch.randn(policy.latent_shape, generator=generator(*key)) for key in keys])
            with timed(phases, "seconds_rollout", policy.device):
                steps = [(config.seed, "step", update, *divmod(i, size)) for i in videos]
                groups = [i // size for i in videos]
                part = rollout(
                    policy, config, texts, noise.to(policy.device), sde_mask[videos], steps, train_mask[videos], groups
                )  # fmt: skip
            with timed(phases, "seconds_decode", policy.device):
                pixels = policy.decode(part.latents)
            jobs.append(background.submit(score, pixels, texts, items))
            parts.append(part)
        scores = []
        with timed(phases, "seconds_reward", policy.device):  # what the rollouts did not hide
            for job, part in zip(jobs, parts):
                try:
                    values, seconds = job.result()
                    phases["seconds_reward_total"] = phases.get("seconds_reward_total", 0.0) + seconds
                except RewardError as failure:
                    error = error or failure
                    values = torch.full((len(part.latents), len(reward.names + reward.extra)), math.nan)
                scores.append(values)
    return Rollout.cat(parts), torch.cat(scores), error


def learn(
    state: State,
    config: Config,
    rolled: Rollout,
    prompts: list[str],
    advantages: Tensor,
    weights: Tensor,
    total: int,
    world: int,
) -> dict:
    """One optimizer step on this process's transitions of the global batch; returns the step's metrics.

    Args: prompts [b] and advantages [b] of its videos; weights [b, N] of their steps, mean 1 over the global batch; total,
    the global batch's number of transitions. A non-finite gradient skips the step, on all processes alike.
    """
    policy, device = state.policy, state.policy.device
    parameters = list(policy.trained.values())
    sigmas = make_sigmas(config.num_steps, config.flow_shift)
    sums = torch.zeros(3)  # loss, clip_fraction, KL, summed over transitions
    deviation = torch.zeros(())
    batches = micro_batches(len(rolled.states), config.micro_batch, policy)
    order = torch.argsort(rolled.state, stable=True)
    for j, batch in enumerate(batches):
        for expert in policy.experts if policy.mesh is not None else []:
            # Whole weights sharded over processes must be reduced each time, or the full gradient would stand on each.
            last = j == len(batches) - 1
            expert.set_requires_gradient_sync(last or (config.full and policy.mesh.size(1) > 1))
        rows = order[torch.isin(rolled.state[order], torch.tensor(batch, dtype=torch.long))]
        at = rolled.state[rows] - (batch[0] if batch else 0)
        start = {int(s): int(r) for s, r in zip(rolled.state[rows], rows)}  # any one transition that leaves this state
        x, texts = rolled.states[batch], [prompts[rolled.video[start[s]]] for s in batch]
        sigma = sigmas[[int(rolled.step[start[s]]) for s in batch]]
        v = policy.velocity(x, sigma, texts)
        step = (sigmas[rolled.step[rows]], sigmas[rolled.step[rows] + 1], sigmas[1], config.sde, config.eta)
        if not len(rows):
            v.sum().backward()
            continue
        mean, std, _ = sde_step(x[at], v[at], *step)
        log_prob = gaussian_log_prob(rolled.x_next[rows], mean, std)
        a, w = advantages[rolled.video[rows]].to(device), weights[rolled.video[rows], rolled.step[rows]].to(device)
        loss, stats = grpo_loss(log_prob, rolled.log_prob[rows], a, w, config.clip_range)
        kl = torch.zeros((), device=device)
        if config.kl:  # closed form: both Gaussians have the same std
            with torch.no_grad(), policy.reference():
                reference, _, _ = sde_step(x[at], policy.velocity(x, sigma, texts)[at], *step)
            kl = ((mean - reference) ** 2 / (2 * std**2)).flatten(1).mean(1).mean()
        # FSDP averages gradients over the processes; the loss is a mean over the global batch, so undo that average.
        ((loss + config.kl * kl) * len(rows) / total * world).backward()
        sums += len(rows) * torch.stack([loss.detach(), stats["clip_fraction"], kl.detach()]).cpu()
        deviation = torch.maximum(deviation, stats["ratio_dev_max"].cpu())
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if math.isfinite(norm):
        state.optimizer.step()
        state.bad_updates = 0
    else:
        state.bad_updates += 1
    state.optimizer.zero_grad()
    loss, clip_fraction, kl = (sums / total).tolist()
    return dict(loss=loss, clip_fraction=clip_fraction, kl=kl, grad_norm=norm, ratio_dev_max=deviation.item())


def adam_eps_share(optimizer: torch.optim.Optimizer) -> float:
    """The share of Adam's denominator that epsilon takes, averaged over this process's trained numbers: 1 = throttled.

    Log-probabilities are averaged over the latent (two million numbers for Wan), so gradients are tiny: with PyTorch's
    usual 1e-8 this share can approach 1, and Adam becomes slow SGD. Hence --adam_eps 1e-15.
    """
    group, shares = optimizer.param_groups[0], []
    for p, moments in optimizer.state.items():
        seen = float(moments["step"])
        root = (local_slice(moments["exp_avg_sq"])[0] / (1 - group["betas"][1] ** max(seen, 1))).sqrt()
        moved = root[root > 0]  # LoRA's A has no gradient while B is 0
        shares.append(group["eps"] / (moved + group["eps"]))
    shares = torch.cat([s.flatten() for s in shares])
    return shares.mean().item() if len(shares) else math.nan


def step_moving_average(state: State, config: Config) -> None:
    """EMA of the trained weights with a warm-up, so that a short run does not average in its start for long."""
    decay = min(config.ema_decay, (1 + state.ema_steps) / (10 + state.ema_steps))
    state.ema_steps += 1
    for name, p in state.policy.trained.items():
        local_slice(state.ema[name])[0].lerp_(local_slice(p.detach())[0], 1 - decay)


@contextmanager
def timed(phases: dict, name: str, device: torch.device):
    """Add the seconds spent inside to phases[name]; waits for the GPU, so that work counts where it was asked for."""
    started = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize()
    phases[name] = phases.get(name, 0.0) + time.perf_counter() - started


def train(config: Config, progress: bool = True) -> list[dict]:
    """Train as the Config says and return the history: metrics.jsonl as a list, one dict an update and an evaluation.

    Writes output_dir/run_name/ (config.json, metrics.jsonl, reward.png, videos/, checkpoints/, lora/). Unset fields of the
    Config are filled and checked first. Raises UserError for wrong settings, RewardError for a reward that fails.
    """
    from datetime import timedelta

    from accelerate import Accelerator, InitProcessGroupKwargs
    from tqdm import tqdm

    config = fill(config)
    validate(config, int(os.environ.get("WORLD_SIZE", 1)))
    folder = Path(config.output_dir) / config.run_name
    trackers = None if config.tracker == "none" else config.tracker
    waiting = InitProcessGroupKwargs(timeout=timedelta(seconds=config.timeout))
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision="no", log_with=trackers, project_dir=folder, kwargs_handlers=[waiting]
    )  # fmt: skip
    rank, world, is_main, device = (
        accelerator.process_index,
        accelerator.num_processes,
        accelerator.is_main_process,
        accelerator.device,
    )
    say = print if is_main and progress else (lambda *_: None)
    mesh = None
    if world > 1:
        from torch.distributed.device_mesh import init_device_mesh

        shard = shard_size_of(config, world)
        mesh = init_device_mesh(device.type, (world // shard, shard), mesh_dim_names=("replicate", "shard"))

    prompts, held_out = (
        load_prompts(config.prompts, "prompts", config),
        load_prompts(config.eval_prompts, "eval_prompts", config),
    )
    reward = Reward(config, device)
    reward.check(config)
    policy = WanPolicy(config, device, mesh)
    policy.encode([p["prompt"] for p in prompts + held_out], accelerator.is_local_main_process, wait_for_all)
    state = State.new(policy, config)
    say(describe(config, world, policy))

    # Begin, or continue where the newest whole checkpoint stands.
    folder.mkdir(parents=True, exist_ok=True)
    history, found = [], newest_checkpoint(folder) if config.resume else None
    if found:
        load_checkpoint(state, config, *found)
        history = [m for m in map(json.loads, read_lines(folder / "metrics.jsonl")) if m["update"] <= state.update]
        say(f"resuming at update {state.update} from {found[0]}")
    elif is_main:
        write_atomically(folder / "config.json", json.dumps(asdict(config) | versions(), indent=1))
    if is_main:
        write_atomically(folder / "metrics.jsonl", "".join(json.dumps(m) + "\n" for m in history))
    if trackers:
        accelerator.init_trackers("logs", config={k: v for k, v in settings(config).items() if v is not None})

    def log(metrics: dict) -> None:
        history.append(metrics)
        if is_main:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(metrics) + "\n")
            accelerator.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, step=metrics["update"])

    def test() -> None:
        if not any("eval_reward" in m and m["update"] == state.update for m in history):
            started = time.perf_counter()
            result = evaluate(state, config, reward, held_out, folder, rank, world)
            log({"update": state.update, "nfe": state.nfe} | result | {"seconds_eval": time.perf_counter() - started})
            warning = collapse(history)
            if is_main:
                draw_pictures(folder, history, warning)
            if warning:
                say(f"warning: {warning}")

    stopping = []
    previous = signal.signal(signal.SIGTERM, lambda *_: stopping.append(True)) if config.run_name else None
    goal = config.max_nfe or config.num_updates
    bar = tqdm(
        total=goal,
        initial=min(goal, state.nfe if config.max_nfe else state.update),
        disable=not (is_main and progress),
        unit=" nfe" if config.max_nfe else " updates",
        dynamic_ncols=True,
    )
    try:
        state.check_replicas()
        test()
        while (state.nfe < config.max_nfe) if config.max_nfe else (state.update < config.num_updates):
            # 1. Videos of the current policy, and their rewards.
            started, phases, update, nfe = time.perf_counter(), {}, state.update, policy.nfe
            rolled, scores, error = collect(state, config, reward, prompts, rank, world, phases)
            gathered = gather_objects((scores.tolist(), str(error) if error else None, bool(stopping)))
            if config.reward_on_error == "stop":
                raise_together(error, [e for _, e, _ in gathered])
            if any(stop for _, _, stop in gathered):
                say(f"SIGTERM: stopping at update {state.update}; --resume continues")
                break
            # 2. Advantages within each prompt's group; groups that lost a reward are left out.
            scores = torch.tensor([row for part, _, _ in gathered for row in part]).reshape(
                -1, len(reward.names + reward.extra)
            )
            group = torch.arange(len(scores)) // config.group_size
            failed = scores.isnan().any(1).view(-1, config.group_size).any(1)
            kept = ~failed[group]
            if not kept.any():
                raise RewardError(
                    f"the reward failed for every group of update {update}: {[e for _, e, _ in gathered if e][:1]}"
                )
            rewards = reward.mix(scores[kept])
            advantages = torch.zeros(len(scores))
            advantages[kept] = group_advantages(rewards, group[kept], config.adv_std)
            # 3. Weights: the gradient scale of each trained step, divided out; mean 1 over the global batch.
            train_mask = draw_masks(config, update)[1] & kept[:, None]
            weights, total = torch.zeros(train_mask.shape), int(train_mask.sum())
            scale = grad_scales(config)[train_mask.nonzero()[:, 1]]
            weights[train_mask] = rectification_weights(scale) if config.rectify else torch.ones(total)
            # 4. The loss and the step.
            mine = slice(rank * len(scores) // world, (rank + 1) * len(scores) // world)
            texts = [item["prompt"] for item in draw_prompts(config, prompts, update)[mine]]
            first_pass = None
            with timed(phases, "seconds_train", device):
                for epoch in range(config.ppo_epochs):
                    stats = learn(state, config, rolled, texts, advantages[mine], weights[mine], total, world)
                    first_pass = stats if epoch == 0 else first_pass
            state.update += 1
            if state.update % config.ema_every == 0:
                step_moving_average(state, config)
            # 5. What happened.
            reduced = gather_objects(
                (policy.nfe - nfe, stats["loss"], stats["clip_fraction"], stats["kl"], first_pass["ratio_dev_max"])
            )
            state.nfe += sum(r[0] for r in reduced)
            spread = scores[kept].view(-1, config.group_size, scores.shape[1])[:, :, 0]
            metrics = {
                "update": state.update, "nfe": state.nfe, "reward_mean": rewards.mean().item(), "reward_std": rewards.std().item(),
                "loss": sum(r[1] for r in reduced), "grad_norm": stats["grad_norm"],
                "ratio_dev_max": max(r[4] for r in reduced), "clip_fraction": sum(r[2] for r in reduced),
                "zero_std_groups": int((spread == spread[:, :1]).all(1).sum()), "dropped_groups": int(failed.sum()),
                "bad_updates": state.bad_updates, "adam_eps_share": adam_eps_share(state.optimizer),
                "seconds": time.perf_counter() - started, **phases,
            }  # fmt: skip
            if config.kl:
                metrics["kl"] = sum(r[3] for r in reduced)
            if len(reward.names + reward.extra) > 1:
                metrics |= {
                    f"reward/{name}": scores[kept][:, i].mean().item()
                    for i, name in enumerate(reward.names + reward.extra)
                }
            log(metrics)
            if update == 0 and metrics["ratio_dev_max"] > config.clip_range:
                say(RATIO_WARNING.format(metrics["ratio_dev_max"], config.clip_range))
            bar.update(min(goal, state.nfe if config.max_nfe else state.update) - bar.n)
            bar.set_postfix(
                reward=f"{metrics['reward_mean']:.3f}",
                loss=f"{metrics['loss']:.4f}",
                grad=f"{metrics['grad_norm']:.1e}",
            )
            if state.bad_updates >= config.max_bad_updates:
                raise RuntimeError(
                    f"{state.bad_updates} updates in a row had a non-finite gradient; the checkpoint is kept"
                )
            if config.eval_every and state.update % config.eval_every == 0:
                test()
            if config.save_every and state.update % config.save_every == 0:
                save_checkpoint(state, config, folder, is_main)
        else:
            test()
        save_checkpoint(state, config, folder, is_main)
    except (RewardError, RuntimeError):
        if not isinstance(
            sys.exc_info()[1], torch.distributed.DistError
        ):  # a dead peer cannot take part in a checkpoint
            save_checkpoint(state, config, folder, is_main)
        raise
    finally:
        bar.close()
        signal.signal(signal.SIGTERM, previous)
        if trackers:
            accelerator.end_training()
    say(summary(history, folder))
    return history


RATIO_WARNING = """\
warning: ratio_dev_max is {:.1e} on the very first pass, above the clip range {:g}. The rollout's and the training pass's
log-probabilities differ by rounding alone, so PPO clips gradients that are on-policy and much of the batch teaches nothing.
Use --dtype fp32, a larger --clip_range, or the same --micro_batch shape in both."""


def grad_scales(config: Config) -> Tensor:
    """lambda of every step of the schedule, float64 [N] (infinite where a step has no noise)."""
    sigmas = make_sigmas(config.num_steps, config.flow_shift)
    _, b, std = sde_coefficients(sigmas[:-1], sigmas[1:], sigmas[1].expand(config.num_steps), config.sde, config.eta)
    return b.abs() / std


def draw_prompts(config: Config, prompts: list[dict], update: int) -> list[dict]:
    """The prompt of each video of an update's global batch: a fresh shuffle of the list, group_size times each."""
    order = torch.randperm(len(prompts), generator=generator(config.seed, "prompts", update)).tolist()
    return [
        prompts[order[slot % len(order)]] for slot in range(config.prompts_per_update) for _ in range(config.group_size)
    ]


def collapse(history: list[dict]) -> str:
    """A warning if training destroys what it should improve, else an empty text."""
    tests = [m for m in history if "eval_reward" in m]
    worse = [m["eval_reward"] < tests[0]["eval_reward"] for m in tests[1:]]
    if len(worse) >= 3 and all(worse[-3:]):
        return "collapse? held-out reward was below its start in the last three evaluations; try a smaller --lr"
    if tests[-1]["eval_pixel_std"] < 0.1 * tests[0]["eval_pixel_std"]:
        return "collapse? the videos' pixels hardly vary any more; try a smaller --lr or --kl"
    return ""


def summary(history: list[dict], folder: Path) -> str:
    """The table at the end of a run."""
    tests, updates = [m for m in history if "eval_reward" in m], [m for m in history if "reward_mean" in m]
    first, last = tests[0], tests[-1]
    gain = [b - a for a, b in zip(first["eval_rewards"], last["eval_rewards"])]
    rows = [
        ("held-out reward before", f"{first['eval_reward']:.3f} +- {first['eval_ci']:.3f}"),
        (f"held-out reward after {last['update']} updates", f"{last['eval_reward']:.3f} +- {last['eval_ci']:.3f}"),
        ("gain, prompt by prompt", f"{sum(gain) / len(gain):.3f} +- {confidence(gain):.3f}   (95 % interval over {len(gain)} prompts)"),
        ("transformer evaluations", f"{last['nfe']:,}"),
    ]  # fmt: skip
    for name in ("seconds_rollout", "seconds_decode", "seconds_reward", "seconds_train", "seconds"):
        rows.append(
            (
                name.replace("_", " in ") if "_" in name else "seconds in all updates",
                f"{sum(m[name] for m in updates):.1f}",
            )
        )
    rows.append(("files", f"{folder}/  (reward.png, before_after.png, videos/, lora/, metrics.jsonl)"))
    return "\n" + "\n".join(f"{name:<34} {value}" for name, value in rows)


def versions() -> dict:
    """What a run was made with: packages, and the commit of this file where it is under git."""
    import subprocess
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "diffusers", "transformers", "accelerate", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    here = Path(__file__).resolve().parent
    commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {"versions": found, "python": sys.version.split()[0], "commit": commit or None}


def read_lines(path: Path) -> list[str]:
    """The whole lines of a file that a killed process may have left in the middle of one; none if it is missing."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


# ======================================================================================================================
# The plan and the cost
# ======================================================================================================================


def forward_flops(arch: dict, latent_shape: tuple[int, ...], text_length: int = 512) -> float:
    """FLOPs of one Wan forward pass of one video (2 per multiply-add), from the architecture.

    Per token and layer: 4 d^2 self-attention projections, 2 d^2 of cross-attention, 2 d f feed-forward, and 2 L d (L tokens) +
    2 S d (S text tokens) attention; the text's keys and values, the embeddings and the output projection beside it.
    """
    arch = dict(patch_size=(1, 2, 2), in_channels=16, out_channels=16, text_dim=4096, freq_dim=256) | dict(arch)
    d, f, layers = arch["num_attention_heads"] * arch["attention_head_dim"], arch["ffn_dim"], arch["num_layers"]
    patch = math.prod(arch["patch_size"])
    tokens = math.prod(n // p for n, p in zip(latent_shape[1:], arch["patch_size"]))
    block = tokens * (6 * d * d + 2 * d * f + 2 * tokens * d + 2 * text_length * d) + 2 * text_length * d * d
    ends = tokens * patch * d * (arch["in_channels"] + arch["out_channels"])
    text_and_time = text_length * (arch["text_dim"] * d + d * d) + arch["freq_dim"] * d + d * d + 6 * d * d
    return 2.0 * (layers * block + ends + text_and_time)


def parameter_count(arch: dict) -> int:
    """Parameters of a Wan transformer, counted on the meta device."""
    from accelerate import init_empty_weights
    from diffusers import WanTransformer3DModel

    with init_empty_weights():
        return sum(p.numel() for p in WanTransformer3DModel.from_config(arch).parameters())


def cost_plan(config: Config, num_gpus: int, peak: float = 989e12, share: float = 0.4) -> dict:
    """What a run would take: evaluations, FLOPs, GPU-hours, and bytes per GPU for weights, gradients and optimizer.

    Args: config (a preset); num_gpus; peak FLOP/s of a GPU (bf16, H100 or H200) and the share of it that is reached.
    Processes beyond one per video have nothing to do, which bounds the speed-up.
    """
    config = fill(config)
    arch = ARCHITECTURES.get(config.model, {})
    experts = 2 if config.model == "wan2.2-a14b" else 1
    space, frames = {"tiny": (1, 1), "wan2.2-5b": (16, 4)}.get(config.model, (8, 4))
    latent = (
        arch.get("in_channels", 16),
        (config.num_frames - 1) // frames + 1,
        config.height // space,
        config.width // space,
    )
    flops, count = forward_flops(arch, latent, 5 if config.model == "tiny" else 512), parameter_count(arch) * experts
    d = arch["num_attention_heads"] * arch["attention_head_dim"]
    trained = count if config.full else 2 * 4 * 2 * d * config.lora_rank * arch["num_layers"] * experts
    shard = min(config.shard_size or min(num_gpus, 8), num_gpus)
    videos, nfe = config.prompts_per_update * config.group_size, evaluations(config)
    weights = (4 if config.full or config.dtype == "fp32" else 2) * count / shard
    busy = min(num_gpus, videos)
    hours = nfe * flops / (peak * share) / 3600
    return dict(
        num_gpus=num_gpus, shard_size=shard, replicas=num_gpus // shard, latent_shape=latent,
        tokens=math.prod(n // p for n, p in zip(latent[1:], arch.get("patch_size", (1, 2, 2)))), parameters=count, trained=trained,
        forward_flops=flops, nfe_per_update=nfe, weight_bytes=weights, gradient_bytes=4 * trained / shard,
        optimizer_bytes=12 * trained / shard, busy_gpus=busy, gpu_hours_per_update=hours, hours_per_update=hours / busy,
        gpu_hours=hours * config.num_updates, gathered_bytes_per_forward=(shard - 1) * weights,
    )  # fmt: skip


def describe(config: Config, num_gpus: int, policy: WanPolicy | None = None) -> str:
    """The settings that were filled in and the plan, as printed at the start of a run and by --dry_run."""
    filled = "  ".join(
        f"{k}={v}" for k, v in asdict(config).items() if v is not None and k not in ("dry_run", "host", "port")
    )
    lines = [f"settings: {filled}", f"flow shift {config.flow_shift:g} for {config.height} x {config.width} pixels"]
    if config.model in ARCHITECTURES:
        plan = cost_plan(config, num_gpus)
        lines += [
            f"mesh: {plan['replicas']} replicas x {plan['shard_size']} shards; {plan['parameters']:,} parameters, {plan['trained']:,} trained",
            "bytes per process: weights {weight_bytes:.3g}, gradients {gradient_bytes:.3g}, optimizer and EMA {optimizer_bytes:.3g}".format(
                **plan
            ),
            "an update: {nfe_per_update:,} transformer evaluations of {forward_flops:.3g} FLOPs ({tokens:,} tokens)".format(
                **plan
            ),
        ]
        if config.dry_run:
            lines.append(
                "at 40 % of 989 TFLOP/s: {gpu_hours_per_update:.3g} GPU-hours an update, {gpu_hours:.3g} a run; "
                "{hours_per_update:.3g} hours an update on {num_gpus} GPUs, {busy_gpus} of them busy".format(**plan)
            )
    return "\n".join(lines)


def bench(config: Config) -> None:
    """Train a few updates and print where their seconds went, and the share outside transformer, decoder and reward."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(
            config, output_dir=folder, num_updates=6, eval_every=0, eval_videos=0, tracker="none"
        )
        updates = [m for m in train(config, progress=False) if "reward_mean" in m][1:]
    mean = {key: sum(m[key] for m in updates) / len(updates) for key in updates[0] if key.startswith("seconds")}
    for name, seconds in mean.items():
        print(f"{name:<22} {seconds:8.3f} s  {seconds / mean['seconds']:6.1%}")
    outside = mean["seconds"] - mean["seconds_transformer"] - mean["seconds_decode"] - mean["seconds_reward"]
    print(f"{'outside transformer, decoder and reward':<40} {outside / mean['seconds']:6.1%}")


def main(job: str, config: Config) -> int:
    """Run a parsed command line; returns the exit code."""
    try:
        if job == "serve":
            serve(config)
        elif job == "bench":
            bench(config)
        elif config.dry_run:
            print(describe(config, config.num_gpus or int(os.environ.get("WORLD_SIZE", 1))))
        else:
            train(config)
    except UserError as error:
        print(f"flash_grpo.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(JOB, CONFIG))
