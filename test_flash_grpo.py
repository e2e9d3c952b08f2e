"""Tests of flash_grpo.py, on the CPU: closed forms for the algorithm, the tiny model for everything that runs.

OMP_NUM_THREADS=1 python -m pytest -q test_flash_grpo.py
"""

import ast
import builtins
import contextlib
import json
import math
import multiprocessing
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import venv
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import hypothesis
import imageio.v3 as imageio
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from hypothesis import assume, given, strategies
from packaging.requirements import Requirement
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    PreTrainedTokenizerFast,
)

import flash_grpo as fg

SCRIPT = Path(__file__).parent / "flash_grpo.py"
KINDS = ["wan", "flow", "dance", "cps"]
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.load_profile("repeatable")
F64 = torch.float64


def run_script(*arguments, python=(), **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *python, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


# ==== Schedule and stochastic step ====================================================================================

# The reciprocals of lambda that the authors' training script lists for the first ten of 20 steps, and the noise levels
# they come from (UniPC of diffusers 0.33, flow shift 3); below, the same formula on the levels of diffusers 0.42.1.
# fmt: off
SIGMAS_033 = [
    0.9996664442961973, 0.9824195162347744, 0.963941104996069, 0.944094429826187, 0.9227216748768474,
    0.8996397838703222, 0.8746352038689236, 0.8474572584504284, 0.817809714389667, 0.785339939968555,
    0.7496248124062032,
]
PUBLISHED = [7.477, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
INVERSE_042 = [7.4887, 7.0526, 6.6221, 6.1973, 5.7785, 5.3659, 4.9599, 4.5607, 4.1687, 3.7842]
# fmt: on


def inverse_lambda(sigmas):
    x = torch.zeros(10, 1, 1, 1, 1, dtype=F64)
    return 1 / fg.sde_step(x, x, sigmas[:10], sigmas[1:11], sigmas[1], "wan")[2].flatten()


def test_published_rectification_constants():
    found = inverse_lambda(torch.tensor(SIGMAS_033, dtype=F64))
    assert (found - torch.tensor(PUBLISHED, dtype=F64)).abs().max() < 1e-4


def test_rectification_constants_of_the_installed_diffusers():
    scheduler = UniPCMultistepScheduler(flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction")
    scheduler.set_timesteps(20)
    assert (inverse_lambda(scheduler.sigmas.double()) - torch.tensor(INVERSE_042, dtype=F64)).abs().max() < 1e-4


def test_sigmas_closed_form():
    assert torch.equal(fg.make_sigmas(4, 1.0), torch.tensor([1, 0.75, 0.5, 0.25, 0], dtype=F64))
    assert fg.make_sigmas(4, 3.0).tolist() == pytest.approx([1, 0.9, 0.75, 0.5, 0], rel=1e-15)
    for wrong in ((0, 3.0), (4, 0.0), (4, math.nan)):
        with pytest.raises(ValueError):
            fg.make_sigmas(*wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_grad_scale_is_the_norm_of_the_policy_gradient(kind, where):
    """lambda = |d log p / d v| / |z| at the x' = mean + std z that was drawn."""
    k = {"first": 0, "middle": 5, "last": 8 if kind == "cps" else 9}[where]  # the last step of cps has no noise
    sigmas = fg.make_sigmas(10, 3.0)
    x, v, z = torch.randn(3, 1, 3, 2, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(k))
    v.requires_grad_()
    mean, std, grad_scale = fg.sde_step(x, v, sigmas[k], sigmas[k + 1], sigmas[1], kind)
    log_prob = fg.gaussian_log_prob((mean + std * z).detach(), mean, std) * x.numel()
    (gradient,) = torch.autograd.grad(log_prob.sum(), v)
    assert (gradient.norm() / z.norm()).item() == pytest.approx(grad_scale.item(), rel=1e-9)


def test_log_prob_is_the_mean_normal_density():
    x, mean, std = torch.randn(2, 3, 2, 4, 4, dtype=F64), torch.zeros(1, dtype=F64), torch.tensor(0.3, dtype=F64)
    expected = torch.distributions.Normal(mean, std).log_prob(x).flatten(1).mean(1)
    torch.testing.assert_close(fg.gaussian_log_prob(x, mean, std), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "levels, kind", [((0.5, 0.5), "wan"), ((0.5, 0.6), "wan"), ((1.1, 0.5), "wan"), ((0.5, 0.0), "cps"), ((1, 0), "no")]
)
def test_impossible_steps_are_refused(levels, kind):
    x = torch.zeros(1, 1, 1, 1, 1)
    with pytest.raises(ValueError):
        fg.sde_step(x, x, *levels, 0.9, kind)


def test_a_wan_schedule_of_one_step_has_no_density():
    x = torch.zeros(1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="std 0"):
        fg.sde_step(x, x, 1.0, 0.0, 0.0, "wan")


def exact(sigma, m, c):
    """Mean and variance of (1 - sigma) x0 + sigma eps with x0 ~ N(m, c^2)."""
    return (1 - sigma) * m, (1 - sigma) ** 2 * c**2 + sigma**2


def velocity(x, sigma, m, c):
    """E[eps - x0 | x] for the same Gaussian."""
    mean, variance = exact(sigma, m, c)
    return -m + (sigma - (1 - sigma) * c**2) / variance * (x - mean)


def moments(sigmas, kind, m, c, eta=0.7):
    """Mean and variance after stochastic steps along sigmas, from the exact ones: each step is affine in x."""
    mean, variance = exact(sigmas[0], m, c)
    points = torch.tensor([0.0, 1.0], dtype=F64).view(2, 1, 1, 1, 1)
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        v = velocity(points, sigma, m, c)
        at, std, _ = fg.sde_step(points, v, sigma, sigma_next, sigmas[1], kind, eta)
        offset, slope = at[0].squeeze(), (at[1] - at[0]).squeeze()
        mean, variance = offset + slope * mean, slope**2 * variance + std.squeeze() ** 2
    return torch.stack([mean, variance])


# flow starts below 1: at 1 its noise level diverges, and a step there is large however small dt.
GRIDS = {
    "inside": lambda n: torch.linspace(0.95, 0.05, n + 1, dtype=F64),
    "whole": lambda n: fg.make_sigmas(n, 3.0),
}


@pytest.mark.parametrize(
    "kind, grid", [("wan", "inside"), ("flow", "inside"), ("dance", "inside"), ("wan", "whole"), ("dance", "whole")]
)
def test_stochastic_steps_keep_the_marginals(kind, grid):
    """The error of mean and variance against Gaussian data falls like 1 / N."""
    errors = []
    for n in (400, 800, 1600):
        sigmas = GRIDS[grid](n)
        errors.append((moments(sigmas, kind, 1.5, 0.6) - torch.stack(exact(sigmas[-1], 1.5, 0.6))).abs().max())
    first, second = errors[0] / errors[1], errors[1] / errors[2]
    assert 2 * second - first == pytest.approx(2, abs=0.05)  # the ratio's own 1 / N extrapolated away
    assert errors[-1] < 0.01


@pytest.mark.parametrize("n", [2, 5, 10])
def test_cps_is_exact_for_point_data(n):
    sigmas = fg.make_sigmas(n, 3.0)[:-1]
    expected = torch.stack(exact(sigmas[-1], 1.5, 0.0))
    torch.testing.assert_close(moments(sigmas, "cps", 1.5, 0.0), expected, rtol=1e-12, atol=0)


def test_cps_settles_off_the_marginal_for_spread_data():
    """With small steps cps has the variance V (1 + cos) / (2 - sigma^2 (1 - cos) / V), not V; 1 / N away from it."""
    m, c, eta, sigma = 1.5, 0.6, 0.7, 0.4
    _, v = exact(sigma, m, c)
    cos = math.cos(eta * math.pi / 2)
    limit = v * (1 + cos) / (2 - sigma**2 * (1 - cos) / v)
    sizes = (1000, 2000, 4000)
    found = [moments(torch.linspace(1, sigma, n + 1, dtype=F64), "cps", m, c, eta)[1].item() for n in sizes]
    errors = [abs(value - limit) for value in found]
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.05)
    assert errors[1] / errors[2] == pytest.approx(2, abs=0.05)
    assert errors[2] < 0.01 * abs(limit - v)


def test_solver_orders():
    """Along the flow of Gaussian data the error falls by 4 a doubling for dpm2, by 2 for Euler."""
    m, c, start = 1.5, 0.6, torch.full((1, 1, 1, 1, 1), 2.0, dtype=F64)

    def errors(second_order):
        found = []
        for n in (200, 400, 800):
            sigmas, x, x0_prev = torch.linspace(0.95, 0.05, n + 1, dtype=F64), start, None
            for k in range(n):
                x0 = x - sigmas[k] * velocity(x, sigmas[k], m, c)
                x = fg.dpm2_step(x, x0, x0_prev, sigmas[max(k - 1, 0)], sigmas[k], sigmas[k + 1])
                x0_prev = x0 if second_order else None
            (mean0, v0), (mean1, v1) = exact(sigmas[0], m, c), exact(sigmas[-1], m, c)
            found.append((x - mean1 - (start - mean0) * (v1 / v0).sqrt()).abs().item())
        return found

    for second_order, factor in ((True, 4), (False, 2)):
        first, middle, last = errors(second_order)
        assert first / middle == pytest.approx(factor, rel=0.05)
        assert middle / last == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize("levels", [(1.0, 0.9), (0.6, 0.5), (0.1, 0.0)])
def test_dpm2_without_history_is_euler(levels):
    x, v = torch.randn(2, 1, 3, 2, 4, 4, dtype=F64)
    sigma, sigma_next = torch.tensor(levels, dtype=F64)
    step = fg.dpm2_step(x, x - sigma * v, None, sigma, sigma, sigma_next)
    torch.testing.assert_close(step, x + (sigma_next - sigma) * v, rtol=1e-12, atol=1e-12)


# ==== Masks ===========================================================================================================


def test_iso_videos_of_a_prompt_share_their_step_and_prompts_do_not():
    mask = fg.draw_sde_mask(24, 4, 20, (0, 10)).view(24, 4, 20)
    assert (mask.sum(2) == 1).all() and not mask[..., 10:].any()
    assert (mask == mask[:, :1]).all()
    assert len(mask[:, 0].int().argmax(1).unique()) > 1
    later = fg.draw_sde_mask(24, 4, 20, (0, 10), update=1).view(24, 4, 20)
    seeded = fg.draw_sde_mask(24, 4, 20, (0, 10), seed=1).view(24, 4, 20)
    assert not torch.equal(mask, later) and not torch.equal(mask, seeded)


def test_random_grouping_differs_inside_a_group():
    mask = fg.draw_sde_mask(24, 4, 20, (0, 10), grouping="random").view(24, 4, 20)
    assert (mask.sum(2) == 1).all() and not (mask == mask[:, :1]).all()


def test_mask_is_a_pure_function():
    first = fg.draw_sde_mask(6, 4, 20, (2, 9), 2, update=3, seed=5)
    torch.rand(7)
    assert torch.equal(first, fg.draw_sde_mask(6, 4, 20, (2, 9), 2, update=3, seed=5))


@pytest.mark.parametrize("grouping", ["iso", "random"])
def test_steps_are_drawn_uniformly_from_the_window(grouping):
    """Chi-squared of 6000 draws of 5 steps against its 99.9 % quantile for 4 degrees of freedom."""
    drawn = [fg.draw_sde_mask(500, 2, 10, (1, 6), grouping=grouping, update=u) for u in range(12)]
    counts = torch.cat([mask[::2] for mask in drawn]).sum(0).double()
    assert counts.sum() == 6000 and counts[0] == 0 and not counts[6:].any()
    assert ((counts[1:6] - 1200) ** 2 / 1200).sum() < 18.467


def masks(method, update=0):
    return fg.draw_masks(fg.fill(fg.Config(method=method)), update)  # the tiny model: 10 steps, 6 x 8 videos


@pytest.mark.parametrize("method", ["flash", "flash-shared"])
def test_flash_has_one_stochastic_step_in_the_first_half(method):
    sde, trained = masks(method)
    assert torch.equal(sde, trained) and (sde.sum(1) == 1).all() and not sde[:, 5:].any()


def test_flow_is_stochastic_and_trained_everywhere_but_the_last_step():
    sde, trained = masks("flow")
    assert torch.equal(sde, trained) and sde[:, :-1].all() and not sde[:, -1].any()


def test_dance_trains_sixty_percent_of_its_steps():
    sde, trained = masks("dance")
    assert sde[:, :-1].all() and not sde[:, -1].any()
    assert not (trained & ~sde).any() and (trained.sum(1) == 5).all()  # round(0.6 * 9)
    assert not (trained == trained[:1]).all() and not torch.equal(trained, masks("dance", 1)[1])


@pytest.mark.parametrize("method", ["mix", "mix-flash"])
@pytest.mark.parametrize("update, start", [(0, 0), (24, 0), (25, 1), (50, 2), (125, 5), (10_000, 5)])
def test_mix_moves_a_window_of_four_up_to_the_last_step_but_one(method, update, start):
    sde, trained = masks(method, update)
    expected = [start <= k < start + 4 for k in range(10)]
    assert torch.equal(sde, trained) and sde.tolist() == [expected] * 48


# ==== Advantages, weights, loss =======================================================================================


def test_advantages_by_hand():
    """Rewards 1 3 | 5 7: group means 2 and 6, deviations of 1; std sqrt(20/3) of the batch, sqrt(2) of a group."""
    rewards, groups = torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.tensor([0, 0, 1, 1])
    for std, scale in (("global", math.sqrt(20 / 3)), ("group", math.sqrt(2))):
        expected = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=F64) / (scale + 1e-4)
        assert torch.equal(fg.group_advantages(rewards, groups, std), expected.float())


def test_groups_are_places_and_not_texts():
    """A prompt drawn twice makes two groups, each with its own mean."""
    place = torch.arange(4) // 2  # as `train` numbers the videos of two slots
    advantages = fg.group_advantages(torch.tensor([0.0, 1.0, 10.0, 11.0]), place)
    assert advantages[:2].tolist() == advantages[2:].tolist() and advantages[0] == -advantages[1]


def test_equal_rewards_teach_nothing():
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 5.0, 7.0, 9.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    for std in ("global", "group"):
        assert fg.group_advantages(rewards, groups, std)[:3].tolist() == [0, 0, 0]
    assert fg.group_advantages(torch.full((4,), 0.1), torch.zeros(4, dtype=torch.long)).tolist() == [0] * 4


def test_advantages_are_clipped():
    rewards = torch.zeros(100)
    rewards[0] = 1.0
    found = fg.group_advantages(rewards, torch.zeros(100, dtype=torch.long))
    assert found[0] == 5 and found[1:].abs().max() < 5
    assert fg.group_advantages(-rewards, torch.zeros(100, dtype=torch.long))[0] == -5


@pytest.mark.parametrize(
    "rewards, groups, std",
    [
        ([0.0, math.nan], [0, 0], "global"),
        ([0.0, math.inf], [0, 0], "group"),
        ([0.0, 1.0], [0], "global"),
        ([[0.0, 1.0]], [[0, 0]], "global"),
        ([0.0, 1.0], [0, 0], "batch"),
    ],
)
def test_wrong_rewards_are_refused(rewards, groups, std):
    with pytest.raises(ValueError):
        fg.group_advantages(torch.tensor(rewards), torch.tensor(groups), std)


def test_weights_divide_the_gradient_scale_out():
    scales = fg.grad_scales(fg.fill(fg.Config(method="flash")))[:5]
    weights, eps = fg.rectification_weights(scales), torch.finfo(torch.float32).eps
    assert weights.double().mean().item() == pytest.approx(1, rel=eps)
    pull = weights.double() * scales
    assert pull.max() / pull.min() == pytest.approx(1, rel=2 * eps) and scales.max() > 1.1 * scales.min()


@pytest.mark.parametrize("kind", KINDS)
def test_grad_scales_are_those_of_the_steps(kind):
    config = fg.fill(fg.Config(method="flow", sde=kind))
    sigmas, x = fg.make_sigmas(10, 3.0), torch.zeros(9, 1, 1, 1, 1, dtype=F64)
    steps = fg.sde_step(x, x, sigmas[:9], sigmas[1:10], sigmas[1], kind, config.eta)[2].flatten()
    assert torch.equal(fg.grad_scales(config)[:9], steps)


def test_on_policy_loss_of_unit_advantages_is_minus_one():
    weights = fg.rectification_weights(torch.tensor([1.0, 1 / 3], dtype=F64))
    assert weights.tolist() == [0.5, 1.5]
    log_prob = torch.tensor([-0.7, 1.3], requires_grad=True)
    loss, stats = fg.grpo_loss(log_prob, log_prob.detach(), torch.ones(2), weights, 1e-3)
    loss.backward()
    assert loss.item() == -1 and log_prob.grad.tolist() == [-0.25, -0.75]
    assert stats["ratio_dev_max"] == 0 and stats["clip_fraction"] == 0


def test_flash_loss_by_hand():
    """lambda = 1/4, 1/2: w = 4/3, 2/3. rho = 1.01 twice, c = 0.001, A = 2, -1: min(2.02, 2.002), min(-1.01, -1.001)."""
    weights = fg.rectification_weights(torch.tensor([0.25, 0.5], dtype=F64)).double()
    old = torch.tensor([-1.0, 0.5], dtype=F64)
    advantages = torch.tensor([2.0, -1.0], dtype=F64)
    loss, stats = fg.grpo_loss(old + math.log(1.01), old, advantages, weights, 1e-3)
    assert loss.item() == pytest.approx(-(4 / 3 * 2.002 - 2 / 3 * 1.01) / 2, rel=1e-7)
    assert loss.item() == pytest.approx(-0.998, rel=1e-7)  # w is float32
    assert stats["ratio_dev_max"].item() == pytest.approx(0.01) and stats["clip_fraction"] == 1


# ==== Rollout =========================================================================================================


@pytest.fixture(scope="module")
def policy():
    policy = fg.WanPolicy(fg.fill(fg.Config(method="flash")), torch.device("cpu"))
    policy.encode(fg.TINY_PROMPTS)
    return policy


def roll(policy, config, rows=None):
    """An update's rollout of 2 prompts x 3 videos, a prompt's videos from one noise; and the evaluations it took."""
    config = replace(config, prompts_per_update=2, group_size=3)
    sde_mask, train_mask = fg.draw_masks(config, 0)
    rng = torch.Generator().manual_seed(3)
    noise = torch.randn(2, *policy.latent_shape, generator=rng).repeat_interleave(3, 0)
    prompts = [prompt for prompt in fg.TINY_PROMPTS[:2] for _ in range(3)]
    keys, before = [("test", i) for i in range(6)], policy.nfe
    rolled = fg.rollout(policy, config, prompts, noise, sde_mask, keys, train_mask, [0, 0, 0, 1, 1, 1])
    return rolled, policy.nfe - before


@pytest.mark.parametrize("method", list(fg.METHODS))
def test_shared_noise_is_the_same_computation_with_fewer_evaluations(policy, method):
    config = fg.fill(fg.Config(method=method))
    apart, nfe_apart = roll(policy, replace(config, group_noise="independent"))
    shared, nfe_shared = roll(policy, replace(config, group_noise="shared"))
    assert nfe_shared < nfe_apart and len(shared.states) <= len(apart.states)
    for name in ("latents", "x_next", "log_prob"):
        torch.testing.assert_close(getattr(shared, name), getattr(apart, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shared.states[shared.state], apart.states[apart.state], rtol=1e-5, atol=1e-5)
    assert torch.equal(shared.video, apart.video) and torch.equal(shared.step, apart.step)


@pytest.mark.parametrize("method", ["flash", "flash-shared", "mix"])
def test_fast_solver_leaves_the_trained_transitions_alone(policy, method):
    config = fg.fill(fg.Config(method=method))
    plain, nfe_plain = roll(policy, config)
    fast, nfe_fast = roll(policy, replace(config, solver="dpm2", compress=0.4))
    for name in ("states", "x_next", "log_prob", "state", "video", "step"):
        assert torch.equal(getattr(plain, name), getattr(fast, name)), name
    assert nfe_fast < nfe_plain and not torch.equal(plain.latents, fast.latents)


def test_rollout_log_prob_is_that_of_its_transitions(policy):
    """Evaluating the stored transition again gives the stored log-probability: rho starts at 1."""
    config = fg.fill(fg.Config(method="flash"))
    rolled, _ = roll(policy, config)
    sigmas = fg.make_sigmas(config.num_steps, config.flow_shift)
    x, sigma = rolled.states[rolled.state], sigmas[rolled.step]
    with torch.no_grad():
        v = policy.velocity(x, sigma, [fg.TINY_PROMPTS[i // 3] for i in rolled.video])
    mean, std, _ = fg.sde_step(x, v, sigma, sigmas[rolled.step + 1], sigmas[1], config.sde, config.eta)
    torch.testing.assert_close(fg.gaussian_log_prob(rolled.x_next, mean, std), rolled.log_prob, rtol=1e-5, atol=1e-5)


# ==== Training ========================================================================================================


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Settings of a run of seconds."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "held_out.txt").write_text("a red circle moving left\na blue square moving up\n")
    files = {"eval_prompts": str(folder / "held_out.txt"), "output_dir": str(folder)}
    return fg.Config(prompts_per_update=2, group_size=2, eval_num_steps=2, eval_videos=0, tracker="none", **files)


def untimed(history):
    return [{k: v for k, v in metrics.items() if not k.startswith("seconds")} for metrics in history]


VARIANTS = {method: {"method": method} for method in fg.METHODS} | {
    "guided, checkpointed": {"method": "flash", "guidance_scale": 2.0, "gradient_checkpointing": True},
    "kl, 2 epochs, random steps": {"method": "flash-shared", "kl": 0.1, "ppo_epochs": 2, "grouping": "random"},
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_an_update_takes_the_evaluations_of_the_formula_and_starts_on_policy(small, variant):
    config = fg.fill(replace(small, num_updates=1, run_name=f"variant {variant}", **VARIANTS[variant]))
    (update,) = [metrics for metrics in fg.train(config, progress=False) if "reward_mean" in metrics]
    assert update["nfe"] == fg.evaluations(config, 0)
    assert update["ratio_dev_max"] < 1e-6 and update["grad_norm"] > 0


def test_removing_a_part_of_flash_changes_that_part_alone(small):
    changes = {
        "flash": {},
        "weights": {"rectify": False},
        "steps": {"grouping": "random"},
        "noise": {"group_noise": "shared"},
    }
    found, masks = {}, {}
    for name, change in changes.items():
        config = replace(small, method="flash", num_updates=1, group_size=6, run_name=f"without {name}", **change)
        before, update, _ = untimed(fg.train(config, progress=False))
        found[name], masks[name] = (before, update), fg.draw_masks(fg.fill(config), 0)[0]
    assert all(before == found["flash"][0] for before, _ in found.values())  # one start, one evaluation
    # Without rectification: the very same videos and rewards; only what is learnt from them differs.
    learnt = ("loss", "grad_norm", "adam_eps_share")
    flash, unweighted = ({k: v for k, v in found[name][1].items() if k not in learnt} for name in ("flash", "weights"))
    assert flash == unweighted and found["flash"][1]["grad_norm"] != found["weights"][1]["grad_norm"]
    # Without iso-temporal grouping: other steps, as many, from the same window; the cost does not change.
    assert torch.equal(masks["flash"], masks["weights"]) and torch.equal(masks["flash"], masks["noise"])
    assert not torch.equal(masks["flash"], masks["steps"]) and found["steps"][1]["nfe"] == found["flash"][1]["nfe"]
    assert torch.equal(masks["steps"].sum(1), masks["flash"].sum(1)) and not masks["steps"][:, 5:].any()
    # With shared noise: the same steps, fewer evaluations.
    assert found["noise"][1]["nfe"] < found["flash"][1]["nfe"]


@pytest.fixture(scope="module")
def whole(small):
    """A run of 4 updates: its settings, its history and its folder."""
    config = replace(small, num_updates=4, eval_every=2, run_name="whole")
    return config, fg.train(config, progress=False), Path(small.output_dir) / "whole"


def test_same_seed_same_numbers(whole):
    config, history, _ = whole
    again = fg.train(replace(config, run_name="again"), progress=False)
    assert untimed(again) == untimed(history)
    other = fg.train(replace(config, run_name="other", seed=1), progress=False)
    assert untimed(other) != untimed(history)


def test_micro_batches_do_not_change_the_numbers_beyond_rounding(whole):
    config, history, _ = whole
    split = fg.train(replace(config, run_name="split", micro_batch=2, num_updates=1), progress=False)
    reference = [metrics for metrics in history if metrics["update"] <= 1]
    for name in ("reward_mean", "loss", "grad_norm", "nfe"):
        assert split[1][name] == pytest.approx(reference[1][name], rel=1e-3, abs=1e-6), name


def test_a_resumed_run_equals_one_that_never_stopped(whole):
    config, history, folder = whole
    half = replace(config, run_name="resumed", num_updates=2)
    fg.train(half, progress=False)
    resumed = fg.train(replace(half, num_updates=4, resume=True), progress=False)
    assert untimed(resumed) == untimed(history)
    lines = [json.loads(line) for line in (folder.parent / "resumed" / "metrics.jsonl").read_text().splitlines()]
    assert untimed(lines) == untimed(history)
    files = sorted((folder / "checkpoints" / "000004").glob("*.safetensors"))
    assert files
    for file in files:
        ours, theirs = load_file(folder.parent / "resumed" / "checkpoints" / "000004" / file.name), load_file(file)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_resume_refuses_other_settings(whole):
    with pytest.raises(fg.UserError, match="--lr 0.5: the run in .* has 0.0006"):
        fg.train(replace(whole[0], resume=True, lr=0.5), progress=False)


def test_the_script_leaves_a_whole_run(tmp_path):
    sizes = "--num_updates 2 --prompts_per_update 2 --group_size 2 --eval_videos 1"
    result = run_script(*sizes.split(), "--output_dir", tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = tmp_path.iterdir()
    for name in ("reward.png", "before_after.png", "lora/pytorch_lora_weights.safetensors"):
        assert (folder / name).stat().st_size > 0, name
    assert json.loads((folder / "config.json").read_text())["num_updates"] == 2
    updates = [json.loads(line)["update"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert updates == [0, 1, 2, 2]  # evaluation, two updates, evaluation
    assert imageio.imread(folder / "videos" / "000000" / "000.mp4").shape == (6, 256, 256, 3)
    assert (folder / "checkpoints" / "000002" / "state.json").exists()


# ==== Command line ====================================================================================================

BAD = """
--window 0:11 | --window 0:11: give start:stop inside the steps 0:10, such as 0:5
--window 3:3 | --window 3:3: give start:stop
--window 5:2 | --window 5:2: give start:stop
--window first | --window first: give start:stop
--sde cps --window 0:10 | --window 0:10: the last step of cps has std 0: stop at 9
--num_steps 1 | --num_steps 1: a wan SDE of a single step has std 0: take 2
--method mix --window 0:10 | --window 0:10: to move, it must end before the last step: stop at 9
--sde_steps 6 | --sde_steps 6: the window 0:5 has only 5 steps
--group_size 1 | --group_size 1: must be at least 2
--num_steps 0 | --num_steps 0: must be at least 1
--seed -1 | --seed -1: must be at least 0
--model wan13b | --model wan13b: choose one of tiny, wan1.3b, wan14b, wan2.2-5b, wan2.2-a14b, a folder or owner/name
--method flahs | --method flahs: choose one of flash, flash-shared, flow, dance, mix, mix-flash
--weights pretraind | --weights pretraind: choose one of pretrained, random
--dtype fp23 | --dtype fp23: choose one of bf16, fp32
--sde wam | --sde wam: choose one of wan, flow, dance, cps
--grouping iso-temporal | --grouping iso-temporal: choose one of iso, random
--group_noise share | --group_noise share: choose one of independent, shared
--solver dpm | --solver dpm: choose one of euler, dpm2
--adv_std globl | --adv_std globl: choose one of global, group
--reward_mix standardise | --reward_mix standardise: choose one of standardize, raw
--reward_on_error dropp | --reward_on_error dropp: choose one of stop, drop
--tracker wandbb | --tracker wandbb: choose one of tensorboard, wandb, none
--lr -1 | --lr -1.0: must be above 0
--lr nan | --lr nan: must be above 0
--lr inf | --lr inf: must be above 0
--lr fast | --lr: invalid float value: 'fast'
--lr | --lr: expected one argument
--seed 1.5 | --seed: invalid int value: '1.5'
--compress 0 | --compress 0.0: must be above 0 and at most 1
--train_fraction 2 | --train_fraction 2.0: must be above 0 and at most 1
--ema_decay 1.5 | --ema_decay 1.5: must be at least 0 and at most 1
--guidance_scale 0.5 | --guidance_scale 0.5: must be at least 1
--grup_size 4 | --grup_size: no such flag
--no_resum | --no_resum: no such flag
stray | stray: no such flag
--prompts none.txt | --prompts none.txt: cannot be read as UTF-8 text
--prompts latin.txt | --prompts latin.txt: cannot be read as UTF-8 text
--prompts . | --prompts .: cannot be read as UTF-8 text
--prompts empty.txt | --prompts empty.txt: holds no prompt; give one a line
--eval_prompts empty.txt | --eval_prompts empty.txt: holds no prompt; give one a line
--prompts broken.jsonl | --prompts broken.jsonl: line 2 must be a JSON object with a text "prompt"
--prompts number.jsonl | --prompts number.jsonl: line 1 must be a JSON object with a text "prompt"
--prompts purple.txt | --prompts purple.txt: line 1 must be like "a red circle moving left"
--height 17 | --height 17: the tiny model makes 6 frames of 16 x 16 pixels: 16
--model wan1.3b --height 17 | --height 17: must be 16 n, such as 32
--model wan1.3b --num_frames 80 | --num_frames 80: must be 4 n + 1, such as 81
--model wan2.2-5b --width 1296 | --width 1296: must be 32 n, such as 1312
--reward pallete | --reward pallete: choose of palette, motion, pickscore, clip
--reward palette:much | --reward palette:much: choose of palette
--reward http://host | --reward http://host: choose of palette
--port 70000 | --port 70000: must be at least 0 and at most 65535
--reward_timeout 0 | --reward_timeout 0: must be at least 1
--reward none.py:score | --reward none.py:score: there is no function score in a file none.py
--reward mine.py:points | --reward mine.py:points: there is no function points in a file mine.py
--run_name a/b | --run_name a/b: give a plain name; its parent is --output_dir
--run_name .. | --run_name ..: give a plain name
--run_name old | already holds a run; continue it with --resume or take another name
--run_name file | already holds a run
--kl 0.1 --full | --kl 0.1: needs an adapter to switch off for the reference: drop --full
--lora_targets , | --lora_targets ,: name at least one module
--prompts_per_update 3 --group_size 2 | --prompts_per_update 3: its videos do not divide over 4 processes: take a multiple of 2
--prompts_per_update 1 --group_size 2 | --prompts_per_update 1: its videos do not divide over 4 processes: take a multiple of 2
--shard_size 3 | --shard_size 3: must divide the 4 processes
"""  # noqa: E501


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with bad files in it, as the working directory of one of 4 processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    Path("latin.txt").write_bytes("a café".encode("latin-1"))
    Path("empty.txt").write_text("\n  \n")
    Path("broken.jsonl").write_text('{"prompt": "a red circle moving left"}\n{"prompt": \n')
    Path("number.jsonl").write_text('{"prompt": 3}\n')
    Path("purple.txt").write_text("a purple cow\n")
    Path("mine.py").write_text("def score(videos, prompts, metadata):\n    return [0.0] * len(prompts)\n")
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/metrics.jsonl").touch()
    Path("runs/file").touch()


def test_the_files_around_the_bad_ones_are_accepted(files):
    reward = "mine.py:score,motion:-0.5,http://a:1+http://b:2:0.5,clip@folder/model:2"
    job, config = fg.parse_args(f"--reward {reward} --run_name new --lr 1e-3 --no_full".split())
    assert (job, config.lr, config.full, config.method) == ("train", 1e-3, False, "flash-shared")
    parts = [("file", "mine.py:score", 1.0), ("motion", "", -0.5)]
    parts += [("http", "http://a:1+http://b:2", 0.5), ("clip", "folder/model", 2.0)]
    assert fg.parse_reward(config.reward) == parts


@pytest.mark.parametrize("case", BAD.strip().splitlines(), ids=lambda case: case.split(" | ")[0])
def test_a_wrong_command_line_is_one_line_of_help(files, capsys, case):
    """It names the flag, its value and what is accepted, and the exit code is 2."""
    arguments, message = case.split(" | ")
    with pytest.raises(SystemExit) as stopped:
        fg.parse_args(arguments.split())
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == ""
    assert err.startswith("flash_grpo.py: error: ") and message in err
    assert err.endswith("\n") and err.count("\n") == 1


def test_the_script_exits_with_two(tmp_path):
    result = run_script("--method", "flahs", cwd=tmp_path, timeout=30)
    assert result.returncode == 2 and result.stdout == "" and "choose one of flash," in result.stderr
    assert not list(tmp_path.iterdir())


def test_train_checks_the_settings_too(small):
    with pytest.raises(fg.UserError, match="--group_size 1: must be at least 2"):
        fg.train(replace(small, group_size=1), progress=False)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_prompt_files_with_a_bom_blank_lines_and_any_line_ends(tmp_path, newline, name):
    texts = ["a red circle moving left", "a blue square moving up"]
    lines = [json.dumps({"prompt": text, "target": 3}) for text in texts] if name.endswith("jsonl") else texts
    (tmp_path / name).write_bytes(newline.join(["", lines[0], "", "  ", lines[1]]).encode("utf-8-sig"))
    _, config = fg.parse_args(["--prompts", str(tmp_path / name), "--output_dir", str(tmp_path)])
    items = fg.load_prompts(config, "prompts")
    assert [item["prompt"] for item in items] == texts


def test_help_answers_at_once_with_the_values_of_the_model():
    result = run_script("--help", "--model", "wan14b", python=("-X", "importtime"), timeout=3)
    assert result.returncode == 0 and "torch" not in result.stderr and "diffusers" not in result.stderr
    text = " ".join(result.stdout.split())
    assert "denoising steps of a rollout [12]" in text and "AdamW's learning rate [0.0001]" in text
    assert all(f"--{name}" in text for name in vars(fg.Config()))


# ==== Wan's real classes, small and random, saved to disk and loaded by the same code as the real weights =============

PROMPTS = ["a red circle", "two dogs run through the rain at night", "waves at sunset"]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """Folders of small pipelines: Wan 2.1, Wan 2.2's two experts, and TI2V with a timestep per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    torch.manual_seed(0)
    text = UMT5Config(
        vocab_size=len(vocabulary), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    text_encoder = UMT5EncoderModel(text).eval()
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "text_dim": 16, "freq_dim": 32}

    def transformer(channels):
        return WanTransformer3DModel(in_channels=channels, out_channels=channels, ffn_dim=48, **sizes).eval()

    small = {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    vae = AutoencoderKLWan(z_dim=16, **small).eval()
    vae_5b = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    vae_48 = AutoencoderKLWan(z_dim=48, latents_mean=[0.1] * 48, latents_std=[0.9] * 48, **vae_5b, **small).eval()
    kinds = {
        "wan2.1": (vae, 16, {}),
        "two-experts": (vae, 16, {"transformer_2": transformer(16), "boundary_ratio": 0.8}),
        "per-token": (vae_48, 48, {"expand_timesteps": True}),
    }
    folders = {}
    for name, (decoder, channels, extra) in kinds.items():
        folders[name] = tmp_path_factory.mktemp("wan") / name
        WanPipeline(
            tokenizer, text_encoder, decoder, FlowMatchEulerDiscreteScheduler(), transformer(channels), **extra
        ).save_pretrained(folders[name])
    return folders


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch, request):
    """Prompt embeddings of these tests stay out of the user's cache."""
    if "pipelines" in request.fixturenames:
        monkeypatch.setattr(fg, "CACHE", tmp_path_factory.mktemp("cache"))


def wan_config(folder, **settings):
    flags = {"height": 32, "width": 32, "num_frames": 5, "num_steps": 4, "dtype": "fp32", "guidance_scale": 3.0}
    flags |= {"gradient_checkpointing": False, "reward": "motion", "tracker": "none", "eval_num_steps": 3}
    flags |= {"prompts_per_update": 2, "group_size": 2, "eval_videos": 0, "lr": 1e-3, "ema_every": 1, "eval_every": 0}
    return fg.fill(fg.Config(**{"model": str(folder), **flags, **settings}))


class OurGrid(FlowMatchEulerDiscreteScheduler):
    """Euler on our sigmas and unrounded timesteps."""

    def set_timesteps(self, num_inference_steps, device=None, **_):
        self.num_inference_steps = num_inference_steps
        self.sigmas = fg.make_sigmas(num_inference_steps, 3.0).float()
        self.timesteps = 1000 * self.sigmas[:-1]
        self._step_index = self._begin_index = None


def sample(pipe, noise, prompts, output_type="latent"):
    """What WanPipeline itself makes of this noise."""
    pipe.scheduler = OurGrid()
    pipe.set_progress_bar_config(disable=True)
    sizes = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4, "max_sequence_length": 512}
    return pipe(prompts, latents=noise.clone(), guidance_scale=3.0, output_type=output_type, **sizes).frames


@pytest.mark.parametrize("kind", ["wan2.1", "two-experts", "per-token"])
@pytest.mark.parametrize("cfg_batch, micro_batch", [(True, 2), (False, 1)])
def test_without_stochastic_steps_a_rollout_is_the_pipeline(pipelines, kind, cfg_batch, micro_batch):
    config = wan_config(pipelines[kind], cfg_batch=cfg_batch, micro_batch=micro_batch)
    policy = fg.WanPolicy(config, torch.device("cpu"))
    policy.encode(PROMPTS)
    noise = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    none = torch.zeros(2, 4, dtype=torch.bool)
    latents = fg.rollout(policy, config, PROMPTS[:2], noise, none, [(), ()]).latents
    pipe = WanPipeline.from_pretrained(pipelines[kind])
    torch.testing.assert_close(latents, sample(pipe, noise, PROMPTS[:2]), atol=1e-5, rtol=1e-5)
    theirs = sample(pipe, noise, PROMPTS[:2], "pt").permute(0, 1, 3, 4, 2)
    assert (policy.decode(latents).float() / 255 - theirs).abs().max() < 0.5 / 255 + 1e-5


def test_prompt_embeddings_are_the_pipelines_and_are_cached(pipelines):
    policy = fg.WanPolicy(wan_config(pipelines["wan2.1"]), torch.device("cpu"))
    policy.encode(PROMPTS)
    pipe = WanPipeline.from_pretrained(pipelines["wan2.1"])
    for prompt in PROMPTS:
        with torch.no_grad():
            theirs, _ = pipe.encode_prompt(prompt, None, False, max_sequence_length=512, device="cpu")
        assert torch.equal(policy._text([prompt]), theirs)
    files = {file: file.stat().st_mtime_ns for file in (fg.CACHE / "prompts").iterdir()}
    policy.encode(PROMPTS)
    assert files == {file: file.stat().st_mtime_ns for file in (fg.CACHE / "prompts").iterdir()}
    assert all(len(load_file(file)["embedding"]) < 20 for file in files)  # without the padding


def test_a_text_encoder_that_embeds_all_prompts_alike_is_refused(pipelines, tmp_path):
    pipe = WanPipeline.from_pretrained(pipelines["wan2.1"])
    torch.nn.init.ones_(pipe.text_encoder.shared.weight)
    pipe.text_encoder.encoder.embed_tokens.weight = pipe.text_encoder.shared.weight
    pipe.save_pretrained(tmp_path / "broken")
    policy = fg.WanPolicy(wan_config(tmp_path / "broken"), torch.device("cpu"))
    with pytest.raises(fg.UserError, match="all prompts are embedded alike"):
        policy.encode(PROMPTS)


@pytest.mark.parametrize("kind", ["wan2.1", "two-experts", "per-token"])
def test_the_exported_adapter_gives_the_same_video_in_diffusers(pipelines, kind, tmp_path):
    """Train, export, load in a fresh pipeline; the reference is the checkpoint's average in our own policy."""
    config = wan_config(pipelines[kind], window="0:4", num_updates=3, output_dir=str(tmp_path), run_name="run")
    fg.train(config, progress=False)
    policy = fg.WanPolicy(config, torch.device("cpu"))
    policy.encode(PROMPTS)
    saved = {}
    for file in (tmp_path / "run" / "checkpoints" / "000003").glob("*.safetensors"):
        saved |= load_file(file)
    noise = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    none = torch.zeros(1, 4, dtype=torch.bool)
    before = fg.rollout(policy, config, PROMPTS[:1], noise, none, [()]).latents
    for name, p in policy.trained.items():
        p.data.copy_(saved[f"ema.{name}"])
    ours = fg.rollout(policy, config, PROMPTS[:1], noise, none, [()]).latents
    pipe = WanPipeline.from_pretrained(pipelines[kind])
    pipe.load_lora_weights(tmp_path / "run" / "lora", weight_name="pytorch_lora_weights.safetensors")
    if kind == "two-experts":
        second = {"weight_name": "pytorch_lora_weights_2.safetensors", "load_into_transformer_2": True}
        pipe.load_lora_weights(tmp_path / "run" / "lora", **second)
        assert all(any(f"{part}." in n and p.abs().sum() > 0 for n, p in policy.trained.items() if "lora_B" in n)
                   for part in policy.parts)  # fmt: skip
    theirs = sample(pipe, noise, PROMPTS[:1])
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    assert (ours - before).abs().max() > 1e-4  # the adapter does something


def test_full_training_exports_a_transformer_that_diffusers_loads(pipelines, tmp_path):
    config = wan_config(pipelines["wan2.1"], full=True, num_updates=1, output_dir=str(tmp_path), run_name="run")
    fg.train(config, progress=False)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "run" / "lora" / "transformer")
    saved = load_file(next((tmp_path / "run" / "checkpoints" / "000001").glob("*.safetensors")))
    for name, p in loaded.named_parameters():
        assert torch.equal(p, saved[f"ema.transformer.{name}"])


def test_bf16_runs_and_reports_the_drift(pipelines, tmp_path):
    config = wan_config(pipelines["wan2.1"], dtype="bf16", num_updates=2, output_dir=str(tmp_path), run_name="run")
    updates = [m for m in fg.train(config, progress=False) if "loss" in m]
    assert all(m["grad_norm"] > 0 and m["ratio_dev_max"] < 0.1 and m["bad_updates"] == 0 for m in updates)


def launch(folder, name, processes, tmp_path, *flags, machine=()):
    """Run the script on several gloo processes; returns its metrics and exported adapter."""
    common = f"""--height 32 --width 32 --num_frames 5 --num_steps 4 --dtype fp32 --guidance_scale 3 --reward motion
        --tracker none --eval_num_steps 2 --eval_videos 0 --eval_every 0 --prompts_per_update 2 --group_size 2
        --no_gradient_checkpointing --lr 1e-4 --ema_every 1 --adam_eps 1e-6
        --model {folder} --run_name {name} --output_dir {tmp_path}"""
    flags = [*common.split(), *flags]
    torchrun = ["-m", "torch.distributed.run", *(machine or ["--standalone"]), "--nproc_per_node", str(processes)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "FLASH_GRPO_CACHE": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, *(torchrun if processes > 1 or machine else []), str(Path(fg.__file__)), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    metrics = [m for m in map(json.loads, lines) if "loss" in m]
    adapters = {}
    for file in (tmp_path / name / "lora").glob("*.safetensors"):
        adapters |= {f"{file.name}:{key}": value for key, value in load_file(file).items()}
    return metrics, adapters


def assert_same(one, other, tolerance=1e-5):
    for a, b in zip(one[0], other[0], strict=True):
        for key in ("reward_mean", "loss", "grad_norm", "nfe"):
            assert a[key] == pytest.approx(b[key], abs=tolerance), key
    assert one[1].keys() == other[1].keys()
    for key, value in one[1].items():
        torch.testing.assert_close(value, other[1][key], atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind, flags", [
    ("wan2.1", ["--method", "flash"]),
    ("two-experts", ["--method", "flash-shared", "--window", "0:4", "--solver", "dpm2", "--compress", "0.5"]),
])  # fmt: skip
def test_sharded_replicated_and_single_process_training_agree(pipelines, kind, flags, tmp_path):
    flags = [*flags, "--num_updates", "4"]
    single = launch(pipelines[kind], "single", 1, tmp_path, *flags, "--micro_batch", "4")
    small = launch(pipelines[kind], "small", 1, tmp_path, *flags, "--micro_batch", "1")
    sharded = launch(pipelines[kind], "sharded", 2, tmp_path, *flags, "--shard_size", "2")
    replicated = launch(pipelines[kind], "replicated", 2, tmp_path, *flags, "--shard_size", "1")
    for other in (small, sharded, replicated):
        assert_same(single, other)


def test_another_number_of_processes_resumes(pipelines, tmp_path):
    folder = pipelines["wan2.1"]
    whole = launch(folder, "whole", 1, tmp_path, "--num_updates", "4")
    for name, first, second in (("down", 2, 1), ("up", 1, 2)):
        launch(folder, name, first, tmp_path, "--num_updates", "2", "--shard_size", str(first))
        resumed = launch(folder, name, second, tmp_path, "--num_updates", "4", "--resume", "--shard_size", str(second))
        assert_same(whole, resumed)


def test_the_kl_is_to_the_model_without_its_adapter(pipelines, tmp_path):
    config = wan_config(pipelines["wan2.1"], kl=0.1, num_updates=2, output_dir=str(tmp_path), run_name="run")
    first, second = [m["kl"] for m in fg.train(config, progress=False) if "kl" in m]
    assert first == 0 and second > 0
    assert replace(config, kl=0.0).kl == 0 and fg.evaluations(config) > fg.evaluations(replace(config, kl=0.0))


def test_a_damaged_or_foreign_cache_of_the_tiny_model_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fg, "CACHE", tmp_path)
    file = fg.pretrained_tiny(num_updates=2) / "transformer" / "diffusion_pytorch_model.safetensors"
    whole, made = file.read_bytes(), file.stat().st_mtime_ns
    weights = {
        name: tensor.clone() for name, tensor in load_file(file).items()
    }  # the file itself is mapped into memory
    assert fg.pretrained_tiny(num_updates=2) and file.stat().st_mtime_ns == made  # loaded, not made again
    for broken in (whole[: len(whole) // 2], b"", whole.replace(b'"key"', b'"kex"'), None):
        file.write_bytes(broken) if broken is not None else file.unlink()
        fg.pretrained_tiny(num_updates=2)
        again = load_file(file)
        assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert [path.name for path in tmp_path.iterdir()] == [file.parts[-3]]


# ==== Rewards =========================================================================================================

FAULTY = '''
import os
calls = 0

def score(videos, prompts, metadata):
    """Brightness; at the second of three updates the prompt that is marked as faulty meets a fault."""
    global calls
    calls += 1  # one to check the reward, one for the evaluation, and one for each prompt of an update
    rewards, mine = videos.float().mean((1, 2, 3, 4)) / 255, 2 // int(os.environ.get("WORLD_SIZE", "1"))
    if not 2 + mine < calls <= 2 + 2 * mine or "fault" not in metadata[0]:
        return rewards
    if metadata[0]["fault"] == "raise":
        raise ZeroDivisionError("the judge is ill")
    return {"nan": rewards * float("nan"), "length": rewards[1:], "type": "good"}[metadata[0]["fault"]]
'''


def faulty_flags(tmp_path, fault, *flags):
    (tmp_path / "faulty.py").write_text(FAULTY)
    items = [{"prompt": "a red circle moving left"}, {"prompt": "a blue square moving up", "fault": fault}]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    (tmp_path / "held_out.txt").write_text("a red circle moving left\na blue square moving up\n")
    return f"""--reward {tmp_path}/faulty.py:score --prompts {tmp_path}/prompts.jsonl
        --eval_prompts {tmp_path}/held_out.txt --num_updates 3 --prompts_per_update 2 --group_size 2 --micro_batch 2
        --eval_every 0 --eval_videos 0 --eval_num_steps 2 --tracker none
        --output_dir {tmp_path} --run_name run""".split()


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def on_two_processes(*flags, timeout=100):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *torchrun, str(SCRIPT), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize("fault, text", [
    ("raise", "ZeroDivisionError: the judge is ill"), ("nan", "not a Tensor of 2 finite numbers"),
    ("length", "not a Tensor of 2 finite numbers"), ("type", "AttributeError"),
])  # fmt: skip
def test_a_failing_reward_stops_the_run_with_its_traceback_and_a_checkpoint(tmp_path, fault, text):
    _, config = fg.parse_args(faulty_flags(tmp_path, fault))
    with pytest.raises(fg.RewardError, match=text) as failure:
        fg.train(config, progress=False)
    if fault == "raise":  # the cause is the reward's own exception, with its traceback
        assert failure.value.__cause__.__traceback__.tb_next.tb_frame.f_code.co_name == "score"
    assert [m["update"] for m in read_metrics(tmp_path / "run")] == [0, 1]
    assert (tmp_path / "run" / "checkpoints" / "000001" / "state.json").exists()


def test_a_reward_that_fails_on_one_process_stops_both(tmp_path):
    done = on_two_processes(*faulty_flags(tmp_path, "raise"))
    assert done.returncode == 1 and "ZeroDivisionError: the judge is ill" in done.stderr
    assert "RewardError: on another process: reward score: ZeroDivisionError" in done.stderr
    assert [m["update"] for m in read_metrics(tmp_path / "run")] == [0, 1]
    assert (tmp_path / "run" / "checkpoints" / "000001" / "state.json").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_groups_of_a_failing_reward_can_be_dropped(tmp_path, processes):
    flags = [*faulty_flags(tmp_path, "nan"), "--reward_on_error", "drop"]
    if processes == 2:
        done = on_two_processes(*flags)
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        fg.train(fg.parse_args(flags)[1], progress=False)
    updates = [m for m in read_metrics(tmp_path / "run") if "loss" in m]
    assert [m["dropped_groups"] for m in updates] == [0, 1, 0]
    assert all(math.isfinite(m["reward_mean"]) and m["grad_norm"] > 0 for m in updates)


def test_a_reward_is_tried_before_anything_is_trained(small, tmp_path):
    (tmp_path / "mine.py").write_text("def score(videos, prompts, metadata):\n    return videos.float().mean()\n")
    with pytest.raises(fg.UserError, match="fails on a blank and a noise video: reward score: ValueError"):
        fg.train(replace(small, reward=f"{tmp_path}/mine.py:score", run_name="untrained"), progress=False)
    assert not (Path(small.output_dir) / "untrained").exists()


def test_motion_is_the_mean_change_of_a_pixel():
    videos = torch.zeros(2, 5, 4, 4, 3, dtype=torch.uint8)
    videos[1, 1::2] = 51  # flickers by a fifth of the range, at each of its four transitions
    torch.testing.assert_close(fg.motion_reward(videos, ["", ""], [{}, {}]), torch.tensor([0.0, 0.2]))


def test_palette_prefers_real_videos_to_each_way_of_cheating():
    prompts = ["a red circle moving left"] * 4
    real = ((fg.tiny_videos(prompts, fg.generator(0)) / 2 + 0.5) * 255).round().byte().permute(0, 2, 3, 4, 1)
    filled, blank, noisy, wrong = torch.zeros_like(real), torch.zeros_like(real), real.clone(), real.flip(-1)
    filled[..., 0] = 255
    noisy += torch.randint(0, 60, noisy.shape, generator=fg.generator(1), dtype=torch.uint8) * (noisy < 190)
    best = fg.palette_reward(real, prompts, [{}] * 4).min()
    for videos in (filled, blank, noisy, wrong):
        assert fg.palette_reward(videos, prompts, [{}] * 4).max() < best - 0.1


def test_a_mixture_standardizes_its_parts_or_adds_them_raw(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Big:\n    def __call__(self, videos, *_):\n        return 1000 * videos[:, 0, 0, 0, 0].float()\n"
    )
    config = fg.Config(reward=f"motion:0.25,{tmp_path}/mine.py:Big:-2")
    videos = torch.randint(0, 256, (6, 3, 4, 4, 3), dtype=torch.uint8, generator=fg.generator("videos"))
    reward = fg.Reward(config, torch.device("cpu"))
    scores, error, _ = reward(videos, [{"prompt": ""}] * 6)
    motion, big = fg.motion_reward(videos, [], []), 1000 * videos[:, 0, 0, 0, 0].float()
    assert error is None and torch.equal(scores, torch.stack([motion, big], 1))
    by_hand = 0.25 * (motion - motion.mean()) / motion.std() - 2 * (big - big.mean()) / big.std()
    torch.testing.assert_close(reward.mix(scores), by_hand, atol=1e-3, rtol=0)
    raw = fg.Reward(replace(config, reward_mix="raw"), torch.device("cpu"))
    torch.testing.assert_close(raw.mix(scores), 0.25 * motion - 2 * big)


@pytest.mark.parametrize("kind", ["clip", "pickscore"])
def test_image_rewards_are_the_models_own_scores_of_the_best_frames(tmp_path, kind, request):
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                              image_size=32, patch_size=8, projection_dim=16)  # fmt: skip
    text = CLIPTextConfig(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                          num_attention_heads=2, projection_dim=16, eos_token_id=1)  # fmt: skip
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)).eval()
    model.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({"[PAD]": 0, "[EOS]": 1, "[UNK]": 2, "a": 3, "red": 4, "dog": 5}, "[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="$A [EOS]", special_tokens=[("[EOS]", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")
    tokenizer.save_pretrained(tmp_path)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    images.save_pretrained(tmp_path)

    config = fg.Config(reward=f"{kind}@{tmp_path}", reward_frames=4, reward_top=0.5)
    videos = torch.randint(0, 256, (2, 9, 40, 48, 3), dtype=torch.uint8, generator=fg.generator("videos"))
    scores, error, _ = fg.Reward(config, torch.device("cpu"))(videos, [{"prompt": "a red dog"}, {"prompt": "red"}])
    assert error is None
    for video, prompt, score in zip(videos, ("a red dog", "red"), scores[:, 0], strict=True):
        frames = [Image.fromarray(video[t].numpy()) for t in (0, 3, 5, 8)]  # four evenly spaced ones of nine
        with torch.no_grad():
            inputs = tokenizer(prompt, return_tensors="pt") | images(frames, return_tensors="pt")
            logits = model(**inputs).logits_per_image[:, 0]
        torch.testing.assert_close(score, logits.topk(2).values.mean(), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """The python of a virtual environment that has torch and imageio and what these need, and nothing else."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    wanted, seen = ["torch", "imageio"], set()
    while wanted:
        name = wanted.pop()
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform
        if name in seen:
            continue
        seen.add(name)
        required = [Requirement(text) for text in found.requires or []]
        wanted += [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
        for top in {Path(file).parts[0] for file in found.files if ".." not in Path(file).parts}:
            link = site / top
            if not link.exists() and top != "__pycache__":
                link.symlink_to(Path(found.locate_file(top)).resolve())
    python = folder / "bin" / "python"
    for absent in ("diffusers", "accelerate", "transformers", "einops", "safetensors"):
        assert subprocess.run([python, "-c", f"import {absent}"], capture_output=True).returncode == 1
    return python


@contextmanager
def server(python, *flags, port=0, token="secret", reward="palette"):
    """A reward server in its own environment, over loopback; yields its address."""
    environment = {"PATH": os.environ["PATH"], "FLASH_GRPO_TOKEN": token}
    command = [python, SCRIPT, "serve", "--reward", reward, "--port", str(port), *flags]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith(f"reward {reward} at http://127.0.0.1:"), process.stderr.read()
        yield line.split()[-1], process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def loopback(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("FLASH_GRPO_TOKEN", "secret")


def test_a_server_that_is_killed_and_restarted_changes_nothing(bare_python, small, loopback):
    config, finished = replace(small, num_updates=4, eval_every=1), threading.Event()
    here = fg.train(replace(config, run_name="here"), progress=False)

    def kill_and_restart(process, port):
        metrics, patience = Path(small.output_dir) / "there" / "metrics.jsonl", time.monotonic() + 60
        while not metrics.exists() or '"loss"' not in metrics.read_text():
            assert time.monotonic() < patience and not finished.is_set()
            time.sleep(0.02)
        process.kill()
        process.wait()
        with server(bare_python, port=port):
            assert finished.wait(timeout=60)

    with server(bare_python) as (address, process), ThreadPoolExecutor(1) as background:
        vandal = background.submit(kill_and_restart, process, int(address.rsplit(":", 1)[1]))
        there = fg.train(replace(config, reward=address, run_name="there"), progress=False)
        finished.set()
        vandal.result()
    assert [{k.replace("http", "palette"): v for k, v in m.items()} for m in untimed(there)] == untimed(here)


def ask(address, body, token="secret", length=None):
    """The status and the body of a server's answer to a request, over a plain connection."""
    connection = HTTPConnection(address.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/score")
    connection.putheader("Authorization", token)
    connection.putheader("Content-Length", str(len(body)) if length is None else length)
    connection.endheaders(body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_server_refuses_what_it_should_and_goes_on(bare_python, loopback):
    video = bytes(range(48)) * 16
    head = json.dumps({"shape": [1, 4, 8, 8, 3], "items": [{"prompt": "a red circle moving left"}]}).encode()
    with server(bare_python) as (address, process):
        good = ask(address, head + b"\n" + video)
        pixels = torch.frombuffer(bytearray(video), dtype=torch.uint8).view(1, 4, 8, 8, 3)
        expected = fg.palette_reward(pixels, ["a red circle moving left"], [{}])
        assert good[0] == 200 and json.loads(good[1]) == pytest.approx(expected.tolist(), rel=1e-6)
        assert ask(address, head + b"\n" + video, token="guess")[0] == 401
        assert ask(address, head + b"\n" + video, token="")[0] == 401
        assert ask(address, b"", length=str(10**13))[0] == 413
        assert ask(address, b"", length="many")[0] == 413
        pickled = pickle.dumps({"shape": [1, 4, 8, 8, 3]})
        for garbage in (b"", b"\x00\xff" * 50, pickled, head, head + b"\n" + video[1:], b"{}\n" + video, b"[1]\n",
                        head.replace(b"[1,", b"[-1,") + b"\n", head.replace(b"[{", b"[7, {") + b"\n" + video,
                        head.replace(b'{"prompt": "a red circle moving left"}', b"null") + b"\n" + video):  # fmt: skip
            assert ask(address, garbage)[0] == 400, garbage[:60]
        assert ask(address, head.replace(b"red", b"beige") + b"\n" + video)[0] == 500  # the reward's own failure
        with urlopen(f"{address}/health", timeout=20) as answer:
            assert json.loads(answer.read()) == "palette"
        assert ask(address, head + b"\n" + video) == good and process.poll() is None


def test_servers_are_asked_in_turn_and_stand_in_for_one_that_is_gone(bare_python, loopback, monkeypatch):
    videos = torch.randint(0, 256, (2, 3, 4, 4, 3), dtype=torch.uint8, generator=fg.generator("videos"))
    asked, opened = [], fg.urlopen
    monkeypatch.setattr(fg, "urlopen", lambda request, **o: asked.append(request.full_url) or opened(request, **o))
    with server(bare_python, reward="motion") as (one, first), server(bare_python, reward="motion") as (other, _):
        reward = fg.HttpReward(f"{one}+{other}", fg.Config())
        for _ in range(2):
            found = reward(videos, ["", ""], [{"prompt": ""}] * 2)
            torch.testing.assert_close(found, fg.motion_reward(videos, [], []))
        assert asked == [one, other]
        first.kill()
        first.wait()
        monkeypatch.setattr(fg.time, "sleep", lambda seconds: None)
        torch.testing.assert_close(reward(videos, ["", ""], [{"prompt": ""}] * 2), found)
        assert asked[2:] == [one, other]


def test_a_silent_or_refusing_server_is_an_error_and_never_a_number(bare_python, loopback, monkeypatch):
    videos, pauses = torch.zeros(1, 2, 4, 4, 3, dtype=torch.uint8), []
    monkeypatch.setattr(fg.time, "sleep", pauses.append)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        reward = fg.HttpReward(f"http://127.0.0.1:{silent.getsockname()[1]}", fg.Config(reward_timeout=1))
        started = time.monotonic()
        with pytest.raises(fg.RewardError, match="timed out"):
            reward(videos, [""], [{"prompt": ""}])
        assert time.monotonic() - started < 15 and pauses == [1, 2, 4, 8, 16, 0]
    monkeypatch.setenv("FLASH_GRPO_TOKEN", "guess")
    with server(bare_python, reward="motion") as (address, _):
        reward, asked = fg.HttpReward(address, fg.Config()), len(pauses)
        with pytest.raises(fg.RewardError, match="401: wrong or missing token"):
            reward(videos, [""], [{"prompt": ""}])
        assert len(pauses) == asked  # asking again would be no use


# ==== Faults: killed, out of disk, damaged, a lost process, numbers that are not finite ===============================

# A fresh process that has imported the script already, forked for each run, so that a killed run takes a second.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["test_flash_grpo"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_until(config, target, count, moment, cache):
    """In a process of its own: train, and be killed at the count-th call of a function, before, amid or after it."""
    torch.set_num_threads(1)
    fg.CACHE = cache or fg.CACHE
    sys.stderr = open(Path(config.output_dir) / f"{config.run_name}.err", "a", buffering=1)
    *path, name = target.split(".")
    owner = {"fg": fg, "torch": torch, "Path": Path, "builtins": builtins}[path[0]]
    for part in path[1:]:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), []

    def fatal(*arguments, **options):
        calls.append(1)
        if len(calls) == count and moment == "before":
            die()
        result = function(*arguments, **options)
        if len(calls) == count and moment == "after":
            die()
        return result

    def torn(path, mode="r", *arguments, **options):  # writes half of the count-th line of metrics.jsonl
        if mode != "a" or not str(path).endswith("metrics.jsonl"):
            return function(path, mode, *arguments, **options)
        calls.append(1)
        if len(calls) < count:
            return function(path, mode)
        file = function(path, "ab", buffering=0)
        half = SimpleNamespace(write=lambda text: (file.write(text.encode()[: len(text) // 2]), die()))
        return contextlib.nullcontext(half)

    setattr(owner, name, torn if moment == "amid" else fatal)
    fg.train(config, progress=False)


def train_apart(config, target="fg.train", count=10**9, moment="before", cache=None):
    """Train in a process of its own; returns its exit code, -9 if it was killed."""
    process = FORKSERVER.Process(target=run_until, args=(config, target, count, moment, cache))
    process.start()
    process.join(timeout=120)
    assert process.exitcode is not None, "hangs"
    return process.exitcode


def final_state(folder):
    """What must be the same however often a run was interrupted: its metrics, and all tensors as bytes."""
    files = [*(folder / "checkpoints" / "000003").glob("*.safetensors"), folder / "lora" / LORA_FILE]
    tensors = {f"{file.name} {name}": t.numpy().tobytes() for file in files for name, t in load_file(file).items()}
    return untimed(read_metrics(folder)), tensors


LORA_FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def unharmed(small):
    """Settings of a run of 3 updates that saves and evaluates after each, and what it leaves."""
    config = replace(small, num_updates=3, eval_every=0, save_every=1, eval_videos=1, keep=1, run_name="unharmed")
    assert train_apart(config) == 0
    return config, final_state(Path(small.output_dir) / "unharmed")


MOMENTS = [
    ("fg.WanPolicy.velocity", 1, "before"),  # in the evaluation before the first update
    ("fg.write_video", 1, "before"), ("fg.iio.imwrite", 1, "after"), ("fg.draw_pictures", 1, "before"),
    ("builtins.open", 1, "amid"), ("builtins.open", 3, "amid"),  # half of a line of metrics.jsonl
    ("fg.WanPolicy.velocity", 20, "after"), ("fg.Reward.__call__", 6, "before"), ("fg.learn", 2, "before"),
    ("torch.Tensor.backward", 2, "after"), ("torch.optim.AdamW.step", 2, "after"), ("fg.State.step_ema", 2, "after"),
    ("fg.dcp.save", 2, "before"), ("fg.dcp.HuggingFaceStorageWriter.write_data", 2, "after"),
    ("fg.dcp.HuggingFaceStorageWriter.finish", 1, "before"), ("Path.write_text", 7, "after"),
    ("Path.rename", 1, "after"), ("Path.rename", 3, "before"), ("fg.export", 2, "before"),
    ("fg.WanPipeline.save_lora_weights", 2, "after"), ("fg.shutil.rmtree", 5, "after"),
    ("fg.save_checkpoint", 3, "after"),
]  # fmt: skip


def test_a_run_killed_at_any_moment_resumes_as_if_nothing_had_happened(unharmed, small):
    config, expected = unharmed

    def kill_and_resume(moment):
        ours = replace(config, run_name="killed " + " ".join(map(str, moment)))
        killed, resumed = train_apart(ours, *moment), train_apart(replace(ours, resume=True))
        return (*moment, killed, resumed, final_state(Path(small.output_dir) / ours.run_name) == expected)

    with ThreadPoolExecutor(2) as workers:
        found = list(workers.map(kill_and_resume, MOMENTS))
    assert found == [(*moment, -signal.SIGKILL, 0, True) for moment in MOMENTS]


def test_a_run_killed_while_it_caches_embeddings_makes_them_again(pipelines, tmp_path):
    config = wan_config(pipelines["wan2.1"], num_updates=1, output_dir=str(tmp_path), run_name="run", eval_every=0)
    cache = tmp_path / "cache"
    assert train_apart(config, "fg.save_file", 3, "after", cache) == -signal.SIGKILL  # written, not renamed
    assert train_apart(replace(config, resume=True), cache=cache) == 0
    whole = [load_file(file) for file in (tmp_path / "cache" / "prompts").glob("[!.]*")]
    assert len(whole) > 3 and all(len(tensors["embedding"]) for tensors in whole)


def fill_the_disk(config):
    """In a process of its own: train; from the second checkpoint on no file can grow beyond 100 kB."""
    torch.set_num_threads(1)
    save, calls = fg.dcp.save, []

    def full(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        return save(*arguments, **options)

    fg.dcp.save = full
    try:
        fg.train(config, progress=False)
    except BaseException as error:
        Path(config.output_dir, "error.txt").write_text("".join(traceback.format_exception(error)))
        raise


def test_a_full_disk_is_an_error_that_leaves_the_checkpoint_before(unharmed, small):
    config, expected = unharmed
    config = replace(config, run_name="full disk")
    process = FORKSERVER.Process(target=fill_the_disk, args=(config,))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 1 and "OSError" in Path(small.output_dir, "error.txt").read_text()
    checkpoints = Path(small.output_dir) / "full disk" / "checkpoints"
    assert [folder.name for folder in checkpoints.glob("[0-9]*")] == ["000001"]
    assert train_apart(replace(config, resume=True)) == 0
    assert final_state(checkpoints.parent) == expected


@pytest.mark.parametrize("damage", ["truncated", "missing", "state cut", "state gone"])
def test_of_a_damaged_checkpoint_the_one_before_is_taken(unharmed, small, damage):
    config, expected = unharmed
    config = replace(config, run_name=f"damaged {damage}", num_updates=2, keep=2)
    assert train_apart(config) == 0
    newest = Path(small.output_dir) / config.run_name / "checkpoints" / "000002"
    (tensors,), state = newest.glob("*.safetensors"), newest / "state.json"
    if damage == "truncated":
        os.truncate(tensors, tensors.stat().st_size - 1)
    elif damage == "missing":
        tensors.unlink()
    elif damage == "state cut":
        os.truncate(state, state.stat().st_size // 2)
    else:
        state.unlink()
    assert train_apart(replace(config, num_updates=3, resume=True)) == 0
    assert f"checkpoint {newest} is damaged" in Path(small.output_dir, f"{config.run_name}.err").read_text()
    (_, tensors), (_, wanted) = final_state(newest.parents[1]), expected
    assert tensors == wanted  # its metrics have one evaluation more, after the second update


def test_sigterm_saves_and_leaves_quietly(unharmed, small):
    config, expected = unharmed
    config = replace(config, run_name="terminated", num_updates=1000, save_every=0)
    process = FORKSERVER.Process(target=run_until, args=(config, "fg.train", 10**9, "before", None))
    process.start()
    metrics, patience = Path(small.output_dir) / "terminated" / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() or metrics.read_text().count('"loss"') < 2:
        assert time.monotonic() < patience and process.is_alive()
        time.sleep(0.02)
    process.terminate()
    process.join(timeout=60)
    assert process.exitcode == 0
    (saved,) = (metrics.parent / "checkpoints").glob("[0-9]*")
    assert int(saved.name) == max(m["update"] for m in read_metrics(metrics.parent)) < 1000
    done, wanted = (
        [m for m in untimed(lines) if m["update"] < 3] for lines in (read_metrics(metrics.parent), expected[0])
    )
    assert done == wanted


PATCHED = """
import os, sys
sys.path.insert(0, {folder!r})
import flash_grpo as fg
loss, calls = fg.grpo_loss, []

def broken(*arguments):
    calls.append(1)
    value, stats = loss(*arguments)
    if os.environ["RANK"] == "1" and len(calls) in {calls}:
        {fault}
    return value, stats

fg.grpo_loss = broken
fg.train(fg.parse_args(sys.argv[1:])[1], progress=False)
"""


def patched(tmp_path, fault, calls, *flags):
    """A run of two processes of which the second meets a fault at some of its calls of the loss."""
    (tmp_path / "patched.py").write_text(PATCHED.format(folder=str(SCRIPT.parent), fault=fault, calls=calls))
    common = """--num_updates 4 --prompts_per_update 2 --group_size 2 --eval_every 0 --eval_videos 0 --eval_num_steps 2
        --tracker none --run_name run --method flow --save_every 1 --micro_batch 64""".split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               str(tmp_path / "patched.py"), *common, *flags, "--output_dir", str(tmp_path)]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)


def test_a_nonfinite_loss_of_one_process_skips_the_update_on_all(tmp_path):
    done = patched(tmp_path, "value = value * float('nan')", (2,))
    assert done.returncode == 0, done.stderr[-2000:]
    updates = [m for m in read_metrics(tmp_path / "run") if "loss" in m]
    assert [m["bad_updates"] for m in updates] == [0, 1, 0, 0]
    assert [math.isfinite(m["grad_norm"]) for m in updates] == [True, False, True, True]
    assert all(torch.isfinite(t).all() for t in load_file(tmp_path / "run" / "lora" / LORA_FILE).values())


def test_too_many_nonfinite_updates_in_a_row_end_the_run_with_a_checkpoint(tmp_path):
    done = patched(tmp_path, "value = value * float('inf')", (2, 3, 4), "--max_bad_updates", "2")
    assert done.returncode == 1 and "2 updates in a row had a non-finite gradient" in done.stderr
    assert [m["update"] for m in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]
    assert (tmp_path / "run" / "checkpoints" / "000003" / "state.json").exists()


@pytest.mark.parametrize(
    "fault, shown", [("1 / 0", "ZeroDivisionError"), ("os.kill(os.getpid(), 9)", "exitcode  : -9")]
)
def test_when_one_process_is_lost_the_other_ends_and_its_error_is_shown(tmp_path, fault, shown):
    started = time.monotonic()
    done = patched(tmp_path, fault, (2,), "--timeout", "600")
    assert done.returncode == 1 and shown in done.stderr
    assert time.monotonic() - started < 60  # far below the time-out of a collective
    assert (tmp_path / "run" / "checkpoints" / "000001" / "state.json").exists()


def test_two_machines_give_what_two_processes_give(pipelines, tmp_path):
    flags = ["--num_updates", "2"]
    together = launch(pipelines["wan2.1"], "together", 2, tmp_path, *flags)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(2) as machines:
        where = [f"--nnodes 2 --node_rank {r} --master_addr 127.0.0.1 --master_port {port}".split() for r in (0, 1)]
        apart = [machines.submit(launch, pipelines["wan2.1"], "apart", 1, tmp_path, *flags, machine=w) for w in where]
        for result in apart:
            assert_same(together, result.result(), tolerance=0)


def test_the_share_of_epsilon_is_that_of_adams_denominator(small):
    config = replace(small, num_updates=2, adam_eps=1e-7, method="flash", run_name="eps")
    share = fg.train(config, progress=False)[-2]["adam_eps_share"]
    (file,) = (Path(small.output_dir) / "eps" / "checkpoints" / "000002").glob("*.safetensors")
    squares = torch.cat([t.flatten() for name, t in load_file(file).items() if name.startswith("exp_avg_sq.")])
    root = (squares[squares > 0] / (1 - 0.999**2)).sqrt()
    assert share == pytest.approx((1e-7 / (root + 1e-7)).mean().item(), rel=1e-4) and 0.1 < share < 0.9


def test_importing_the_script_is_quiet_and_stays_offline():
    watch = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.fork", "os.system", "os.posix_spawn"):
        raise SystemExit(f"import does {event} {arguments}")
sys.addaudithook(refuse)
import flash_grpo
"""
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, cwd=SCRIPT.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("method", ["flash", "flash-shared"])
def test_what_is_kept_of_a_rollout_does_not_grow_with_the_steps(policy, method):
    """Two latents and scalars for each video, however many steps it took."""
    kept = []
    for steps in (10, 30):
        made, _ = roll(policy, fg.fill(fg.Config(method=method, num_steps=steps)))
        kept.append([tuple(value.shape) for value in vars(made).values()])
    assert kept[0] == kept[1] and kept[0][2] == (6, *policy.latent_shape)  # x_next: one transition for each of 6


# ==== Pure functions, property by property ============================================================================

FRACTION = strategies.floats(0, 1, exclude_min=True)
REWARD = strategies.floats(-1e6, 1e6)


@given(strategies.integers(1, 200), strategies.floats(1e-3, 1e3))
def test_sigmas_fall_from_one_to_zero(steps, shift):
    sigmas = fg.make_sigmas(steps, shift)
    assert sigmas[0] == 1 and sigmas[-1] == 0 and len(sigmas) == steps + 1 and (sigmas.diff() < 0).all()


@given(
    FRACTION,
    strategies.floats(0, 1),
    FRACTION,
    strategies.sampled_from(KINDS),
    strategies.sampled_from([16.0, 1e-8, 1e8]),
)
def test_a_step_is_finite_wherever_it_is_defined(sigma, share, sigma_max, kind, size):
    sigma_next = share * sigma
    assume(sigma_next < sigma and not (kind == "flow" and sigma == sigma_max == 1))
    x = torch.full((1, 1, 1, 1, 1), size, dtype=F64)
    try:
        mean, std, grad_scale = fg.sde_step(x, -x, sigma, sigma_next, min(sigma_max, 1 - 1e-9), kind)
    except ValueError as error:
        assert "std 0" in str(error) and (sigma_next == 0 or sigma < 1e-100 or sigma_max < 1e-100)
        return
    assert std > 0 and not torch.isnan(mean).any() and grad_scale >= 0


@given(
    strategies.lists(strategies.tuples(REWARD, REWARD), min_size=1, max_size=8),
    strategies.sampled_from(["global", "group"]),
)
def test_advantages_of_pairs_are_opposite_bounded_and_kind_to_equal_rewards(pairs, std):
    rewards = torch.tensor(pairs, dtype=F64).flatten()
    advantages = fg.group_advantages(rewards, torch.arange(len(rewards)) // 2, std).view(-1, 2)
    assert advantages.dtype == torch.float32 and torch.equal(advantages[:, 0], -advantages[:, 1])
    for (a, b), (first, second) in zip(pairs, advantages.tolist(), strict=True):
        assert abs(first) <= 5 and (first == 0 if a == b else (first - second) * (a - b) >= 0)


@given(strategies.lists(strategies.floats(1e-12, 1e12), min_size=1, max_size=20))
def test_weights_have_mean_one_and_make_every_pull_alike(scales):
    weights = fg.rectification_weights(torch.tensor(scales, dtype=F64)).double()
    assert weights.mean() == pytest.approx(1, rel=1e-5)
    pull = weights * torch.tensor(scales, dtype=F64)
    kept = weights > 1e-30  # below, float32 has no such number
    torch.testing.assert_close(pull[kept], pull[kept][:1].expand(kept.sum()), rtol=1e-5, atol=0)


@given(strategies.integers(1, 4), strategies.integers(1, 4), strategies.integers(1, 12), strategies.data())
def test_masks_stay_in_the_window(prompts, group, steps, data):
    start = data.draw(strategies.integers(0, steps - 1))
    stop = data.draw(strategies.integers(start + 1, steps))
    count = data.draw(strategies.integers(0, stop - start))
    mask = fg.draw_sde_mask(
        prompts, group, steps, (start, stop), count, data.draw(strategies.sampled_from(["iso", "random"]))
    )
    assert (mask.sum(1) == (count or stop - start)).all() and not mask[:, :start].any() and not mask[:, stop:].any()


def test_a_rollout_without_stochastic_steps_keeps_nothing(policy):
    config = fg.fill(fg.Config())
    noise = torch.zeros(2, *policy.latent_shape)
    made = fg.rollout(policy, config, ["a red circle moving left"] * 2, noise, torch.zeros(2, 4) > 0, [(), ()])
    assert made.latents.shape == noise.shape and not len(made.x_next) and not len(made.log_prob) and not len(made.step)


# ==== The notebooks and the README ====================================================================================

NOTEBOOKS = sorted((SCRIPT.parent / "notebooks").glob("*.ipynb"))


def defined(source):
    tree = ast.parse(source)
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_the_script_and_copies_nothing_of_it(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "import flash_grpo as fg" in code[0] and f"jupyter lab notebooks/{notebook.name}" in "".join(
        cells[0]["source"]
    )
    assert not defined("\n".join(code)) & defined(SCRIPT.read_text())
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)
    assert any("assert " in text for text in code[-1:])  # ends on something that is known exactly


def test_there_are_five_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


def test_the_reward_of_the_readme_takes_the_best_frames(tmp_path, monkeypatch):
    """The README's HPSv3 reward, with a stand-in for the package: 8 frames, the mean of the best two."""
    (block,) = re.findall(r"```python\n(.*?)```", (SCRIPT.parent / "README.md").read_text(), re.S)
    (tmp_path / "hpsv3.py").write_text(
        "class HPSv3RewardInferencer:\n    def __init__(self, device):\n        assert device == 'cuda'\n"
        "    def reward(self, prompts, image_paths):\n"
        "        return [(image.getpixel((0, 0))[0] / 255 + len(p), 9.0) for p, image in zip(prompts, image_paths)]\n"
    )
    (tmp_path / "hpsv3_reward.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    videos = torch.zeros(2, 15, 4, 4, 3, dtype=torch.uint8)
    videos[1, [0, 1, 4]] = 255  # frames 0, 2, .., 14 are looked at, so two of the three white ones
    reward = fg.Reward(fg.Config(reward=f"{tmp_path}/hpsv3_reward.py:HPSv3"), torch.device("cpu"))
    scores, error, _ = reward(videos, [{"prompt": "ab"}, {"prompt": "abc"}])
    assert error is None and scores[:, 0].tolist() == [2.0, 4.0]
