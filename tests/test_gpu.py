"""The CPU's assertions again on a GPU; skipped where there is none. `./run.sh test` runs it where there is one."""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import train_gpt
from conftest import DOC_START, VOCAB
from staged import Staged
from test_host_rows import walk
from train_gpt import (NgramTable, Trainer, attend, attention_mask, build_model, join_world, make_batch, make_plan,
                       open_dataset, parse_args,
                       rotary_table)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SIZES = ["--steps=20", "--batch_tokens=8192", "--seq_len=256", "--layers=4", "--model_dim=128", "--heads=2",
         "--ngram_dim=128",
         "--ngram_rows=40001", "--val_tokens=4096", "--val_every=10", "--sample_tokens=0", "--adam_lr=0.008",
         "--epochs=9",
         "--value_embeds=0,3"]


@dataclass(frozen=True)
class Wide(Staged):
    stages: tuple = (dict(until=1 / 2, batch=1 / 2, windows=(32, 64), lr=0.7), dict(windows=(64, 128)))


@pytest.fixture(autouse=True)
def left_the_world():
    """What failed on a GPU leaves its process group behind, and the next test is not to pay for it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def flags(device: str, *more: str) -> list[str]:
    return ["--track=cpu", f"--device={device}", *SIZES, *more]


@pytest.mark.parametrize("window", [40, 256])
def test_compiled_flex_attention_equals_the_dense_one(window):
    generator = torch.Generator("cuda").manual_seed(0)
    starts = torch.rand(2, 256, generator=generator, device="cuda") < 0.02
    starts[:, 0] = True
    inputs = [torch.randn(2, 2, 256, 64, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    results = []
    for flex in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        function = torch.compile(attend, fullgraph=True, dynamic=False) if flex else attend
        out = function(*leaves, attention_mask(starts, window, flex))
        out.backward(inputs[0])
        results.append([out, *(leaf.grad for leaf in leaves)])
    for dense, skipping in zip(*results):
        torch.testing.assert_close(skipping, dense, rtol=3e-2, atol=3e-2)


def test_compiled_model_equals_the_eager_one():
    config = parse_args(flags("cuda"), Wide)
    batch = make_batch(torch.randint(0, VOCAB, (4, 257)), 4, 4, DOC_START)
    tokens, starts, targets = (t[0].cuda() for t in (batch.tokens, batch.starts, batch.targets))
    results = []
    for compiled in (False, True):
        model = build_model(config, VOCAB).cuda()
        with torch.no_grad():
            for p in model.parameters():
                drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
                p.copy_(drawn * (0.5 if p.dim() < 2 else p.shape[-1] ** -0.5))
        memory = torch.randn(4, 256, 128, generator=torch.Generator().manual_seed(1)).cuda().bfloat16().requires_grad_()
        masks = tuple(attention_mask(starts, window, flex=compiled) for window in (64, 128))
        forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
        loss = forward(tokens, starts, memory, targets, masks, rotary_table(config, 1).cuda(), False)
        loss.backward()
        results.append([loss.detach(), memory.grad.float(), model.embed.grad, model.head.grad,
                        model.blocks[0].qkv.grad])
    for eager, fused in zip(*results):
        assert (eager - fused).norm() <= 5e-2 * eager.norm() and eager.norm() > 0


@pytest.mark.parametrize("place", ["auto", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_table_equals_the_one_on_the_cpu(dtype, place):
    results = []
    for device in ("cpu", "cuda"):
        config = parse_args(["--track=cpu", f"--device={device}", "--ngram_rows=1003", "--model_dim=64",
                             "--ngram_dim=64", f"--ngram_dtype={dtype}",
                             "--dtype=float32", f"--ngram_device={place}"])
        generator = torch.Generator().manual_seed(0)
        with join_world(config) as world:
            table = NgramTable(config, world)
            table.loops = None
            routes = [table.route(*(torch.randint(0, high, (1, 2, 500), generator=generator) for high in (1003, 8192)))
                      for _ in range(20)]
            cycles = [train_gpt.to_device(cycle, world.device) for cycle in routes]
            for cycle, upcoming in zip(cycles, [*cycles[1:], None]):
                read = table.read(table.fetch(cycle), cycle.reads[0], cycle.signs[0])
                if table.host and upcoming:
                    table.host.look_ahead(cycle, upcoming)
                grads = torch.empty(cycle.asked, 64, device=world.device)
                table.add_grad(grads, cycle.slots[0], cycle.signs[0],
                               torch.randn(500, 64, generator=generator).to(world.device), fresh=True)
                table.update(cycle, grads, 0.1)
            table.wait()
            results.append([t.float().cpu() for t in (read, table.rows, table.second, table.last)])
    for ours, reference in zip(*results):
        torch.testing.assert_close(ours, reference, rtol=2e-2 if dtype == "bfloat16" else 1e-3, atol=1e-2
                                   if dtype == "bfloat16" else 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_on_the_host_are_never_stale(dtype):
    """With late gradients, a thread that is held up, parts of a few rows: every read as without looking ahead."""
    results = []
    for looks_ahead, late_s in ((False, 0), (True, 0), (True, 0.004)):
        config = parse_args(["--track=cpu", "--device=cuda", "--ngram_rows=1003", "--ngram_dim=6", "--ngram_signs=64",
                             f"--ngram_dtype={dtype}",
                             "--ngram_device=cpu"])
        with join_world(config) as world:
            results.append(walk(config, world, 60, looks_ahead, late_s))
    for result in results[1:]:
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(result, results[0], strict=True))


@pytest.mark.parametrize("more",
                         [["--no_compile"], ["--compile"],
                          ["--compile", "--ngram_device=cpu", "--ngram_update_every=2"]])
def test_a_run_ends_where_the_cpus_does(tiny_data, tmp_path, more):
    data = [f"--data={tiny_data}", f"--out={tmp_path}"]
    on_gpu, on_cpu = (train_gpt.main(these, Wide)
                      for these in (flags("cuda", *data, *more), flags("cpu", *data, "--dtype=float32", *more[2:])))
    assert on_gpu == pytest.approx(on_cpu, abs=0.03)


@pytest.mark.parametrize("place", ["auto", "cpu"])
def test_peak_memory_stays_under_the_plan(tiny_data, place):
    config = parse_args(flags("cuda", f"--data={tiny_data}", "--batch_tokens=32768", "--ngram_rows=400001",
                              "--epochs=99",
                              f"--ngram_device={place}"), Wide)
    config = replace(config, stages=(dict(windows=(64, 128)),))
    with join_world(config) as world:
        dataset = open_dataset(config)
        plan = make_plan(config, world, dataset.vocab_size, dataset.train.num_tokens)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer = Trainer(config, world, dataset)
        trainer.warm_up()
        cycles = [train_gpt.to_device_all(trainer.prepare(cycle), world.device) for cycle in range(4)]
        for step, ((batch,), cycle) in enumerate(cycles[:3]):
            trainer.train_step(step, batch, cycle, upcoming=cycles[step + 1][1])
        trainer.wait_for_host()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= plan["bytes_per_rank"]
