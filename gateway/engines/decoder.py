"""A lean forward over the weights of a Llama-family module, on a cache of slots.

`transformers` modules of the Llama family (Llama, Qwen2, Qwen3) differ in little: biases and query/key norms.
Calling their parts directly saves most of a small model's time per step, which is Python and not arithmetic.
Shapes: B rows, T new tokens, S cached span, H hidden, D head, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from a3r.errors import UsageError

FAMILIES = ("llama", "qwen2", "qwen3")


class SlotDecoder:
    """Extends rows of a slot cache by new tokens and gives the logits after the last one.

    Reads the module's parameters at every call, so that weights updated in place are what it computes with.
    Raises UsageError for a model of another family.
    """

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_length: int) -> None:
        config = model.config
        if config.model_type not in FAMILIES:
            raise UsageError(
                f"The in-process engine cannot serve a {config.model_type!r} model",
                why=f"it knows {', '.join(FAMILIES)}",
                next_step="serve it with vLLM, or choose a model of these families",
            )
        self.model = model
        self.max_length = max_length
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._eps = config.rms_norm_eps
        self._has_head_norm = config.model_type == "qwen3"
        weight = model.get_input_embeddings().weight
        shape = (num_slots, self._kv_heads, max_length, self._head_dim)
        layers = len(model.model.layers)
        self._keys = [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(layers)]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        positions = torch.arange(max_length, device=weight.device)[None]
        cos, sin = model.model.rotary_emb(weight[:1, None], positions)
        self._cos, self._sin = cos[0].clone(), sin[0].clone()  # [S, D]
        self._columns = torch.arange(max_length, device=weight.device)

    def extend(self, slots: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
        """Logits [B, V] after the last new token of each row.

        `slots` [B] names the rows of the cache, `starts` [B] how much of each is kept, `ids` [B, T] the new tokens,
        right-padded to T, `lengths` [B] how many of them are real.
        """
        num_rows, num_new = ids.shape
        positions = starts[:, None] + self._columns[:num_new]  # [B, T]
        positions = positions.clamp_(max=self.max_length - 1)
        span = int((starts + lengths).max())
        span = min(-(-span // 32) * 32, self.max_length)
        mask = self._columns[:span] <= positions[..., None]  # [B, T, S]
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]  # [B, 1, T, D]
        rows = slots[:, None].expand(num_rows, num_new)
        body = self.model.model
        hidden = F.embedding(ids, body.embed_tokens.weight)
        for layer, keys, values in zip(body.layers, self._keys, self._values, strict=True):
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.input_layernorm.weight, self._eps)
            attended = self._attend(layer.self_attn, normed, keys, values, rows, positions, slots, span, mask, cos, sin)
            hidden = hidden + attended
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.post_attention_layernorm.weight, self._eps)
            mlp = layer.mlp
            hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        last = hidden[torch.arange(num_rows, device=hidden.device), lengths - 1]
        last = F.rms_norm(last, last.shape[-1:], body.norm.weight, self._eps)
        return self.model.lm_head(last)

    def _attend(
        self,
        attention: nn.Module,
        hidden: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        positions: Tensor,
        slots: Tensor,
        span: int,
        mask: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        num_rows, num_new, _ = hidden.shape
        query = attention.q_proj(hidden).view(num_rows, num_new, self._heads, self._head_dim)
        key = attention.k_proj(hidden).view(num_rows, num_new, self._kv_heads, self._head_dim)
        value = attention.v_proj(hidden).view(num_rows, num_new, self._kv_heads, self._head_dim)
        if self._has_head_norm:
            query = F.rms_norm(query, (self._head_dim,), attention.q_norm.weight, self._eps)
            key = F.rms_norm(key, (self._head_dim,), attention.k_norm.weight, self._eps)
        query = _rotated(query.transpose(1, 2), cos, sin)
        key = _rotated(key.transpose(1, 2), cos, sin)
        # Padding writes beyond a row's end; the row's next token overwrites it before anything looks there.
        keys[rows, :, positions] = key.transpose(1, 2)
        values[rows, :, positions] = value
        attended = F.scaled_dot_product_attention(
            query,
            keys[slots, :, :span],
            values[slots, :, :span],
            attn_mask=mask[:, None],
            enable_gqa=self._heads != self._kv_heads,
        )
        return attention.o_proj(attended.transpose(1, 2).reshape(num_rows, num_new, -1))


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34), in the half-split layout of Llama."""
    low, high = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-high, low), dim=-1) * sin
