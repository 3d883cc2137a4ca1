"""The Megatron side of the layer: router, experts and attention as Megatron-Core builds them."""
