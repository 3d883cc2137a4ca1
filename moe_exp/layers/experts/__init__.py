"""The experts of one rank and their backends: loop, grouped GEMMs, Triton kernels, FP8."""

from moe_exp.layers.activations import ACTIVATIONS, squared_relu
from moe_exp.layers.dispatcher import RoutedTokens
from moe_exp.layers.experts.experts import Experts, SharedExpert

__all__ = ["ACTIVATIONS", "Experts", "RoutedTokens", "SharedExpert", "squared_relu"]
