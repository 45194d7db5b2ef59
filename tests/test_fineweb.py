"""data/fineweb.py as its users run it, a process of its own, against a hub on 127.0.0.1; and `verify`, in-process."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
from data import fineweb
from hub_server import COMMIT, Hub
from train_gpt import (TRACKS, UserError, load_tokenizer, lock_folder, open_shard, parse_args, save_shard_hashes,
                       shard_hashes)

VAL, TRAIN_1, TRAIN_2, TRAIN_3 = fineweb.shard_names(3)


def shard(num_tokens=3000, vocab_size=0, doc_start=0, largest_id=50256, seed=0) -> bytes:
    """A shard's bytes, laid out by hand from the format's description: FineWeb's leave vocabulary and start zero."""
    header = np.zeros(256, dtype="<i4")
    header[:5] = 20240520, 1, num_tokens, vocab_size, doc_start
    tokens = np.random.default_rng(seed).integers(0, largest_id + 1, num_tokens).astype("<u2")
    tokens[-1] = largest_id
    return header.tobytes() + tokens.tobytes()


@pytest.fixture
def files():
    return {name: shard(seed=i) for i, name in enumerate(fineweb.shard_names(3))}


def command(tmp_path, endpoint, *arguments):
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1",
                   "OMP_NUM_THREADS": "1"}
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        environment.pop(name, None)
    script = [sys.executable, str(ROOT / "data" / "fineweb.py"), *arguments, f"--out={tmp_path / 'out'}"]
    return dict(args=script, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def fetch(tmp_path, endpoint, *arguments):
    return subprocess.run(**command(tmp_path, endpoint, *arguments), timeout=120)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below folder, hidden ones too, but the lock, the hashes, and what a next call resumes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name not in (".lock", "shards.json") and ".fetch" not in path.parts}


def kept(folder: Path) -> dict[str, list]:
    return json.loads((folder / "shards.json").read_text())


def refused(*arguments) -> str:
    """The words with which a command is refused."""
    with pytest.raises(UserError) as error:
        fineweb.main([*map(str, arguments)])
    return str(error.value)


def test_faults_that_pass_are_survived_and_no_copy_is_left(tmp_path, files):
    faults = {("HEAD", VAL): [429],                         # the hub asks to wait, before the download
              ("GET", TRAIN_1): [("cut", 2000)],            # the connection breaks off in the body
              ("GET", TRAIN_2): [429],                      # and at the download itself
              ("GET", TRAIN_3): [("body", shard(3000, largest_id=60000, seed=3))]}      # right size, wrong ids
    cached = tmp_path / f"hf/hub/datasets--kjj0--fineweb10B-gpt2/snapshots/{COMMIT}/{VAL}"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(files[VAL][:-100])                   # a broken copy in the hub's own cache is not to be used
    with Hub(fineweb.REPO, files, faults, {"Retry-After": "0"}) as hub:
        result = fetch(tmp_path, hub.endpoint, "3")
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "out") == files
    for name, (size, changed_ns, digest) in kept(tmp_path / "out").items():
        shard_file = tmp_path / "out" / name
        assert (size, changed_ns) == (len(files.pop(name)), shard_file.stat().st_mtime_ns)
        assert digest == open_shard(shard_file).hash()
    assert not files                                        # all are known
    assert not any(faults.values())                         # every fault took place
    assert not (tmp_path / "out/.fetch").exists()
    sizes = [len(data) for name, data in contents(tmp_path / "hf").items() if not name.endswith(VAL)]
    assert sum(sizes) < 3000                                # less than half a shard: no copy of any in a cache


def test_a_rerun_repairs_and_leaves_the_whole_alone(tmp_path, files):
    out = tmp_path / "out"
    out.mkdir()
    (out / VAL).write_bytes(files[VAL])
    (out / TRAIN_1).write_bytes(files[TRAIN_1][:-2])        # cut short
    (out / TRAIN_2).write_bytes(shard(3000, vocab_size=257, doc_start=256, largest_id=256))     # another tokenizer's
    (out / ".fetch").mkdir()
    (out / ".fetch" / TRAIN_3).write_bytes(files[TRAIN_3])  # left by a killed run
    with Hub(fineweb.REPO, files) as hub:
        result = fetch(tmp_path, hub.endpoint, "3")
    assert result.returncode == 0, result.stderr
    assert contents(out) == files and kept(out).keys() == files.keys()
    assert {name for _, name in hub.requests} == {TRAIN_1, TRAIN_2, TRAIN_3}
    assert f"{TRAIN_1}: found 7022 bytes, expected 7024" in result.stderr
    assert f"{TRAIN_2}: found vocabulary size 257" in result.stderr


@pytest.fixture
def impatient(monkeypatch, tmp_path):
    """Fetch in this process, without the waits between the client's tries; returns the error's text."""
    def fetch_from(hub: Hub, *arguments: str) -> str:
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        return refused(*arguments, f"--out={tmp_path / 'out'}")
    return fetch_from


def test_what_stays_missing_is_named(tmp_path, files, impatient):
    del files[TRAIN_1]
    files[TRAIN_2] = shard(3000)[:-10]
    with Hub(fineweb.REPO, files, {("HEAD", TRAIN_3): [503] * 99}) as hub:
        error = impatient(hub, "3")
    assert contents(tmp_path / "out") == {VAL: files[VAL]} and kept(tmp_path / "out").keys() == {VAL}
    assert "3 of 4 shards are missing" in error and "kjj0/fineweb10B-gpt2" in error and VAL not in error
    address = f"{hub.endpoint}/datasets/{fineweb.REPO}/resolve/main"
    assert f"{TRAIN_1}: the hub answered 404 at {address}/{TRAIN_1}" in error
    assert f"{TRAIN_2}: what came from {hub.endpoint} is broken" in error
    assert f"{TRAIN_3}: the hub answered 503 at {address}/{TRAIN_3}" in error
    assert hub.requests.count(("HEAD", TRAIN_1)) == 1       # 404 is final
    assert hub.requests.count(("GET", TRAIN_2)) == 2 and hub.requests.count(("HEAD", TRAIN_3)) > 2


def test_no_hub_is_one_error_that_says_what_to_do(tmp_path, impatient):
    with Hub(fineweb.REPO, {}) as hub:
        pass                                                # its port is free again, nobody listens
    error = impatient(hub, "1")
    assert "2 of 2 shards are missing" in error and "by hand" in error and f"at {hub.endpoint}" in error
    assert contents(tmp_path / "out") == {}


def test_what_broke_off_is_fetched_by_the_next_call(tmp_path, files, impatient):
    with Hub(fineweb.REPO, files, {("GET", TRAIN_1): [("cut", 5000), 500]}) as hub:
        assert f"{TRAIN_1}: the hub answered 500" in impatient(hub, "1")
        assert contents(tmp_path / "out") == {VAL: files[VAL]}
        hub.requests.clear()
        fineweb.main(["1", f"--out={tmp_path / 'out'}"])
    assert contents(tmp_path / "out") == {VAL: files[VAL], TRAIN_1: files[TRAIN_1]}
    assert hub.requests.count(("GET", TRAIN_1)) == 1 and ("GET", VAL) not in hub.requests


def test_the_presets_shards_are_the_default():
    presets = [parse_args(["--device=cpu", f"--track={track}"]) for track in TRACKS if "fineweb" in track]
    assert -(-max(config.tokens_before(config.steps) for config in presets) // 100_000_000) == fineweb.PRESET_SHARDS


def test_a_tokenizer_that_cannot_be_had_costs_no_shard(tmp_path, files):
    with Hub(fineweb.REPO, files) as hub:
        started = command(tmp_path, hub.endpoint, "1", "--tokenizer")
        started["env"] |= {"TIKTOKEN_CACHE_DIR": str(tmp_path / "none"), "HTTPS_PROXY": "http://127.0.0.1:9"}
        result = subprocess.run(**started, timeout=120)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "tiktoken could not fetch GPT-2's vocabulary" in result.stderr
    assert contents(tmp_path / "out") == {name: files[name] for name in (VAL, TRAIN_1)}


def test_the_tokenizer_beside_the_shards_is_gpt2s(tmp_path):
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError):
        pytest.skip("GPT-2's vocabulary is not at hand")
    sys.path.insert(0, str(ROOT / "data"))
    fineweb.write_tokenizer(tmp_path / "tokenizer.tiktoken")
    sys.path.remove(str(ROOT / "data"))
    loaded = load_tokenizer(tmp_path, 50257)
    assert loaded.encode_ordinary("Hello wörld, 123") == encoding.encode_ordinary("Hello wörld, 123")
    assert loaded.n_vocab == 50257


def test_interrupt_leaves_nothing_half_written(tmp_path, files):
    faults = {("GET", name): [("hang", 2000)] for name in (TRAIN_1, TRAIN_2)}
    with Hub(fineweb.REPO, files, faults) as hub:
        process = subprocess.Popen(**command(tmp_path, hub.endpoint, "2", "--workers=3"))
        assert process.stdout.readline().startswith(str(tmp_path / "out"))
        assert VAL in process.stdout.readline()             # one is complete ...
        assert hub.hanging.wait(60)                         # ... and another is on its way
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors and "Traceback" not in errors
    assert contents(tmp_path / "out") == {VAL: files[VAL]}


@pytest.mark.parametrize("arguments, message", [
    (["0"], "N=0: expected 1 to 103"), (["104"], "N=104: expected 1 to 103"), (["1", "--workers=0"], "--workers=0")])
def test_bad_arguments(tmp_path, arguments, message):
    assert message in refused(*arguments, f"--out={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_second_run_is_refused(tmp_path):
    with lock_folder(tmp_path, "fetching shards"):
        assert "found another process fetching shards there" in refused("1", f"--out={tmp_path}")


# ---- verify ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path):
    for name in ("a_train_000001.bin", "a_train_000002.bin", "a_val_000000.bin"):
        (tmp_path / name).write_bytes(shard(500, vocab_size=4096, doc_start=4095, largest_id=4095))
    return tmp_path


def test_verify_whole(folder, capsys):
    fineweb.main(["verify", str(folder)])
    out = capsys.readouterr().out
    assert out.count("ok  ") == 3 and "3 shards, 0 bad, 1,000 tokens for training, 500 for validation" in out


@pytest.mark.parametrize("name, data, message", [
    ("a_train_000002.bin", b"", "found 0 bytes"),
    ("a_train_000002.bin", shard(500)[:-2], "found 2022 bytes, expected 2024"),
    ("a_train_000002.bin", shard(500, 4096, 4095, 4096), "found token id 4096"),
    ("a_train_000002.bin", shard(500, 4097, 4096, 4095), "found vocabulary size 4097"),
    ("a_val_000000.bin", shard(500, 4096, 0, 4095), "document start 0, expected 4096 and 4095"),
    ("a_val_000000.bin", b"x" * 2024, "not a token shard"),
])
def test_verify_names_the_bad_file(folder, capsys, name, data, message):
    (folder / name).write_bytes(data)
    err, out = refused("verify", folder), capsys.readouterr().out
    assert out.count("ok  ") == 2 and out.count("BAD ") == 1 and "3 shards, 1 bad" in out
    assert str(folder / name) in err and message in err


@pytest.mark.parametrize("name, part", [("a_val_000000.bin", "_val_"), ("a_train_*.bin", "_train_")])
def test_verify_wants_both_parts(folder, name, part):
    for file in folder.glob(name):
        file.unlink()
    assert f"found no whole *{part}*.bin" in refused("verify", folder)


def test_verify_missing_folder_among_good(folder):
    assert f"{folder / 'none'}: found no such folder" in refused("verify", folder, folder / "none")


def test_verify_names_a_shard_with_a_changed_token(folder, capsys):
    """One id that became another valid one, size and time of change as they were: only the kept hash can tell."""
    shards = [open_shard(path) for path in sorted(folder.glob("*.bin"))]
    save_shard_hashes(folder, shard_hashes(shards))
    fineweb.main(["verify", str(folder)])
    changed, status = shards[1].path, shards[1].path.stat()
    data = bytearray(changed.read_bytes())
    data[1024 + 2 * 250] ^= 1
    changed.write_bytes(data)
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    capsys.readouterr()
    err, out = refused("verify", folder), capsys.readouterr().out
    assert err.startswith("1 faults:") and f"{changed}: found tokens of hash" in err and "shards.json" in err
    assert out.count("ok  ") == 2 and out.count("BAD ") == 1
