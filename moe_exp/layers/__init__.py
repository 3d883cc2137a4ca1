"""The MoE layer, built on plain torch and process groups. Only `spec` and `megatron/` import Megatron.

Shape suffixes used throughout:
    T tokens on this rank, D hidden size (for the experts of a LatentMoE: the latent size),
    E experts, K top-k, F width of one expert,
    W output width of an expert's first projection (2F if the activation has a gate, else F),
    N = T*K slots (a slot is one token's use of one expert), R rows after dispatch, L experts on this rank.
    A digit is a dimension of that size (weights_R1: [R, 1]) or is added to the letter before it (offsets_L1:
    [L + 1]).

Expert e has the rows offsets_L1[e] to offsets_L1[e + 1] - 1; offsets_L1 is int32 and starts with 0.
"""
