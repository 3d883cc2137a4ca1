"""`moe-exp plan ...`."""

from moe_exp.commands.plan.plan import add_commands as add_commands
