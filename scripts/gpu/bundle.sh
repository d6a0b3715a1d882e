#!/usr/bin/env bash
# Packs what a GPU machine without network lacks to run rlhub, in pieces that travel one by one.
#
#   bash scripts/gpu/bundle.sh FOLDER [--tier train|ray|vllm] [--hopper] [--piece 52M]
#
# Run it where pip reaches a package index.  The GPU machine must have Python 3.12, torch 2.11 for CUDA 13, transformers 5.16 or
# newer and a driver of 580 or newer.
#   --tier train   what training needs, with the hf rollout engine, in one process
#   --tier ray     also Ray and Megatron-core
#   --tier vllm    also vLLM (the default)
#   --hopper       leave out of vLLM what only other GPUs than H100 and H200 use
#   --piece SIZE   the largest piece, as split takes it
# FOLDER gets piece-00, piece-01, ..., sum and unpack.sh.  There:  bash FOLDER/unpack.sh SITE && . SITE/env.sh
# then, in the repository:  python scripts/gpu/acceptance.py
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
OUT="" TIER=vllm PIECE=52M TRIM=()
while [ $# -gt 0 ]; do
  case "$1" in
    --tier) TIER="${2:?--tier needs train, ray or vllm}"; shift 2 ;;
    --piece) PIECE="${2:?--piece needs a size}"; shift 2 ;;
    --hopper) TRIM=(--hopper); shift ;;
    -h|--help) sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "bundle: unknown option $1 (see --help)" >&2; exit 2 ;;
    *) [ -z "$OUT" ] || { echo "bundle: one folder, not $OUT and $1" >&2; exit 2; }; OUT="$1"; shift ;;
  esac
done
case "$TIER" in
  train) FILES=(train) ;;
  ray) FILES=(train ray) ;;
  vllm) FILES=(train ray vllm) ;;
  *) echo "bundle: no tier $TIER; known: train, ray, vllm" >&2; exit 2 ;;
esac
[ -n "$OUT" ] || { echo "bundle: name a folder (see --help)" >&2; exit 2; }
PY="${PYTHON:-python3}"
mkdir -p "$OUT"
WHEELS="$(mktemp -d)"
trap 'rm -rf "$WHEELS"' EXIT

# pip takes a platform by its exact name: these are the tags of Linux wheels up to the glibc of Ubuntu 24.04.
PLATFORMS=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
for glibc in 5 12 17 24 27 28 31 34 35 39; do PLATFORMS+=(--platform "manylinux_2_${glibc}_x86_64"); done
SOURCE_ONLY=antlr4-python3-runtime # has no wheel, and is pure Python
for file in "${FILES[@]}"; do
  grep -v "^$SOURCE_ONLY\|^#" "$HERE/bundle/$file.txt" > "$WHEELS/wanted.txt"
  "$PY" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${PLATFORMS[@]}" \
    --dest "$WHEELS" --requirement "$WHEELS/wanted.txt"
done
"$PY" -m pip wheel --quiet --no-deps --wheel-dir "$WHEELS" "$(grep "^$SOURCE_ONLY" "$HERE/bundle/train.txt")"

rm -f "$OUT"/piece-*
"$PY" "$HERE/bundle/pack.py" "$WHEELS" "$OUT/all.txz" "${TRIM[@]}"
(cd "$OUT" && sha256sum < all.txz > sum && split --bytes "$PIECE" --numeric-suffixes all.txz piece- && rm all.txz)
cp "$HERE/bundle/unpack.sh" "$OUT/"
du --apparent-size -h "$OUT"/piece-*
