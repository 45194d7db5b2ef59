"""Records: runs kept in the repository, their statistics, and the leaderboard of each track.

A record is records/<track>/<date>_<name>/: one folder of logs for each arm, the sources of the runs as text, and a
README.md. What stands between the markers in that file and in records/README.md is made from the logs alone.
"""
from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

from arm_stats import LOG_SUFFIXES, build_report, collect, expand_logs, read_files
from read_logs import Run
from tables import group_title, markdown_table, number, p_text, steps_text, to_markdown, tokens_text
from train_gpt import UserError, written_whole

KNOWN_TRACKS = ("cpu", "fineweb")
STUDIES = "studies"      # comparisons at equal steps or tokens, which race for no target and stand on no leaderboard
RECORD_P = 0.01          # an arm is ranked when its p is below this
BASELINE_ARM = "baseline"
RECORD_NAME = re.compile(r"\d{4}-\d\d-\d\d_.+")
BEGIN, END = "<!-- {}: made by compare.py --leaderboard -->", "<!-- end of {} -->"


# ---- archive --------------------------------------------------------------------------------------------------------

def archive(root: Path, name: str, paths: list[str], arm: str | None, track: str | None, date: str | None) -> None:
    """Move logs into the record `name` below `root`, with their sources. Everything is checked first, then copied, and
    only when all copies stand are the originals removed; a file that exists with other content is never overwritten."""
    if RECORD_NAME.fullmatch(_checked_name("--archive", name)):
        raise UserError(f"--archive {name}: expected a name without a date; the date is put before it")
    if arm is not None:
        _checked_name("--arm", arm)
    runs_of = read_files(expand_logs(paths))
    for log, runs in runs_of.items():
        if isinstance(runs, str):
            raise UserError(f"{log}: {runs}; expected a log of runs; nothing was moved")
    record = _record_folder(root, name, [run for runs in runs_of.values() for run in runs], track, date)
    moves = {log: record / (arm or log.resolve().parent.name) / log.name for log in runs_of}
    if len(set(moves.values())) < len(moves):
        twice = next(target for target in moves.values() if list(moves.values()).count(target) > 1)
        raise UserError(f"{twice}: two logs would go there; archive them in two commands with different --arm")
    copies = moves | _sources_of(runs_of, record)
    for source, target in copies.items():
        if target.exists() and not _same_bytes(source, target):
            raise UserError(f"{target}: found other content than in {source}, and does not overwrite it; rename one")
    for source, target in copies.items():
        _copy(source, target)
    for log in moves:
        log.unlink()
    _remove_orphaned_sources([source for source in copies if source not in moves])
    if not (record / "README.md").exists():
        _write(record / "README.md", _new_record_text(record))
    print(f"moved {len(moves)} logs into {record}\n"
          f"now describe in {record / 'README.md'} what was changed and why, and run compare.py --leaderboard")


def _checked_name(flag: str, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"{flag} {name}: expected a name of letters, digits, '_', '-' and '.'")
    return name


def _record_folder(root: Path, name: str, runs: list[Run], track: str | None, date: str | None) -> Path:
    """records/<track>/<date>_<name>; a record of that name is added to, whatever its date."""
    tracks = {track} if track else {run.config.get("track") for run in runs if run.config.get("track")}
    if len(tracks) != 1:
        raise UserError(f"--archive {name}: the logs name {', '.join(sorted(tracks)) or 'no track'}, expected one "
                        f"track: give --track")
    folder = root / _checked_name("--track", tracks.pop())
    existing = sorted(folder.glob(f"????-??-??_{name}"))
    if existing:
        return existing[-1]
    date = date or max((run.header.get("date", "")[:10] for run in runs), default="")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise UserError(f"--archive {name}: found the date {date!r}, expected YYYY-MM-DD: give --date")
    return folder / f"{date}_{name}"


def _sources_of(runs_of: dict[Path, list[Run]], record: Path) -> dict[Path, Path]:
    """{source beside the logs: its place in the record}, train_gpt.txt for train_gpt.py. The second of two that differ
    has its hash in its name. Raises UserError where one is missing or was changed."""
    found, taken = {}, {}     # taken: place in the record -> sha256
    for log, runs in runs_of.items():
        for name, digest in {item: None for run in runs for item in run.sources.items()}:
            source, stem = _find_source(log, name, digest, record), Path(name).stem
            for kept in (record / f"{stem}.txt", record / f"{stem}_{digest[:16]}.txt"):
                if taken.setdefault(kept, _sha256(kept) if kept.exists() else digest) == digest:
                    break
            if source != kept:
                found[source] = kept
    return found


def _find_source(log: Path, name: str, digest: str, record: Path) -> Path:
    """The file of that sha256 beside the log, above it or in the record: as a run leaves it or as a record keeps it."""
    stem, suffix = Path(name).stem, Path(name).suffix
    left_by_run, kept = f"{stem}_{digest[:16]}{suffix}", (f"{stem}_{digest[:16]}.txt", f"{stem}.txt")
    places = [folder / file for folder in (log.parent, log.parent.parent, record) for file in (left_by_run, *kept)]
    existing = {path: _sha256(path) for path in places if path.exists()}
    for path, actual in existing.items():
        if actual == digest:
            return path
    for path, actual in existing.items():
        if path.name == left_by_run:
            raise UserError(f"{path}: its sha256 is {actual}, expected {digest} as {log} says; it was changed")
    raise UserError(f"{log}: found no source {left_by_run} beside it or above it, expected what made the run; put it "
                    f"there: a run without it is no record")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _same_bytes(path: Path, other: Path) -> bool:
    return path.stat().st_size == other.stat().st_size and path.read_bytes() == other.read_bytes()


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        return      # the same bytes: an earlier attempt was cut short
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as part:
        shutil.copy2(source, part)


def _remove_orphaned_sources(sources: list[Path]) -> None:
    """A source beside which no log is left has moved with them; one that other logs still need stays."""
    for source in sources:
        if not any(path.suffix in LOG_SUFFIXES and path not in sources for path in source.parent.rglob("*")):
            source.unlink()
            if not any(source.parent.iterdir()):
                source.parent.rmdir()


def _new_record_text(record: Path) -> str:
    title = record.name[11:].replace("_", " ")
    return (f"# {title}\n\nWhat was changed, why, and what it is worth.\n\n## Statistics\n\n"
            f"{BEGIN.format('statistics')}\n{END.format('statistics')}\n")


# ---- leaderboard ----------------------------------------------------------------------------------------------------

def update_records(root: Path, check: bool = False) -> None:
    """Write every generated block below `root`; with `check` raise UserError, which names those that would change."""
    texts = render_records(root)
    changed = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    if check and changed:
        raise UserError(f"{', '.join(map(str, changed))}: found out of date; run compare.py --leaderboard")
    for path in changed:
        _write(path, texts[path])
        print(f"wrote: {path}")
    if not changed:
        print("all up to date")


def render_records(root: Path) -> dict[Path, str]:
    """{README.md: its text with the generated block made anew} for each record and for `root` itself."""
    texts, sections = {}, []
    tracks = sorted({*KNOWN_TRACKS, *(path.name for path in root.iterdir() if path.is_dir() and _records_of(path))})
    for track in tracks:
        reports = {}
        for record in _records_of(root / track):
            if track == STUDIES and not any(path.suffix in LOG_SUFFIXES for path in record.rglob("*")):
                reports[record] = None      # a study by a script of its own, without runs
                continue
            collected = collect([str(record)])
            baseline = BASELINE_ARM if BASELINE_ARM in collected.arms else None
            reports[record] = build_report(collected, baseline=baseline)
            statistics = to_markdown(reports[record]).replace(f"{record}{os.sep}", "")     # no path of this machine
            texts[record / "README.md"] = _replace_block(record / "README.md", "statistics", statistics)
        links = "".join(f"- [{record.name}]({STUDIES}/{record.name}/README.md)\n" for record in reports)
        sections.append(f"### {track}\n\n{links if track == STUDIES else _track_tables(reports)}")
    texts[root / "README.md"] = _replace_block(root / "README.md", "leaderboard", "\n".join(sections))
    front = root.parent / "README.md"   # the project's, which shows the same tables where it has the markers
    if front.exists() and BEGIN.format("results") in front.read_text(encoding="utf-8"):
        shown = [s.replace("](", f"]({root.name}/") for s in sections
                 if "No records yet" not in s and not s.startswith(f"### {STUDIES}")]
        texts[front] = _replace_block(front, "results", "\n".join(shown))
    return texts


def _records_of(track: Path) -> list[Path]:
    if not track.is_dir():
        return []
    return sorted(path for path in track.iterdir() if path.is_dir() and RECORD_NAME.fullmatch(path.name))


def _track_tables(reports: dict[Path, dict]) -> str:
    """One table for each set of comparable arms of a track; they are never ranked together."""
    if not reports:
        return "No records yet.\n"
    tables: dict[tuple, list[tuple[Path, dict, dict]]] = {}
    for record, report in reports.items():
        for group in report["groups"]:
            for arm in group["arms"]:
                tables.setdefault((*group["key"].items(), group["target_loss"]), []).append((record, group, arm))
    blocks = []
    for rows in tables.values():
        title = group_title(rows[0][1]).partition(": ")[2]
        blocks.append("\n".join([title, "", *markdown_table(_ranked_rows(rows)), ""]))
    return "\n".join(blocks)


def _ranked_rows(rows: list[tuple[Path, dict, dict]]) -> list[list[str]]:
    """A header, then the arms that beat the target by training time, then the others, without a rank."""
    def is_ranked(arm: dict) -> bool:
        p = arm["p_at_or_below_target"]
        return p is not None and p < RECORD_P and arm["time_mean_ms"] is not None

    def order(row: tuple[Path, dict, dict]) -> tuple:
        record, _, arm = row
        return not is_ranked(arm), arm["time_mean_ms"] or float("inf"), record.name, arm["name"]

    table = [["record", "rank", "arm", "time [s]", "sd [s]", "loss", "sd", "p", "n", "failed", "steps", "tokens"]]
    for rank, (record, _, arm) in enumerate(sorted(rows, key=order), 1):
        link = f"[{record.name}]({record.parent.name}/{record.name}/README.md)"
        table.append([link, str(rank) if is_ranked(arm) else "–", arm["name"],
                      number(arm["time_mean_ms"], 3, 1e-3), number(arm["time_sd_ms"], 3, 1e-3),
                      number(arm["loss_mean"], 5), number(arm["loss_sd"], 5),
                      p_text(arm["p_at_or_below_target"], arm["no_p_because"]), str(arm["n"]),
                      str(len(arm["failed"])), steps_text(arm), tokens_text(arm["tokens_mean"])])
    return table


def _replace_block(path: Path, name: str, text: str) -> str:
    """The file's text with all between the markers of `name` replaced. Raises UserError without markers."""
    begin, end = BEGIN.format(name), END.format(name)
    if not path.exists():
        raise UserError(f"{path}: does not exist; make it with the lines {begin} and {end}")
    before, found_begin, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise UserError(f"{path}: found no pair of markers, expected the lines {begin} and {end}; put them back")
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"


def _write(path: Path, text: str) -> None:
    with written_whole(path) as part:
        part.write_text(text, encoding="utf-8")
