"""Router, experts, MoE layer and attention as Megatron modules."""
