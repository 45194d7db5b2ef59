"""Shards, the stream of rows, each rank's batches, and the thread that makes them ahead."""
from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
import torch

from conftest import DOC_START, TINY, markov_tokens, on_ranks, write_shard
from train_gpt import (Loader, Shard, TokenStream, UserError, World, golden_stride, identify_data, join_world,
                       make_batch, open_dataset,
                       open_shard, parse_args, rank_batch)


def world_of(rank: int, size: int) -> World:
    return World(rank, size, size, torch.device("cpu"), None, None)


# ---- stream -------------------------------------------------------------------------------------------------------

@pytest.fixture
def stream_of(tmp_path):
    def make(lengths, seq_len, spread=False):
        tokens = np.arange(sum(lengths)) % 50_000
        cuts = np.cumsum([0, *lengths])
        shards = [open_shard(write_shard(tmp_path / f"s_train_{i}.bin", tokens[a:b], 50_257, 50_256))
                  for i, (a, b) in enumerate(zip(cuts, cuts[1:]))]
        return TokenStream(shards, seq_len, spread)
    return make


@pytest.mark.parametrize("lengths", [[100], [33, 1, 66], [5] * 20])
def test_rows_are_the_shards_laid_end_to_end(stream_of, lengths):
    stream = stream_of(lengths, 8)
    assert stream.num_rows == 12  # 96 inputs and targets up to 97 of the 100 tokens
    rows = stream.read(0, 12)
    assert rows.dtype == torch.int64
    assert torch.equal(rows, torch.arange(12)[:, None] * 8 + torch.arange(9))
    assert torch.equal(stream.read(12, 2), rows[:2])  # it starts over at row ends, never inside one


def test_a_last_row_needs_its_target(stream_of):
    assert stream_of([96], 8).num_rows == 11 and stream_of([97], 8).num_rows == 12


@pytest.mark.parametrize("num_rows", [1, 2, 3, 10, 97, 997, 1000, 48_597])
def test_spread_order_visits_each_row_once_and_evenly(num_rows):
    stride = golden_stride(num_rows)
    order = np.arange(num_rows) * stride % num_rows
    assert len(set(order.tolist())) == num_rows
    if num_rows > 500:
        gaps = np.diff(np.sort(order[:100]))
        assert gaps.max() < 2 * num_rows / 100


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_rows", [1, 3, 7])
def test_slices_of_all_ranks_are_the_same_tokens(stream_of, size, micro_rows):
    stream = stream_of([1000], 8, spread=True)
    batches = [rank_batch(stream, 20, 7, micro_rows, 50_256, world_of(rank, size)) for rank in range(size)]
    assert len({batch.tokens.shape for batch in batches}) == 1
    real = [batch.targets.flatten(0, 1)[:, 0] >= 0 for batch in batches]
    tokens = torch.cat([batch.tokens.flatten(0, 1)[keep] for batch, keep in zip(batches, real)])
    targets = torch.cat([batch.targets.flatten(0, 1)[keep] for batch, keep in zip(batches, real)])
    expected = stream.read(20, 7)
    assert torch.equal(tokens, expected[:, :-1]) and torch.equal(targets, expected[:, 1:])


def test_segments_begin_at_documents_and_rows():
    batch = make_batch(torch.tensor([[5, 9, 6, 7, 9], [7, 7, 7, 7, 7]]), 3, 3, 9)
    assert batch.starts.tolist() == [[[True, True, False, False], [True, False, False, False], [True] * 4]]
    assert batch.targets.tolist() == [[[9, 6, 7, 9], [7] * 4, [-1] * 4]]


def test_segments_of_a_shorter_length_begin_within_a_row():
    batch = make_batch(torch.tensor([[5, 9, 6, 7, 8, 4, 9]]), 1, 1, 9, length=2)
    assert batch.starts.tolist() == [[[True, True, True, False, True, False]]]


# ---- what identifies the data ---------------------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path):
    for i, name in enumerate(("t_train_1.bin", "t_train_2.bin", "t_val_0.bin")):
        write_shard(tmp_path / name, markov_tokens(4000, i))
    return tmp_path


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the shards that are read whole, as they are."""
    names, read = [], Shard.hash

    def noted(shard):
        names.append(shard.path.name)
        return read(shard)
    monkeypatch.setattr(Shard, "hash", noted)
    return names


def identity(folder, *flags) -> dict:
    config = parse_args([*TINY, f"--data={folder}", *flags])
    with join_world(config) as world:
        return identify_data(config, open_dataset(config), world)


def test_any_token_changes_a_shards_hash(tmp_path):
    tokens = markov_tokens(300, 1)
    path, hashes = tmp_path / "t_train_1.bin", set()
    for position in range(-1, 300):
        changed = tokens.copy()
        changed[position] = (tokens[position] + (position >= 0)) % DOC_START
        hashes.add(open_shard(write_shard(path, changed)).hash())
    assert len(hashes) == 301
    assert open_shard(write_shard(path, tokens, 99)).hash() not in hashes  # the same tokens of another vocabulary


def test_an_id_beyond_the_vocabulary_is_found_wherever_it_stands(tmp_path):
    shard = open_shard(write_shard(tmp_path / "t_train_1.bin", [*markov_tokens(299, 1), 61]))
    with pytest.raises(UserError, match=r"t_train_1.bin: found token id 61, expected ids below its vocabulary size 61"):
        shard.hash()


def test_only_what_changed_is_read_again(folder, hashed):
    first = identity(folder)
    assert sorted(hashed) == ["t_train_1.bin", "t_train_2.bin", "t_val_0.bin"]
    hashed.clear()
    before = (folder / "shards.json").stat()
    assert identity(folder) == first and not hashed
    assert (folder / "shards.json").stat().st_mtime_ns == before.st_mtime_ns  # nor is it written again
    with open(folder / "t_train_2.bin", "r+b") as file:  # in the middle
        file.seek(1024 + 2 * 2345)
        file.write(b"\x07\x00" if file.read(2) != b"\x07\x00" else b"\x08\x00")
    changed = identity(folder)
    assert hashed == ["t_train_2.bin"]
    assert changed["train"] != first["train"] and changed["val"] == first["val"]
    assert [a == b for a, b in zip(changed["shards"], first["shards"])] == [True, False]
    assert identity(folder, "--val_tokens=1024")["val"] != first["val"]
    write_shard(folder / "t_val_0.bin", markov_tokens(4000, 9))
    assert identity(folder)["val"] != first["val"]


@pytest.mark.parametrize("text", [
    "{", "[]", "null", '{"t_train_1.bin": {"a": 1, "b": 2, "c": 3}}', '{"t_train_1.bin": null}',
    '{"t_train_1.bin": [1, 2]}', '{"t_train_1.bin": 5}', "\xff", "SHORT", "OLD"])
def test_a_damaged_list_of_hashes_does_no_harm(folder, text):
    first, manifest = identity(folder), folder / "shards.json"
    known = json.loads(manifest.read_text())
    if text == "SHORT":
        text = json.dumps(known | {"t_train_1.bin": known["t_train_1.bin"][:2]})
    elif text == "OLD":
        text = json.dumps(known | {"t_train_1.bin": [known["t_train_1.bin"][0], 0, "0" * 64]})
    manifest.write_bytes(text.encode("latin-1"))
    assert identity(folder) == first
    assert json.loads(manifest.read_text()) == known  # and it is mended


def test_a_list_that_cannot_be_written_does_no_harm(folder, hashed):
    (folder / "shards.json").mkdir()
    assert identity(folder) == identity(folder) and len(hashed) == 6
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["shards.json", "t_train_1.bin", "t_train_2.bin", "t_val_0.bin"]


def identity_on(config, world):
    return identify_data(config, open_dataset(config), world)


def test_ranks_share_the_reading(folder):
    found = on_ranks(2, identity_on, flags=[*TINY, f"--data={folder}"])
    listed = json.loads((folder / "shards.json").read_text())
    assert len(listed) == 3
    (folder / "shards.json").unlink()
    assert found == [identity(folder)] * 2 and json.loads((folder / "shards.json").read_text()) == listed


# ---- the loader -----------------------------------------------------------------------------------------------------

class Prepared:
    """Notes what the loader's thread does; call `fails` raises."""

    def __init__(self, fails: int = -1):
        self.calls, self.fails, self.threads = [], fails, set()

    def __call__(self, call: int) -> int:
        self.threads.add(threading.current_thread())
        self.calls.append(call)
        if call == self.fails:
            raise UserError(f"call {call} fails")
        return 10 * call


def settled(prepared: Prepared, count: int) -> bool:
    """Whether the thread makes `count` calls and, given time, no more."""
    for _ in range(200):
        if len(prepared.calls) >= count:
            break
        time.sleep(0.01)
    time.sleep(0.03)
    return len(prepared.calls) == count


def test_items_come_in_order_and_end():
    prepared = Prepared()
    loader = Loader(prepared, range(3, 30))
    assert [loader.next() for _ in range(27)] == [10 * call for call in range(3, 30)]
    assert loader.next() is None and loader.next() is None
    loader.rest()
    assert prepared.calls == list(range(3, 30)) and threading.current_thread() not in prepared.threads
    assert Loader(prepared, range(0)).next() is None


def test_the_loader_stays_ahead_by_so_many_and_no_more():
    prepared = Prepared()
    loader = Loader(prepared, range(20))
    for asked in range(1, 8):
        assert settled(prepared, asked - 1 + Loader.AHEAD)
        assert loader.next() == 10 * (asked - 1)


def test_after_a_rest_nothing_is_made_before_the_next_call():
    prepared = Prepared()

    def slowly(call):
        time.sleep(0.02)
        return prepared(call)
    loader = Loader(slowly, range(20))
    for asked in (1, 2, 3):
        assert loader.next() == 10 * (asked - 1)
        loader.rest()
        assert len(prepared.calls) == asked + Loader.AHEAD  # all that it may, at once
        assert settled(prepared, asked + Loader.AHEAD)


@pytest.mark.parametrize("fails", [0, 3])
def test_an_error_arrives_where_its_item_would_have(fails):
    prepared = Prepared(fails)
    loader = Loader(prepared, range(20))
    assert settled(prepared, min(fails + 1, Loader.AHEAD))
    assert [loader.next() for _ in range(fails)] == [10 * call for call in range(fails)]
    for _ in range(2):
        with pytest.raises(UserError, match=f"call {fails} fails"):
            loader.next()
    with pytest.raises(UserError, match=f"call {fails} fails"):
        loader.rest()
    assert prepared.calls == list(range(fails + 1))
