#!/usr/bin/env bash
# What Programs run in (bubblewrap) and are kept in (git). Installed where we may; otherwise say what is missing.
set -euo pipefail
missing=()
command -v git >/dev/null 2>&1 || missing+=(git)
[ "$(uname)" != Linux ] || command -v bwrap >/dev/null 2>&1 || missing+=(bubblewrap)
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    { apt-get update -q && apt-get install -y -q --no-install-recommends "${missing[@]}"; } >/dev/null
else
    echo "Missing: ${missing[*]}. Install with your package manager, e.g. sudo apt-get install ${missing[*]}" >&2
fi
