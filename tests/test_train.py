"""The trainer: model, update rules, schedules, plans, and whole runs on one and several ranks."""
from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from conftest import (DOC_START, RECIPE, ROOT, TINY, VOCAB, main_on_ranks, markov_tokens, on_ranks, run_trainer,
                      write_shard)
from staged import Staged
from train_gpt import (Config, FollowingError, NgramTable, RMSNorm, Rotate, SoftcappedLoss, SquaredReLU, Trainer,
                       UserError, World, adam_update, attend,
                       attention_mask, build_model, check_fits, join_world, lr_scale, make_batch, make_plan,
                       muon_momentum, muon_update,
                       open_dataset, orthogonalize, parse_args, rotary_table, rule_of)

# The cpu track, and a variant with what it leaves out: flags, and the class that they are parsed by.
KINDS = {"plain": ([], Config), "recipe": (RECIPE, Staged)}


def world_of(rank: int, size: int) -> World:
    return World(rank, size, size, torch.device("cpu"), None, None)


@pytest.fixture
def tiny(tiny_data, tmp_path):
    return [*TINY, f"--data={tiny_data}", f"--out={tmp_path / 'logs'}"]


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"^step:\S+ (?:train|val)_loss:(\S+)", text, re.MULTILINE)]


# ---- model -----------------------------------------------------------------------------------------------------------

def turned(x, base):
    """Rotary positions by complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).double()[:, None] * base ** -(torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


@pytest.mark.parametrize("function, reference, shape", [
    (RMSNorm.apply, lambda x: F.rms_norm(x, (x.shape[-1],), eps=1e-6), (3, 5, 16)),
    (SquaredReLU.apply, lambda x: F.relu(x).square(), (3, 5, 16)),
    (lambda x: Rotate.apply(x,
                            rotary_table(Config(seq_len=6, batch_tokens=6, val_tokens=6, model_dim=32, heads=2),
                                         0).double()),
     lambda x: turned(x, 10_000.0), (3, 5, 16)),
])
def test_layers_equal_torchs(function, reference, shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    grad = torch.randn(shape, dtype=torch.float64)
    function(a).backward(grad), reference(b).backward(grad)
    torch.testing.assert_close(function(x), reference(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_loss_equals_cross_entropy_of_softcapped_logits(chunk):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(20, 8, generator=generator), 3 * torch.randn(13, 8, generator=generator)
    targets = torch.randint(-1, 13, (20,), generator=generator)
    a, wa, b, wb = (t.clone().requires_grad_() for t in (x, weight, x, weight))
    loss = SoftcappedLoss.apply(a, wa, targets, chunk)
    expected = F.cross_entropy(23 * torch.sigmoid((b @ wb.T + 5) / 7.5), targets, ignore_index=-1, reduction="sum")
    (2 * loss).backward(), (2 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(wa.grad, wb.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 5, 16])
def test_attention_sees_its_window_of_its_segment(window, dtype):
    generator = torch.Generator().manual_seed(window)
    starts = torch.rand(3, 16, generator=generator) < 0.2
    starts[:, 0] = True
    q, k, v = torch.randn(3, 3, 2, 16, 8, generator=generator).to(dtype).float()
    mask, segment = attention_mask(starts, window, flex=False), starts.cumsum(-1).tolist()
    found = attend(*(x.to(dtype) for x in (q, k, v)), mask).float()
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    for b in range(3):
        for t in range(16):
            seen = [j for j in range(t + 1) if t - j < window and segment[b][j] == segment[b][t]]
            for head in range(2):
                weights = torch.stack([q[b, head, t] @ k[b, head, j] for j in seen]).div(8**0.5).softmax(0)
                torch.testing.assert_close(found[b, head, t], weights @ v[b, head, seen], **tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_takes_the_same_mask():
    """Uncompiled, on the CPU; tests/test_gpu.py has it compiled on a GPU."""
    starts = torch.rand(2, 128, generator=torch.Generator().manual_seed(0)) < 0.05
    starts[:, 0] = True
    q, k, v = torch.randn(3, 2, 2, 128, 16)
    dense, flex = (attend(q, k, v, attention_mask(starts, 40, flex)) for flex in (False, True))
    torch.testing.assert_close(flex, dense, rtol=1e-4, atol=1e-5)


def test_yarn_slows_what_has_not_turned_and_keeps_what_has():
    sizes = dict(seq_len=1024, batch_tokens=1024, val_tokens=1024, model_dim=128, heads=1, steps=10)
    grown = Config(**sizes, stages=(dict(until=0.5, windows=(64, 128)), dict(windows=(64, 512))))
    before, after = rotary_table(grown, 0), rotary_table(grown, 1)
    assert torch.equal(before, rotary_table(Config(**sizes), 0))
    sharper = 1 + 0.1 * math.log(4)
    torch.testing.assert_close(after.square().sum(0), torch.full((1024, 64), sharper))
    angle = [torch.atan2(*table[:, 1].flip(0)) for table in (before, after)]  # after one position
    ratio, turns = angle[1] / angle[0], 128 * angle[0] / (2 * math.pi)
    assert (ratio[turns < 1] == pytest.approx(0.25, rel=1e-3)) and 0 < (turns > 1).sum() < 64
    assert (ratio.diff() <= 1e-6).all() and ratio[0] > 0.6


def lively_model(config: Config):
    """A model and a table in which nothing is zero, so that whatever could leak does."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(config, VOCAB)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.5 if p.dim() < 2 else p.shape[-1] ** -0.5))
    table = NgramTable(config, world_of(0, 1))
    table.rows.normal_(generator=generator)
    return model, table


def stage_inputs(config, starts, stage=0):
    """What Trainer.stage_inputs gives the model, without a trainer."""
    return dict(masks=tuple(attention_mask(starts, window, flex=False) for window in config.stage_list[stage].windows),
                rotary=rotary_table(config, stage))


def hidden_states(model, table, tokens, config):
    batch = make_batch(torch.cat((tokens, tokens[:, :1]), 1), len(tokens), len(tokens), DOC_START)
    rows, signs = train_gpt.ngram_addresses(batch.tokens.flatten(), batch.starts.flatten(), config)
    memory = table.read(table.rows, rows, signs).view(*tokens.shape, -1)
    with torch.no_grad():
        return model.hidden(batch.tokens[0], batch.starts[0], memory, **stage_inputs(config, batch.starts[0]))


@pytest.fixture(scope="module", params=[*KINDS.values(), ([*RECIPE, "--dtype=bfloat16"], Staged)],
                ids=[*KINDS, "bfloat16"])
def alive(request):
    flags, config_class = request.param
    config = parse_args([*TINY, "--ngram_orders=2,3,4", *flags], config_class)
    return (*lively_model(config), config)


def test_a_token_changes_nothing_before_it(alive):
    *parts, config = alive
    tokens = torch.randint(0, VOCAB - 1, (2, 32))
    before = hidden_states(*parts, tokens, config)
    for t in (1, 15, 31):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % (VOCAB - 1)
        after = hidden_states(*parts, changed, config)
        assert torch.equal(after[0, :t], before[0, :t]) and not torch.equal(after[0, t], before[0, t])
        assert torch.equal(after[1], before[1])  # nor in another row


def test_a_segment_changes_nothing_in_another(alive):
    *parts, config = alive
    tokens = torch.randint(0, VOCAB - 1, (1, 32))
    tokens[0, 11] = tokens[0, 20] = DOC_START
    before = hidden_states(*parts, tokens, config)
    changed = tokens.clone()
    changed[0, 12:20] = (changed[0, 12:20] + 1) % (VOCAB - 1)
    after = hidden_states(*parts, changed, config)
    same = (after == before).all(-1)[0]
    assert same[:12].all() and same[20:].all() and not same[12:20].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_model_is_one_graph_and_equals_the_eager_one(dtype):
    """Traced for training and for evaluation, without a code generator, so that it needs no compiler."""
    config = parse_args([*TINY, *RECIPE], Staged)
    batch = make_batch(torch.randint(0, VOCAB, (4, 33)), 4, 4, DOC_START)
    part, results = (batch.tokens[0], batch.starts[0]), []
    inputs = stage_inputs(config, batch.starts[0]) | {"tied": False}
    for compiled in (False, True):
        model, _ = lively_model(config)
        model.dtype = dtype
        forward = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else model
        memory = torch.randn(4, 32, 24, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        loss = forward(*part, memory, batch.targets[0], **inputs)
        loss.backward()
        with torch.no_grad():
            evaluated = forward(*part, memory, batch.targets[0], **inputs)
        results.append([loss.detach(), evaluated, memory.grad.float(), model.embed.grad, model.blocks[0].qkv.grad])
    scale = 1e-5 if dtype == torch.float32 else 3e-2
    for eager, traced in zip(*results):
        assert (eager - traced).norm() <= scale * eager.norm() and eager.norm() > 0


def test_weights_depend_on_the_seed_alone():
    a, b, c = (build_model(parse_args([*TINY, f"--seed={seed}"]), VOCAB) for seed in (1, 1, 2))
    assert torch.equal(a.blocks[1].qkv, b.blocks[1].qkv) and not torch.equal(a.embed, c.embed)


# ---- update rules and schedules --------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 64, 16), (1, 16, 64)])
def test_orthogonalized_singular_values_are_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert (values > 0.7).all() and (values < 1.3).all()
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert (orthogonalize(matrices) * (u @ v)).sum() / math.prod(shape) * max(shape[1:]) > 0.9


def plain_muon(weights, grads, momentum, **rates):
    """Without NorMuon: a second moment that is one everywhere and stays so divides nothing."""
    muon_update(weights, grads.clone(), momentum, torch.ones(*weights.shape[:-1], 1), beta2=1.0, **rates)


def test_muon_moves_along_the_orthogonalized_momentum():
    weights, grads = torch.zeros(2, 8, 32), torch.randn(2, 8, 32)
    momentum = torch.zeros_like(weights)
    plain_muon(weights, grads, momentum, lr=0.1, beta=0.9, wd=0.0)
    torch.testing.assert_close(momentum, 0.1 * grads)
    torch.testing.assert_close(weights, -0.1 * orthogonalize(grads))
    tall = torch.zeros(2, 32, 8)
    plain_muon(tall, grads.mT, torch.zeros_like(tall), lr=0.1, beta=0.9, wd=0.0)
    torch.testing.assert_close(tall, 2 * weights.mT)


def test_normuon_evens_rows_out_and_keeps_the_norm():
    generator = torch.Generator().manual_seed(0)
    weights, momentum, row_moment = torch.zeros(2, 8, 6), torch.zeros(2, 8, 6), torch.zeros(2, 8, 1)
    expected, mean = torch.zeros(2, 8, 6), torch.zeros(2, 8)
    for _ in range(3):
        grads = torch.randn(2, 8, 6, generator=generator)
        muon_update(weights, grads.clone(), momentum, row_moment, lr=0.1, beta=0.0, beta2=0.9, wd=0.0)
        for n in range(2):
            plain = orthogonalize(grads[n:n + 1])[0]
            for row in range(8):
                mean[n, row] = 0.9 * mean[n, row] + 0.1 * (plain[row] ** 2).mean()
            scaled = torch.stack([plain[row] / mean[n, row].sqrt() for row in range(8)])
            expected[n] -= 0.1 * (8 / 6) ** 0.5 * scaled * plain.norm() / scaled.norm()
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_decay_acts_where_update_and_weight_agree():
    start, grads = torch.randn(1, 8, 8), torch.randn(1, 8, 8)
    moved = []
    for wd in (0.0, 0.5):
        weights = start.clone()
        plain_muon(weights, grads, torch.zeros(1, 8, 8), lr=0.1, beta=0.0, wd=wd)
        moved.append(weights - start)
    agree = -moved[0] * start > 0
    torch.testing.assert_close(moved[1] - moved[0], torch.where(agree, -0.1 * 0.5 * start, 0.0))
    assert agree.any() and not agree.all()


def test_adam_equals_torchs_adamw():
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(50, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.95), eps=train_gpt.ADAM_EPS, weight_decay=0.1)
    first, second = torch.zeros(50), torch.zeros(50)
    for update in range(1, 30):
        theirs.grad = torch.randn(50, generator=generator)
        adam_update(ours, theirs.grad, first, second, update, 0.01, 0.8, 0.95, 0.1)
        reference.step()
    torch.testing.assert_close(ours, theirs.detach())


def test_every_parameter_has_exactly_one_rule():
    for name, _ in build_model(Config(skips=True), 300).named_parameters():
        rule_of(name)
    with pytest.raises(AssertionError, match="surprise"):
        rule_of("surprise")


def test_buckets_hold_every_parameter_once_for_any_world_size():
    for size in (1, 2, 3, 8):  # 8 square matrices (qkv, out) and 4 of the MLP: none a multiple of 3
        model = build_model(parse_args(TINY), VOCAB)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        buckets = train_gpt.Optimizer(model, Config(), world_of(0, size)).buckets
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name])
            p.grad.add_(1), p.data.add_(1)
        for values in ("weights", "grads"):
            total = sum(getattr(bucket, values).sum() for bucket in buckets)
            size_of_all = sum(p.numel() for p in model.parameters())
            expected = size_of_all + (sum(b.sum() for b in before.values()) if values == "weights" else 0)
            torch.testing.assert_close(total, torch.as_tensor(expected, dtype=torch.float32), rtol=1e-4, atol=0.1)
        assert all(len(bucket.weights) == size * bucket.local_size for bucket in buckets)


def test_schedules():
    config = Config(steps=1000)
    assert [lr_scale(step, config) for step in (0, 400)] == [1.0, 1.0]
    assert [lr_scale(step, config) for step in (700, 1000)] == pytest.approx([0.5, 0.0])
    assert [muon_momentum(step, config) for step in (0, 150, 300, 999)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    falling = dataclasses.replace(config, muon_momentum_cooldown=10)
    assert [muon_momentum(step, falling) for step in (990, 995)] == pytest.approx([0.95, 0.9])


def test_stages_say_batch_position_and_learning_rate():
    config = parse_args([*TINY, "--ngram_update_every=2"], Staged)
    # 20 / 3, on an update's border
    assert [(stage.first, stage.end) for stage in config.stage_list] == [(0, 6), (6, 20)]
    batches = [config.stage(step).batch_tokens for step in range(20)]
    assert batches == [768] * 6 + [1536] * 14
    assert [config.tokens_before(step) for step in range(21)] == [sum(batches[:step]) for step in range(21)]
    assert (lr_scale(5, config), lr_scale(6, config)) == (0.7, 1.0)


# ---- whole runs ------------------------------------------------------------------------------------------------------

GOLDEN = 3.33084


def test_golden_run(tiny):
    """20 steps of a tiny config end where they always did; a change that moves them must say why."""
    final = train_gpt.main(tiny)
    assert final == pytest.approx(GOLDEN, abs=5e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_repeats_bit_for_bit(tiny, dtype):
    flags = [*tiny, f"--dtype={dtype}"]
    assert train_gpt.main(flags) == train_gpt.main(flags)


def test_bfloat16_ends_near_float32(tiny):
    """On any CPU, with units for it or without; orthogonalization runs in it too."""
    final = train_gpt.main([*tiny, "--dtype=bfloat16"])
    assert final != GOLDEN and final == pytest.approx(GOLDEN, abs=2e-2)


def test_torchrun_agrees_with_one_process(tiny, tmp_path):
    """A whole launch of a variant's script; tests of ranks below start theirs without torchrun."""
    # bf16 rows would round the last bits into view
    flags = [*tiny, "--ngram_update_every=2", "--ngram_dtype=float32", *RECIPE]
    train_gpt.main([*flags, "--run_id=one"], config_class=Staged)
    several = run_trainer(*flags, ranks=3, script="tests/staged.py")
    assert several.returncode == 0, several.stderr
    assert several.stdout.count("plan for 3 ranks on cpu") == 1
    one = (tmp_path / "logs/one.txt").read_text()
    assert len(losses(one)) == 5 and losses(one)[-1] < losses(one)[0] - 0.3
    np.testing.assert_allclose(losses(several.stdout), losses(one), rtol=0, atol=1.1e-5)  # five digits are printed


def test_ranks_agree_with_one_process(tiny, tmp_path):
    flags = [*tiny, "--ngram_update_every=2", "--ngram_dtype=float32"]
    one, several = train_gpt.main([*flags, "--run_id=one"]), main_on_ranks(2, [*flags, "--run_id=two"])
    assert several[0] == several[1] == pytest.approx(one, abs=1e-5)
    logs = [losses((tmp_path / f"logs/{name}.txt").read_text()) for name in ("one", "two")]
    assert len(logs[0]) == 5
    np.testing.assert_allclose(*logs, rtol=0, atol=1.1e-5)


def test_micro_batches_change_memory_alone(tiny):
    whole, micro = (train_gpt.main([*tiny, "--ngram_dtype=float32", f"--micro_batch_tokens={tokens}"])
                    for tokens in (0, 160))
    assert micro == pytest.approx(whole, abs=2e-5)


@pytest.mark.parametrize("flag",
                         ["--ngram_rows=0", "--ngram_signs=0", "--ngram_dtype=float32", "--ngram_orders=2",
                          "--sample_tokens=0"])
def test_ablations_run(tiny, flag):
    assert math.isfinite(train_gpt.main([*tiny, flag, "--steps=3"]))


def test_table_helps_on_text_that_n_grams_predict(tiny):
    assert train_gpt.main(tiny) < train_gpt.main([*tiny, "--ngram_rows=0"]) - 0.02


def state_of(trainer) -> list:
    table, optimizer = trainer.table, trainer.optimizer
    tensors = [t for tensors in optimizer.saved().values() for _, t in sorted(tensors.items())]  # weights and moments
    tensors += [t for bucket in optimizer.buckets for t in (bucket.weights, bucket.grads)]
    return [t.clone() for t in (*tensors, table.rows, table.second, table.last)] + [
        torch.tensor([optimizer.updates, table.updates]), torch.random.get_rng_state()]


@pytest.mark.parametrize("more", [[], ["--ngram_device=cpu"]], ids=["beside", "host"])
@pytest.mark.parametrize("flags, config_class", KINDS.values(), ids=KINDS)
def test_warm_up_leaves_everything_as_it_was(tiny, flags, config_class, more, monkeypatch):
    """State and numbers, bit for bit."""
    flags = [*tiny, "--ngram_update_every=2", *flags, *more]
    config = parse_args(flags, config_class)
    with join_world(config) as world:
        dataset = open_dataset(config)
        fresh, warmed = Trainer(config, world, dataset), Trainer(config, world, dataset)
        before = state_of(fresh)
        warmed.warm_up()
        assert all(torch.equal(a, b) for a, b in zip(before, state_of(warmed), strict=True))
    warm = train_gpt.main(flags, config_class)
    monkeypatch.setattr(train_gpt, "WARMUP_STEPS", 0)
    assert train_gpt.main(flags, config_class) == warm


def evaluate_on(config, world, seed):
    dataset = open_dataset(config)
    trainer = Trainer(config, world, dataset)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(config.ngram_rows, config.ngram_dim, generator=generator)
    low, high = world.part(config.ngram_rows)
    trainer.table.rows.copy_(table[low:high])
    with torch.no_grad():
        trainer.model.head.copy_(torch.randn(trainer.model.head.shape, generator=generator) * 0.3)
    return trainer.evaluate(0)


def test_validation_loss_is_the_same_for_any_world_size_and_micro_batch(tiny):
    values = [value for size, micro in ((2, 32), (3, 96))
              for value in on_ranks(size, evaluate_on, 1, flags=[*tiny, f"--micro_batch_tokens={micro}"])]
    config = parse_args(tiny)
    with join_world(config) as world:
        expected = evaluate_on(config, world, 1)
    assert values == pytest.approx([expected] * len(values), abs=1e-5) and expected > 1


def test_log_holds_what_made_the_run(tiny, tmp_path):
    final = train_gpt.main([*tiny, "--run_id=abc", "--target_loss=3.9", "--seed=4"])
    text = (tmp_path / "logs/abc.txt").read_text()
    header = json.loads(re.match(r"run:(\{.*\})\n", text)[1])
    assert header["config"]["seed"] == 4 and header["world_size"] == 1 and header["device_name"] == "cpu"
    assert header["target_loss"] == 3.9 and header["clock"] == "train-only" and header["torch"] == torch.__version__
    assert header["source_sha256"] == header["sources"]["train_gpt.py"]
    assert [path.name for path in (tmp_path / "logs").glob("*.py")] == [f"train_gpt_{header['source_sha256'][:16]}.py"]
    copy = tmp_path / f"logs/train_gpt_{header['source_sha256'][:16]}.py"
    assert copy.read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    values = re.findall(r"^step:(\d+)/20 val_loss:(\S+) train_time:(\d+)ms step_avg:(\S+)ms$", text, re.MULTILINE)
    assert [int(step) for step, *_ in values] == [0, 10, 20] and values[0][2:] == ("0", "nan")
    assert re.search(rf"^final step:20/20 val_loss:{final:.5f} train_time:{values[-1][2]}ms$", text, re.MULTILINE)
    assert re.search(r"\ntarget val_loss:3.9 met at step:(10|20) train_time:\d+ms\n$", text)
    with pytest.raises(UserError, match="abc.txt: found a file of that name"):
        train_gpt.main([*tiny, "--run_id=abc"])
    train_gpt.main([*tiny, "--run_id=other", "--target_loss=0.1"], config_class=Staged)
    other = (tmp_path / "logs/other.txt").read_text()
    assert other.endswith("target val_loss:0.1 not met\n") and text == (tmp_path / "logs/abc.txt").read_text()
    sources = json.loads(re.match(r"run:(\{.*\})\n", other)[1])["sources"]
    assert sources.keys() == {"train_gpt.py", "staged.py"} and len(list((tmp_path / "logs").glob("*.py"))) == 2
    copy = tmp_path / f"logs/staged_{sources['staged.py'][:16]}.py"
    assert copy.read_bytes() == (ROOT / "tests/staged.py").read_bytes()


def test_a_terminal_shows_one_live_line(tiny, tmp_path):
    """In a pipe every step line is printed; on a terminal training steps overwrite one line. The file has them all."""
    terminal, inner = os.openpty()
    process = subprocess.Popen([sys.executable, str(ROOT / "train_gpt.py"), *tiny, "--run_id=t"], stdout=inner,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    os.close(inner)
    shown = b""
    try:
        while part := os.read(terminal, 1 << 16):
            shown += part
    except OSError:  # how Linux says that the other end is closed
        pass
    assert process.wait() == 0
    shown = shown.decode()
    assert len(re.findall(r"\r\x1b\[Kstep \d+/20  loss \d\.\d{3}  [\d,]+ tokens/s  \d+:\d\d left", shown)) == 20
    assert "train_loss" not in shown and "step:10/20 val_loss" in shown and "final step:20/20" in shown
    assert len(re.findall(r"^step:\d+/20 train_loss", (tmp_path / "logs/t.txt").read_text(), re.MULTILINE)) == 2


SCREENS = {  # a shell's words behind the trainer's command
    "a reader that leaves": "2>&1 | head -4", "a reader that is gone": "2>&1 | true", "a full device": "> /dev/full"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("screen", SCREENS)
def test_a_screen_that_takes_no_more_does_not_end_the_run(tiny, tmp_path, screen):
    command = f'"$@" {SCREENS[screen]}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command, "bash", sys.executable, str(ROOT / "train_gpt.py"), *tiny,
                           "--run_id=s"],
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    log = (tmp_path / "logs/s.txt").read_text()
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^warning: standard output: found .*; training continues$", log, re.MULTILINE)) == 1
    assert len(losses(log)) == 5 and re.search(r"^final step:20/20 val_loss.*\ntarget val_loss", log, re.MULTILINE)


def test_the_log_ends_with_where_the_time_went(tiny, tmp_path):
    train_gpt.main([*tiny, "--run_id=r"])
    log = (tmp_path / "logs/r.txt").read_text()
    waited, table, whole = map(float,
                               re.search(r"^waited for data (\S+) s, table (\S+) s of (\S+) s$", log,
                                         re.MULTILINE).groups())
    assert 0 < table < whole and waited < whole
    assert 0 < float(re.search(r"^(\S+) TFLOP/s a rank$", log, re.MULTILINE)[1]) < 1
    assert "compiled on the clock" not in log


def test_a_loss_that_is_not_finite_ends_the_run(tiny, tmp_path):
    with pytest.raises(UserError,
                       match=r"training loss: found (nan|inf|-inf) after step \d+, expected a finite number"):
        train_gpt.main([*tiny, "--muon_lr=1e38", "--run_id=bad"])
    log = (tmp_path / "logs/bad.txt").read_text()
    assert re.search(r"^error: training loss: ", log, re.MULTILINE) and "final step" not in log


# ---- bad input and plans ---------------------------------------------------------------------------------------------

def copy_data(tiny_data, tmp_path):
    for path in tiny_data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def cut_train(folder):
    path = folder / "tiny_train_000002.bin"
    path.write_bytes(path.read_bytes()[:-100])


FAULTS = {
    "no shards": (lambda folder: [path.unlink() for path in folder.glob("*")],
                  r"found no \*_train_\*\.bin, expected token shards"),
    "no validation": (lambda folder: (folder / "tiny_val_000000.bin").unlink(), r"found no \*_val_\*\.bin"),
    "cut short": (cut_train, r"tiny_train_000002\.bin: found 40926 bytes, expected 41026"),
    "foreign file": (lambda folder: (folder / "x_train_1.bin").write_bytes(b"x" * 3000),
                     r"x_train_1\.bin: found magic"),
    "id too large": (lambda folder: write_shard(folder / "tiny_train_000002.bin", [1, 2, VOCAB] * 9000),
                     r"tiny_train_000002\.bin: found token id 61, expected ids below its vocabulary size 61"),
    "two vocabularies": (lambda folder: write_shard(folder / "tiny_train_000002.bin", [1] * 9000, 99),
                         r"tiny_train_000002\.bin: found vocabulary size 99"),
    "too few tokens": (lambda folder: [(folder / f"tiny_train_00000{i}.bin").unlink() for i in (1,)],
                       r"found 20,001 train tokens, expected 30,721 for 20 steps;.*--epochs=2"),
    "too little validation": (lambda folder: write_shard(folder / "tiny_val_000000.bin", [1] * 1000),
                              r"--val_tokens=992"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_data_ends_in_one_clear_error(tiny, tiny_data, tmp_path, fault):
    make, message = FAULTS[fault]
    folder = copy_data(tiny_data, tmp_path)
    make(folder)
    with pytest.raises(UserError, match=message):
        train_gpt.main([*tiny, f"--data={folder}"])


def test_a_small_text_is_told_all_that_it_needs_at_once(tiny, tiny_data, tmp_path):
    folder = copy_data(tiny_data, tmp_path)
    for fault in ("too few tokens", "too little validation"):
        FAULTS[fault][0](folder)
    with pytest.raises(UserError, match=r"20,001 train .* 1,000 validation .*--epochs=2 .*--val_tokens=992"):
        train_gpt.main([*tiny, f"--data={folder}"])
    train_gpt.main([*tiny, f"--data={folder}", "--epochs=2", "--val_tokens=992"])


def test_bad_data_ends_every_rank(tiny, tiny_data, tmp_path):
    """The bad id lies in a shard that only rank 1 reads."""
    folder = copy_data(tiny_data, tmp_path)
    FAULTS["id too large"][0](folder)
    with pytest.raises((UserError, FollowingError), match=FAULTS["id too large"][1]):  # of rank 0, which waits for none
        main_on_ranks(3, [*tiny, f"--data={folder}"])


def test_compile_without_a_compiler_is_told_so(tiny, tmp_path):
    environment = {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "train_gpt.py", *tiny, "--compile", "--run_id=r"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"^error: --compile: found that torch cannot .*, expected a C\+\+ compiler", done.stderr, re.M)
    assert "there is no C++ compiler" in (tmp_path / "logs/r.txt").read_text()  # of the table's loops


def test_epochs_read_the_data_again(tiny, tmp_path):
    write_shard(tmp_path / "t_train_1.bin", markov_tokens(9000, 1))
    write_shard(tmp_path / "t_val_1.bin", markov_tokens(3000, 2))
    assert math.isfinite(train_gpt.main([*tiny, f"--data={tmp_path}", "--epochs=4"]))


def test_dry_run_plans_without_training(tiny, tmp_path, capsys):
    assert math.isnan(train_gpt.main([*tiny, "--dry_run"]))
    out = capsys.readouterr().out
    assert "plan for 1 rank on" in out and "train tokens on disk" in out and "50,001" in out and "table rows" in out
    assert "step:" not in out and not (tmp_path / "logs").exists()


def test_flops_are_what_torch_counts():
    """Products by torch's own counter; of attention, which it counts unmasked, the pairs that a mask lets through."""
    config = dataclasses.replace(parse_args([*TINY, "--layers=4"]), stages=(dict(windows=(5, 16)),))
    model, table_rows = build_model(config, VOCAB), torch.randn(8, 32, 24)
    batch = make_batch(torch.randint(0, DOC_START, (8, 33)), 8, 8, DOC_START)
    with FlopCounterMode(display=False) as counter:
        loss = model(batch.tokens[0], batch.starts[0], table_rows, batch.targets[0], tied=False,
                     **stage_inputs(config, batch.starts[0]))
        loss.backward()
    products = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    seen = [int(attention_mask(batch.starts[0, :1], window, flex=False).sum()) for window in (5, 5, 5, 16)]
    attention = 3 * sum(4 * config.model_dim * pairs for pairs in seen) / 32
    found = model.flops_per_token((5, 16))
    assert found == pytest.approx(products / 256 + attention, rel=5e-3)  # gates are left out


@pytest.mark.parametrize("track, size, gigabytes", [("fineweb", 8, 80), ("fineweb80", 1, 80), ("fineweb24", 1, 24)])
def test_presets_fit_their_cards(track, size, gigabytes):
    config = parse_args([f"--track={track}", "--device=cuda", "--dry_run", f"--ranks={size}"])
    plan = make_plan(config, World(0, size, size, torch.device("cuda"), None, None), 50257, 0)
    assert 0.5 * gigabytes * 1e9 < plan["bytes_per_rank"] < 0.95 * gigabytes * 1e9


def test_ranks_that_are_not_here_can_be_planned_for(capsys):
    assert math.isnan(train_gpt.main(["--track=fineweb", "--device=cuda", "--dry_run", "--ranks=4", "--gpu=A100"]))
    lines = dict(re.findall(r"^  (\S.*?) {2,}([\d,.]+)", capsys.readouterr().out, re.MULTILINE))
    tokens, flops = 393_216, float(lines["flops per token"].replace(",", ""))
    assert float(lines["least compute ms per step"]) == pytest.approx(tokens * flops / 4 / 312e12 * 1e3, rel=1e-3)
    sent = sum(float(lines[f"{what} exchange per step"].replace(",", "")) for what in ("dense", "table"))
    assert float(lines["least exchange ms per step"]) == pytest.approx(sent * 2**20 / 300e9 * 1e3, rel=1e-2)


def test_record_size_plans_under_16_gib_a_rank(tiny_data):
    config = parse_args(["--device=cpu", "--track=fineweb", f"--data={tiny_data}"])
    gpu_world = World(0, 8, 8, torch.device("cuda"), None, None)
    dataset = open_dataset(parse_args([*TINY, f"--data={tiny_data}"]))
    plan = make_plan(config, gpu_world, dataset.vocab_size, dataset.train.num_tokens)
    table = plan["table_rows_bytes"] + plan["table_state_bytes"]
    assert 84_602_880 * (768 * 2 + 8) / 8 <= table < 16 << 30


def test_a_run_that_cannot_fit_is_refused_before_it_allocates(tiny):
    with pytest.raises(UserError, match=r"memory: found .* GiB available .*; lower --model_dim"):
        train_gpt.main([*tiny, "--model_dim=400000", "--ngram_rows=0", "--head_chunk_tokens=1"])
    plan = {"bytes_per_rank": 1 << 60, "table_rows_bytes": 1 << 59, "optimizer_bytes": 1 << 40}
    with pytest.raises(UserError, match=r"of which table_rows takes 536870912.00; lower --ngram_rows"):
        check_fits(plan, world_of(0, 1))


def test_a_sample_is_in_the_words_of_the_tokenizer(tiny, tiny_data, tmp_path, capsys):
    folder = copy_data(tiny_data, tmp_path)
    tokens = [bytes([i]) for i in range(97, 97 + 26)] + [bytes([i]) for i in range(65, 65 + 34)]
    import base64
    (folder / "tokenizer.tiktoken").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i,
                                                         t in enumerate(tokens)))
    train_gpt.main([*tiny, f"--data={folder}", "--sample_tokens=5", "--run_id=s"])
    said = re.search(r"^sample:\n((?:  \|.*\n)+)", capsys.readouterr().out, re.MULTILINE)[1]
    assert said in (tmp_path / "logs/s.txt").read_text()
    assert len(re.findall(r"[A-Za-z\[\\\]^_`]|<\|endoftext\|>", said.replace("  | ", ""))) == 5
    (folder / "tokenizer.tiktoken").write_bytes(b"YQ== 0\n")
    with pytest.raises(UserError, match="tokenizer.tiktoken: found 2 ids, expected the shards' 61"):
        train_gpt.main([*tiny, f"--data={folder}"])


def test_a_screen_that_cannot_show_a_character_loses_no_line(tiny, tmp_path):
    """The log keeps it as it is; the screen gets its number."""
    config = parse_args(tiny)
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with join_world(config) as world, contextlib.redirect_stdout(screen):
        log = train_gpt.RunLog(dataclasses.replace(config, run_id="r"), world, {}, set())
        log.line("caf\u00e9 \ufffd")
        log.line("behind it")
    assert (tmp_path / "logs/r.txt").read_text(encoding="utf-8").endswith("caf\u00e9 \ufffd\nbehind it\n")
    assert screen.buffer.getvalue().decode().endswith("caf\\xe9 \\ufffd\nbehind it\n")


def test_lines_wait_for_space_on_the_disk(tiny, tmp_path, capsys):
    """More of them than one block holds."""
    config = parse_args([*tiny, "--run_id=r"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with join_world(config) as world:
        log = train_gpt.RunLog(config, world, {}, set())
        before = (tmp_path / "logs/r.txt").stat().st_size
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (before + 100, limits[1]))
        for i in range(3000):
            log.line(f"line {i}", screen=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        log.line("space")
    lines = (tmp_path / "logs/r.txt").read_text().splitlines()[1:]
    assert lines == [*(f"line {i}" for i in range(3000)), "space"]
    assert capsys.readouterr().err.count("found File too large, expected to write there; training continues") == 1
