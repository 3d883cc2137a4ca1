"""Settings of launch, and what the classes of all sections have.

The classes inherit from each other in the order of `--help`, from here to `config.Config`, and pydantic keeps
the fields in that order. Methods use fields of their own section and of those before it, so a rule between
settings of several sections stands in the last of them. The rules that depend on the machine are in
launch/machine_checks.py.
"""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, field_validator

from moe_exp.config.errors import choices, divisors, problem
from moe_exp.config.presets import PRESETS
from moe_exp.config.setting_types import NonNegative, NumRanks, as_given, layout, one_line, place
from moe_exp.host.devices import count_gpus, num_cores


class LaunchSettings(BaseModel):
    """The section Launch: ranks and how they find each other."""

    # `defer_build`: only Config is ever made, and a schema of each section would cost 0.1 s at every start.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    _one_line = field_validator("*", mode="before")(one_line)

    preset: str = layout(
        "",
        "named set of defaults: "
        + ", ".join(PRESETS)
        + "; default: reference with GPUs and TRAIN_DATA, else cpu",
        costs=False,
    )
    master_addr: str = place("localhost", "host of rank 0")
    master_port: int = place(
        0,
        "TCP port on MASTER_ADDR for the rendezvous; 0: a free one with one node, 23456 with several",
        ge=0,
        le=65535,
    )
    nnodes: NumRanks = layout(1, "number of nodes")
    node_rank: NonNegative = place(0, "index of this node", measured=0)
    gpus_per_node: NumRanks = layout(
        ...,
        "ranks per node: GPUs, or processes on a CPU host (default: all GPUs; on a CPU host and with "
        "PRESET=cpu at most 2)",
        default_factory=lambda: count_gpus() or min(2, num_cores()),
    )
    threads_per_rank: NonNegative = layout(
        0,
        "torch threads per rank; 0: one on a CPU host, torch's default with GPUs",
        costs=False,
        compared=False,
    )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nnodes * self.gpus_per_node

    @property
    def rendezvous_port(self) -> int:
        """MASTER_PORT; 0: one that is free when the agent of the only node listens on it."""
        return self.master_port or (23456 if self.nnodes > 1 else 0)

    def problems(self) -> Iterator[str]:
        """Yields a line (name, value, rule, fix) for each broken rule between settings, on every machine the
        same. Values that are invalid on their own are rejected when the object is made.
        """
        yield from self.node_rank_problems()

    def node_rank_problems(self) -> Iterator[str]:
        """Checks NODE_RANK, for commands that start a process per node."""
        if self.node_rank >= self.nnodes:
            ranks = f"0 to {self.nnodes - 1}" if self.nnodes > 1 else "0"
            fix = f"set NODE_RANK to {ranks}, or NNODES to at least {self.node_rank + 1}"
            yield self.problem("node_rank", f"is not below NNODES={self.nnodes}", fix)

    def problem(self, name: str, rule: str, fix: str) -> str:
        """A line on setting `name`: its value, the rule that it breaks, and the fix."""
        return problem(name, as_given(getattr(self, name)), rule, fix)

    def broken(self, *rules: tuple[object, str, str, str]) -> Iterator[str]:
        """A line for each broken rule of `rules`: whether it is broken, setting, rule and fix."""
        return (self.problem(name, rule, fix) for is_broken, name, rule, fix in rules if is_broken)

    def must_divide(self, name: str, whole_name: str, whole: int) -> Iterator[str]:
        """A line if setting `name` does not divide `whole`."""
        value = getattr(self, name)
        if whole % value:
            fix = f"set {name.upper()} to {choices(divisors(whole, value))}"
            yield self.problem(name, f"does not divide {whole_name}={whole}", fix)
