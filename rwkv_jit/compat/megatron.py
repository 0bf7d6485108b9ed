"""Megatron-core's gated delta rules on these ops: the function that its layers call, and what puts it there."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rwkv_jit.compat import replacing
from rwkv_jit.compat.falling_back import with_fallback
from rwkv_jit.compat.fla import family
from rwkv_jit.compat.naming import named
from rwkv_jit.kernels.errors import brief

__all__ = ["gated_delta_rule", "patch"]

_NAME = "gated_delta_rule"


@named()
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, *, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run the gated delta rule of Megatron-core's `GatedDeltaRuleInterface`, of each of its variants.

    The tensors say which one it is: `GatedDeltaNet` has a g of (B, T, HV) and runs `gated_delta_rule`,
    `KimiDeltaAttention` one of (B, T, HV, K) and runs `kda`, and `GatedDeltaNet2` b (B, T, HV, K) and w (B, T, HV, V)
    among the keywords, no beta, and runs `gated_delta_rule2`. All other arguments are those of FLA's functions, as
    `compat.fla.family` has them. final_state is (N, HV, K, V), float32, or None.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been launched.
    UnsupportedConfigError
        Parts of a `cp_context` are in another order than the ranks, or dtypes or sizes are beyond the kernels.

    Examples
    --------
    >>> class Provider(TESpecProvider):  # of newer trees, where providers choose kernels
    ...     def gated_delta_rule(self, variant, deterministic=False):
    ...         return rwkv_jit.compat.megatron.gated_delta_rule
    """
    options: dict[str, Any] = {
        "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens, **kwargs,
    }  # fmt: skip
    gates = [name for name in ("b", "w") if options.get(name) is not None]
    if gates:
        if len(gates) == 1:
            missing = "w" if gates == ["b"] else "b"
            raise ValueError(f"{missing}: expected a tensor beside {gates[0]}, got None")
        return family.chunk_gdn2(q, k, v, g, **options)  # type: ignore[no-any-return]
    if beta is None:
        raise ValueError("beta: expected a tensor, or b and w, got None")
    of_channels = isinstance(g, Tensor) and g.dim() == v.dim()
    rule = family.chunk_kda if of_channels else family.chunk_gated_delta_rule
    return rule(q, k, v, g, beta, **options)  # type: ignore[no-any-return]


def patch(target: nn.Module) -> list[str]:
    """Let the layers of a model of Megatron-core run our gated delta rules.

    Each layer that has a function `gated_delta_rule` is given ours, with its own behind it for what the kernels cannot
    do: a `cp_context` of parts in another order than the ranks. `rwkv_jit.compat.uninstall` takes them away again.

    Parameters
    ----------
    target : torch.nn.Module
        A model, or a part of one.

    Returns
    -------
    list of str
        The names of the layers.

    Raises
    ------
    TypeError
        It is no module.
    ValueError
        There is no such layer in it.

    Examples
    --------
    >>> rwkv_jit.compat.megatron.patch(model)
    ['decoder.layers.0.self_attention', 'decoder.layers.1.self_attention', 'decoder.layers.2.self_attention']
    """
    if not isinstance(target, nn.Module):
        raise TypeError(f"target: expected a torch.nn.Module, got {brief(target)}")
    layers = {name: layer for name, layer in target.named_modules() if callable(vars(layer).get(_NAME))}
    if not layers:
        raise ValueError(f"target: expected a model with layers that have {_NAME}, got {type(target).__name__}")
    for layer in layers.values():
        theirs = vars(layer)[_NAME]
        if not replacing.has(layer, _NAME):
            replacing.put(layer, _NAME, with_fallback(_NAME, gated_delta_rule, theirs))
    return list(layers)
