"""The forwards of FLA's RWKV-7 layers on these kernels: their modules, parameters and caches stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call.tensors import tokens_behind
from rwkv_jit.compat.fla.functions import refuse
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.layers.activate import activate
from rwkv_jit.layers.gated_norm import gated_norm
from rwkv_jit.layers.prepare_keys import prepare_keys
from rwkv_jit.layers.token_shift import token_shift
from rwkv_jit.nn.common import under_autocast
from rwkv_jit.ops.wkv7 import wkv7
from rwkv_jit.plain.layers import last_tokens


class RWKV7Attention:
    """What takes the place of FLA's class of this name."""

    @staticmethod
    def forward(
        layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None,
        use_cache: bool | None = False, output_attentions: bool | None = False, v_first: Tensor | None = None,
        cu_seqlens: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, None, Any, Tensor]:  # fmt: skip
        """Mix tokens over time. Padding, where the mask is 0, counts as tokens of zeros that write nothing."""
        if layer.head_dim != layer.head_v_dim:
            raise UnsupportedConfigError(f"values of {layer.head_v_dim} for keys of {layer.head_dim} are not supported")
        if layer.g_norm.weight is None:
            raise UnsupportedConfigError("a norm without weights is not supported")
        refuse(hidden_states, layer.r_proj.weight, padding=tokens_behind(cu_seqlens, hidden_states) > 0)
        from fla.layers.utils import get_layer_cache, update_layer_cache

        cached = get_layer_cache(layer, past_key_values)
        first, state = (None, None) if cached is None else (cached["conv_state"], cached["recurrent_state"])
        x, mask = under_autocast(hidden_states), _mask(attention_mask, hidden_states)
        if mask is not None:
            x = x * mask
        first = None if first is None else first.to(x.dtype)
        mixes = torch.cat([layer.x_r, layer.x_w, layer.x_k, layer.x_v, layer.x_a, layer.x_g]).view(6, -1)
        xr, xw, xk, xv, xa, xg = token_shift(x, mixes, first=first, cu_seqlens=cu_seqlens)

        r, k, v = layer.r_proj(xr), layer.k_proj(xk), layer.v_proj(xv)
        w, rate, gate = layer.w_lora(xw), layer.a_lora(xa), layer.g_lora(xg)
        r, w, k, by_head = (z.unflatten(-1, (layer.num_heads, layer.head_dim)) for z in (r, w, k, v))
        more: dict[str, Any] = {"r": r, "r_k": layer.r_k}
        if layer.layer_idx == 0:
            v_first = v
        else:
            assert v_first is not None
            more |= {"v_first": v_first.to(v.dtype), "v_gate": layer.v_lora(xv)}
        k, v, a, b, bonus = prepare_keys(k, by_head, rate, layer.k_k, layer.k_a, **more)  # k of a zero is a zero
        if mask is not None:  # the shift has brought padding behind a token something of that token
            v, bonus = v * mask.unsqueeze(-1), bonus * mask.unsqueeze(-1)
        y, state = wkv7(r, w, k, v, a, b, state, bool(use_cache), cu_seqlens, decay="sigmoid", state_layout="kv")
        update_layer_cache(
            layer, past_key_values, recurrent_state=state, conv_state=last_tokens(x, first, cu_seqlens),
            offset=x.shape[1],
        )  # fmt: skip
        y = gated_norm(y, gate, layer.g_norm.weight, layer.g_norm.bias, bonus=bonus, eps=layer.g_norm.eps)
        return layer.o_proj(y), None, past_key_values, v_first


class RWKV7FeedForward:
    """What takes the place of FLA's class of this name."""

    @staticmethod
    def forward(
        layer: Any, x: Tensor, attention_mask: Tensor | None = None, state: Any = None,
        cu_seqlens: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Mix channels."""
        from fla.modules.activations import ACT2FN

        if layer.act_fn is not ACT2FN["sqrelu"]:
            raise UnsupportedConfigError("another function than the square of relu is not supported")
        refuse(x, layer.key.weight, padding=tokens_behind(cu_seqlens, x) > 0)
        x, mask = under_autocast(x), _mask(attention_mask, x)
        if mask is not None:
            x = x * mask
        first = None if state is None else state[layer.layer_idx]["ffn_state"]
        first = None if first is None else first.to(x.dtype)
        (mixed,) = token_shift(x, layer.x_k.view(1, -1), first=first, cu_seqlens=cu_seqlens)
        y = layer.value(activate(layer.key(mixed), "relu_squared"))
        if state is not None:
            state.update(ffn_state=last_tokens(x, first, cu_seqlens), layer_idx=layer.layer_idx, offset=0)
        return y, state


def _mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the mask of these tokens, [B, T, 1] in their dtype."""
    return None if mask is None else mask[:, -x.shape[1] :].unsqueeze(-1).to(x.dtype)
