#!/usr/bin/env bash
# Every static check, for people and CI alike.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
$bin/ruff check .
$bin/ruff format --check .
$bin/lint-imports --no-logo
$bin/vulture
$bin/pyright
