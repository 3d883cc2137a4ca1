"""Megatron's GPTModel with the cross entropy of layers/token_loss.py (CROSS_ENTROPY=triton)."""

from torch import Tensor

from moe_exp.layers.token_loss import token_losses

from megatron.core.models.gpt import GPTModel


class GPTModelWithOwnLoss(GPTModel):
    """Everything but the loss is Megatron's, names of weights too."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Labels [B, S] and this rank's logits [S, B, V] to the loss of each token, [B, S] in fp32."""
        return token_losses(logits, labels.transpose(0, 1), self.pg_collection.tp).transpose(0, 1).contiguous()
