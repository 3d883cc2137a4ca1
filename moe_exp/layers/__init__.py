"""The MoE layer: plain torch and process groups; only `spec` and `megatron/` import Megatron.

Shape suffixes used throughout:
    T tokens on this rank, D hidden size (for the experts of a LatentMoE: the latent size),
    E experts, K top-k, F width of one expert,
    W width of its first projection (2F if the activation has a gate, else F),
    N = T*K slots (a slot is one token's use of one expert), R rows after dispatch, L experts on this rank.
    A digit is a dimension of that size, or is added to the letter: weights_R1 is [R, 1], offsets_L1 [L + 1].

offsets_L1, int32: expert e has rows offsets[e] to offsets[e + 1]; offsets[0] is 0.
"""
