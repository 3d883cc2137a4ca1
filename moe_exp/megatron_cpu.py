"""Former import path of host/megatron_cpu.py."""

from moe_exp.host.megatron_cpu import INSTALLED as INSTALLED
from moe_exp.host.megatron_versions import patch_router as patch_router
