"""The MoE layer: plain torch and process groups; only `spec` and `megatron/` import Megatron.

Shape suffixes used throughout:
    T tokens on this rank, D hidden size, E experts, K top-k, F width of one expert,
    N = T*K slots (a slot is one token's use of one expert), R rows after dispatch, L experts on this rank.
"""
