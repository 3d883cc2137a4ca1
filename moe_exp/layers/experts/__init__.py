"""The experts of one rank and their backends: loop, grouped GEMMs, Triton kernels, FP8."""

from moe_exp.layers.dispatcher import RoutedTokens
from moe_exp.layers.experts.experts import ACTIVATIONS, Experts, SharedExpert, squared_relu

__all__ = ["ACTIVATIONS", "Experts", "RoutedTokens", "SharedExpert", "squared_relu"]
