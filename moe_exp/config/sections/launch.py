"""Launch settings, and the base class of all sections.

The section classes inherit from each other in the order of `--help`, from LaunchSettings to `config.Config`;
pydantic keeps the fields in that order. A method may use fields of its own section and of earlier sections,
so a rule about several sections belongs in the last of these sections. Rules about the machine are in
launch/machine_checks.py.
"""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, field_validator

from moe_exp.config.errors import choices, divisors, problem
from moe_exp.config.presets import PRESETS
from moe_exp.config.setting_types import NonNegative, NumRanks, as_given, one_line
from moe_exp.config.traits import layout, place
from moe_exp.host.devices import count_gpus, num_cores


class LaunchSettings(BaseModel):
    """Settings of the section Launch: the number of ranks and their rendezvous."""

    # defer_build: only Config is instantiated; a schema per section would cost 0.1 s at every start.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    _one_line = field_validator("*", mode="before")(one_line)

    preset: str = layout(
        "",
        "named set of defaults: "
        + ", ".join(PRESETS)
        + " (default: gpu, or reference if TRAIN_DATA is set; without GPUs always cpu)",
        costs=False,
    )
    master_addr: str = place("localhost", "host name or address of rank 0")
    master_port: int = place(
        0,
        "TCP port on MASTER_ADDR for the rendezvous; 0: any free port on one node, 23456 on several nodes",
        ge=0,
        le=65535,
    )
    nnodes: NumRanks = layout(1, "number of nodes")
    node_rank: NonNegative = place(0, "index of this node")
    gpus_per_node: NumRanks = layout(
        ...,
        "ranks per node; each has its own GPU, except on a CPU host (default: 1 with PRESET=gpu; 2 with "
        "PRESET=cpu or on a CPU host, but 1 if there is only one core or GPU; else the number of GPUs)",
        default_factory=lambda: count_gpus() or min(2, num_cores()),
    )
    threads_per_rank: NonNegative = layout(
        0,
        "PyTorch threads per rank; 0: one on a CPU host; on GPUs, PyTorch's default or, with "
        "OFFLOAD_OPTIMIZER, the node's cores divided by GPUS_PER_NODE",
        costs=False,
        compared=False,
    )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nnodes * self.gpus_per_node

    @property
    def rendezvous_port(self) -> int:
        """MASTER_PORT or its default. On one node the default is 0: torchrun's agent chooses a free port."""
        return self.master_port or (23456 if self.nnodes > 1 else 0)

    def problems(self) -> Iterator[str]:
        """Yields an error line (name, value, rule, fix) for each broken rule that is not about the machine.
        Values that are invalid on their own are rejected when the object is created.
        """
        yield from self.node_rank_problems()

    def node_rank_problems(self) -> Iterator[str]:
        """Checks NODE_RANK, for commands that start one process per node."""
        if self.node_rank >= self.nnodes:
            ranks = f"0 to {self.nnodes - 1}" if self.nnodes > 1 else "0"
            fix = f"set NODE_RANK to {ranks}, or NNODES to at least {self.node_rank + 1}"
            yield self.problem("node_rank", f"must be less than NNODES={self.nnodes}", fix)

    def problem(self, name: str, rule: str, fix: str) -> str:
        """Error line for setting `name`: its value, the broken rule and the fix."""
        return problem(name, as_given(getattr(self, name)), rule, fix)

    def broken(self, *rules: tuple[object, str, str, str]) -> Iterator[str]:
        """Yields an error line for each broken rule; each argument is (is_broken, name, rule, fix)."""
        return (self.problem(name, rule, fix) for is_broken, name, rule, fix in rules if is_broken)

    def must_divide(self, name: str, whole_name: str, whole: int) -> Iterator[str]:
        """Yields an error line if setting `name` does not divide `whole`, the value of `whole_name`."""
        value = getattr(self, name)
        if whole % value:
            fix = f"set {name.upper()} to {choices(divisors(whole, value))}"
            yield self.problem(name, f"must divide {whole_name}={whole}", fix)
