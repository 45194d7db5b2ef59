"""Compare training runs from their logs: statistics of every arm, differences between arms, tables and plots.

    python records/compare.py logs/table logs/no_table              each folder is an arm, the first the baseline
    python records/compare.py 'logs/base_*.txt' 'logs/new_*.txt'    a quoted glob is one arm, and so is a single file
    python records/compare.py logs/sweep --by ngram_rows --plot sweep.png
    python records/compare.py --archive my_idea logs/table logs/no_table
    python records/compare.py --leaderboard

Runs are pooled and compared only where data, target, world size, device, torch and clock agree; --mix overrides that,
with a warning in every output. Failed runs are counted, outliers flagged, nothing is dropped.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from arm_stats import build_report, collect
from leaderboard import archive, update_records
from tables import to_csv, to_json, to_markdown, to_text
from train_gpt import UserError, run_command

FORMATS = {"text": to_text, "markdown": to_markdown, "json": to_json, "csv": to_csv}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH",
        help="a log, a folder (every folder of logs in it is an arm), or a quoted glob (its files are one arm)")
    add("--baseline", metavar="PATH",
        help="the arm that the others are compared with, as a path or by its name in the table (default: the first)")
    add("--target", type=float, metavar="LOSS",
        help="judge all runs by this loss (default: the logs' own, or 3.28 where they name none)")
    add("--mix", action="store_true", help="pool and compare runs that are not comparable, with a warning")
    add("--by", metavar="KEY[,KEY]",
        help="make the arms by the values of a config key (such as ngram_rows) and fit a line of loss against log2 of "
             "the first key; further keys make several lines")
    add("--plot", metavar="FILE.png", help="draw loss against time and steps; with --by, loss against KEY")
    output = parser.add_mutually_exclusive_group()
    for name in ("markdown", "json", "csv"):
        output.add_argument(f"--{name}", dest="format", action="store_const", const=name, default="text",
                            help=f"print {name} in place of the table")
    add = parser.add_argument_group("records").add_argument
    add("--archive", metavar="NAME", help="move the logs at PATH... into the record NAME, their source with them")
    add("--arm", help="with --archive: the arm's name (default: the name of each log's folder)")
    add("--track", help="with --archive: the track, where the logs do not name it")
    add("--date", metavar="YYYY-MM-DD", help="with --archive: the date, where the logs do not name it")
    add("--leaderboard", action="store_true", help="write the leaderboards and each record's statistics")
    add("--check", action="store_true", help="with --leaderboard: write nothing, fail where a file would change")
    add("--records", type=Path, default=Path(__file__).resolve().parent, metavar="DIR",
        help="the folder of records (default: this program's)")
    options = parser.parse_args(arguments)
    if options.archive is not None and options.leaderboard:
        parser.error("--archive and --leaderboard are two commands: archive first")
    if options.leaderboard and options.paths:
        parser.error(f"--leaderboard reads all records: found {options.paths[0]}, expected no PATH")
    if not options.paths and not options.leaderboard:
        parser.error("no PATH: give logs or folders of logs")
    if options.check and not options.leaderboard:
        parser.error("--check goes with --leaderboard")
    return options


def compare(options: argparse.Namespace) -> None:
    by = [key.strip().replace("-", "_") for key in options.by.split(",")] if options.by else []
    paths, baseline = list(options.paths), options.baseline
    if baseline and (Path(baseline).exists() or any(mark in baseline for mark in "*?[")):
        baseline_arms = list(collect([baseline]).arms)
        if len(baseline_arms) != 1:
            raise UserError(f"--baseline {baseline}: found {len(baseline_arms)} arms in it, expected one of them: "
                            + ", ".join(baseline_arms))
        paths = [baseline, *(path for path in paths if Path(path) != Path(baseline))]
        baseline = None
    collected = collect(paths)
    report = build_report(collected, options.target, baseline, options.mix, by)
    names = [arm["name"] for group in report["groups"] for arm in group["arms"]]
    if baseline and baseline not in names:
        raise UserError(f"--baseline {baseline}: neither a path nor an arm's name; expected one of: {', '.join(names)}")
    print(FORMATS[options.format](report), end="")
    if options.plot:
        from plots import plot_report     # matplotlib takes a second to load
        plot_report(report, Path(options.plot))
        print(f"drew {options.plot}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Raises UserError."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    options = parse_arguments(arguments)
    if options.leaderboard:
        update_records(options.records, check=options.check)
    elif options.archive:
        archive(options.records, options.archive, options.paths, options.arm, options.track, options.date)
    else:
        compare(options)


if __name__ == "__main__":
    run_command(main)
