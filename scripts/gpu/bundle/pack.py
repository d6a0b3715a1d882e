"""Packs the content of all wheels of a folder into one archive, as it lies in a folder of installed packages.

python scripts/gpu/bundle/pack.py WHEELS ARCHIVE.txz [--hopper]
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

DATA = re.compile(r"[^/]+\.data/(?:purelib|platlib)/")
"""A wheel's folder of files that are installed among the others."""
NEVER = ("ray/dashboard/client", "ray/jars")
"""Parts that no job needs: the dashboard's pages and Java."""
NOT_ON_HOPPER = (
    *("vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/_flashmla", "vllm/_moe_C", "vllm/_qutlass", "vllm/_rust", "vllm/vllm-rs"),
    *("vllm/third_party/deep_gemm", "vllm/third_party/flashmla", "vllm/third_party/fmha_sm100"),
)
"""Kernels of vLLM for other GPUs, for quantised attention and for mixtures of experts."""
PRESET = 2
"""Level of compression: higher ones take minutes for little."""


def main() -> int:
    """Writes the archive and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--hopper", action="store_true", help="leave out kernels that H100 and H200 do not use")
    options = parser.parse_args()
    pack(options.wheels, options.archive, NEVER + (NOT_ON_HOPPER if options.hopper else ()))
    return 0


def pack(wheels: Path, archive: Path, dropped: tuple[str, ...]) -> None:
    """Writes the files of all wheels but those below the dropped paths."""
    with lzma.open(archive, "wb", preset=PRESET) as packed, tarfile.open(fileobj=packed, mode="w") as out:
        for wheel in sorted(wheels.glob("*.whl")):
            for name, mode, data in files_of(wheel):
                if not name.startswith(dropped):
                    info = tarfile.TarInfo(name)
                    info.size, info.mode = len(data), mode
                    out.addfile(info, io.BytesIO(data))


def files_of(wheel: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yields the path, the mode and the content of each file of a wheel."""
    with zipfile.ZipFile(wheel) as content:
        for item in content.infolist():
            if not item.is_dir():
                runs = bool((item.external_attr >> 16) & 0o111) or item.filename.endswith(".so")
                yield DATA.sub("", item.filename), 0o755 if runs else 0o644, content.read(item)


if __name__ == "__main__":
    sys.exit(main())
