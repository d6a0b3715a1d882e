#!/usr/bin/env bash
# Unpacks the pieces that lie beside this script into a new folder:  bash unpack.sh SITE && . SITE/env.sh
# Source env.sh in the root of the repository, which it puts on Python's path.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
SITE="${1:?name a new folder}"
mkdir -p "$SITE/packages"
SITE="$(cd "$SITE" && pwd)"
cat "$HERE"/piece-* > "$SITE/all.txz"
if [ "$(sha256sum < "$SITE/all.txz")" != "$(cat "$HERE/sum")" ]; then
  rm "$SITE/all.txz"
  echo "unpack: the pieces beside $0 are not whole: one is missing, or damaged" >&2
  exit 1
fi
tar --extract --xz --file "$SITE/all.txz" --directory "$SITE/packages"
rm "$SITE/all.txz"
cat > "$SITE/env.sh" <<EOF
export PYTHONPATH="\$PWD:$SITE/packages" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 VLLM_USE_V2_MODEL_RUNNER=1
EOF
echo "unpack: done; in the repository: . $SITE/env.sh"
