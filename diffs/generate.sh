#!/usr/bin/env bash
# Writes NAME.diff: what each script changes against distributed.py.
set -euo pipefail
cd "$(dirname "$0")/.."
for script in dataparallel.py *_distributed.py *_slurm_main.py; do
    [ -e "$script" ] || continue
    diff -U2 --label distributed.py --label "$script" distributed.py "$script" \
        >"diffs/${script%.py}.diff" || [ $? -eq 1 ] # 1: they differ
done
