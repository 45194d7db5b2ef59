#!/usr/bin/env bash
# ./run.sh [--flag=value ...]   set up if need be, make the embedded data if need be, train
# ./run.sh test [pytest args]   set up if need be, run the tests
# ./run.sh arms --arm ...       set up if need be, train arms with several seeds, interleaved, and compare (records/arms.py)
set -euo pipefail
cd "$(dirname "$0")"

# A stamp of the requirements, written last, so that an interrupted or outdated set-up is done again.
if ! cmp -s requirements.txt .venv/installed; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: found Python %d.%d, expected 3.10 or newer" % sys.version_info[:2])'
    echo "setting up .venv (once)" >&2
    [ -x .venv/bin/python ] || python3 -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    cp requirements.txt .venv/installed
fi
python=.venv/bin/python

if [ "${1:-}" = test ]; then
    exec "$python" -m pytest -q "${@:2}"
elif [ "${1:-}" = arms ]; then
    exec "$python" records/arms.py "${@:2}"
fi

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
flags=" ${*//_/-} "
track=cpu
if [[ $flags == *"--track"[=\ ]"fineweb"* || ( $gpus -gt 0 && $flags != *"--track=cpu "* && $flags != *"--device=cpu "* ) ]]; then
    track=fineweb
fi
if [[ $track == cpu && $flags != *" --data"* && $flags != *" --help "* ]] && ! compgen -G "data/torch_source/*_val_*.bin" >/dev/null; then
    "$python" data/text.py
fi
if [[ $gpus -gt 1 && $flags != *"--device=cpu "* ]]; then
    exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$gpus" train_gpt.py "$@"
fi
exec "$python" train_gpt.py "$@"
