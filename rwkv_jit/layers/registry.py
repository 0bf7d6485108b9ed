"""The torch ops of layers: registered at once, as an exported program names them, run by modules imported later."""

from __future__ import annotations

from rwkv_jit.call.registry import register
from rwkv_jit.kernels import on_import
from rwkv_jit.schedules.layer_table import FUNCTIONS, KEPT, PACKED, RESULTS
from rwkv_jit.schedules.problem import Op

_STEP = "(str step, Tensor?[] inputs, Tensor(a!)[] written, int null_index, float eps, str[] kinds) -> ()"
_LOSSES = {
    "cross_entropy_fwd":
        "(Tensor logits, Tensor targets, int ignore_index, float l2_wrap, bool save) -> (Tensor, Tensor, Tensor)",
    "cross_entropy_bwd":
        "(Tensor grad, Tensor logits, Tensor targets, Tensor lse, Tensor argmax, int ignore_index, float l2_wrap) -> "
        "Tensor",
    "linear_cross_entropy_fwd":
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int ignore_index, float l2_wrap, int chunk_rows, "
        "bool want_hidden, bool want_weight, bool want_bias, bool save) -> (Tensor, Tensor, Tensor, Tensor)",
    "linear_cross_entropy_bwd":
        "(Tensor grad, Tensor of_hidden, Tensor of_weight, Tensor of_bias) -> (Tensor, Tensor, Tensor)",
}  # fmt: skip


def _register(op: Op, results: tuple[str, ...], kept: tuple[str, ...], beside: tuple[str, ...]) -> None:
    """Register both directions of an op with gradients.

    In the place of a result or gradient that a call does not have, an op returns an empty tensor: torch.func knows no
    lists of what has gradients.
    """
    inputs = ", ".join(f"Tensor{'?' * (x in op.optional or x in beside)} {x}" for x in (*op.names, *beside))
    grads = ", ".join(f"Tensor? grad_{x}" for x in results)
    seen = "".join(f"Tensor {x}, " for x in kept)
    made = ", ".join("Tensor" for _ in (*results, *kept))
    given, gradients = f"{inputs}, float eps, str[] kinds", ", ".join("Tensor" for _ in op.names)
    register(f"{op.name}_fwd", f"({given}, bool save) -> ({made})", f"layers.{op.name}")
    register(f"{op.name}_bwd", f"({grads}, {seen}{given}, *, str wanted='') -> ({gradients})", f"layers.{op.name}")


for _name, _results in RESULTS.items():
    _beside = ("cu_seqlens",) if _name in PACKED else ()
    _register(FUNCTIONS[_name], tuple(_results), tuple(KEPT.get(_name, ())), _beside)
register("layer_step", _STEP, "layers.calls", maps=False)
for _name, _schema in _LOSSES.items():
    register(_name, _schema, "layers.loss")
on_import.imported(["torch.utils.flop_counter"], then="rwkv_jit.layers.flops")  # which nobody but those who count needs
