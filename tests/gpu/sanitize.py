"""Calls that reach every template, small enough for compute-sanitizer, which watches what they do to memory.

    PYTHONPATH=.:tests compute-sanitizer --tool memcheck python tests/gpu/sanitize.py [PART/PARTS]

prints each call with the templates that it launched. Without a part it fails where a template was left out. What the
tools say of these calls stands in kernel_templates/README.md.
"""

import random
import sys
from functools import partial

import comparing
import derived_cases
import layer_cases
import operand_cases
import test_parallel
import torch

import rwkv_jit
from rwkv_jit.kernels import launch, signatures, template
from rwkv_jit.layers import calls
from rwkv_jit.schedules import channel_decay as of_channels
from rwkv_jit.schedules import delta_large, head_decay
from rwkv_jit.schedules import head_decay as of_own

BF16, FP32 = torch.bfloat16, torch.float32


def op(
    name, batch, tokens, heads, head_size, value_size=None, dtype=BF16, packed=False, decays="usual", size=1, **options
):
    """A call with every gradient from a state, and one without gradients."""
    sizes = (batch, tokens, heads, head_size, value_size)
    given = comparing.make_inputs(name, dtype, *sizes, decays, options.get("decay"))
    given |= {n: (size * given[n].detach()).requires_grad_() for n in ("r", "k")}
    ends = [0, 0, tokens // 3, tokens // 3 + 1, tokens]
    if packed:
        options["cu_seqlens"] = torch.tensor(ends, device="cuda")
    sequences, layout = len(ends) - 1 if packed else batch, "vk" if name.startswith("wkv") else "kv"
    comparing.run(name, given, comparing.make_state(given, sequences, layout=layout), **options)
    with torch.no_grad():
        getattr(rwkv_jit, name)(*given.values(), **options)


def narrow(*sizes, **options):
    """A call whose rows the tensor cores take as float16, all of them scaled."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    rwkv_jit.set_bfloat16_precision("high")
    op(*sizes, size=1e4, **options)
    rwkv_jit.set_bfloat16_precision("medium")
    torch.set_float32_matmul_precision(before)


def scan_in_parts(*sizes, **options):
    usual, delta_large._LEAST_CHUNKS = delta_large._LEAST_CHUNKS, 4
    op(*sizes, **options)
    delta_large._LEAST_CHUNKS = usual
    signatures.forget()


def wkv4(batch, tokens, channels, dtype, **options):
    w, u = torch.linspace(-6, 1, channels, device="cuda"), torch.randn(channels, device="cuda")
    k, v = (torch.randn(batch, tokens, channels, device="cuda") for _ in range(2))
    leaves = [x.to(dtype).requires_grad_() for x in (w, u, k, v)]
    y, state = rwkv_jit.wkv4(*leaves, output_final_state=True, **options)
    state = state.detach().requires_grad_()
    y, final = rwkv_jit.wkv4(*leaves, initial_state=state, output_final_state=True, **options)
    torch.autograd.grad([y, final], [*leaves, state], [torch.randn_like(y), torch.randn_like(final)])


def wkv4_update(batch, tokens, channels, dtype):
    """Tokens of rows in a pool, one of which has no slot."""
    w, u = torch.linspace(-6, 1, channels, device="cuda"), torch.randn(channels, device="cuda")
    k, v = torch.randn(2, batch, tokens, channels, device="cuda").to(dtype)
    slots = torch.randperm(batch + 3, device="cuda")[:batch].to(torch.int32)
    slots[-1] = -1
    rwkv_jit.wkv4_update(torch.rand(batch + 3, 3, channels, device="cuda"), w, u, k, v, state_indices=slots)


def timex(batch, channels, tokens, dtype, backend="tiles"):
    w, k = (torch.randn(*size, channels, tokens, device="cuda").to(dtype) for size in ((), (batch,)))
    leaves = [x.requires_grad_() for x in (w, k)]
    y = rwkv_jit.timex(*leaves, backend=backend)
    torch.autograd.grad(y, leaves, torch.randn_like(y))


def update(name, batch, tokens, heads, head_size, value_size, state=FP32, layout="vk", **options):
    """Tokens of rows in a pool, one of which has no slot."""
    given = {
        n: x.detach() for n, x in comparing.make_inputs(name, BF16, batch, tokens, heads, head_size, value_size).items()
    }
    sizes = (value_size, head_size) if layout == "vk" else (head_size, value_size)
    pool = torch.randn(batch + 3, heads, *sizes, device="cuda").to(state)
    slots = torch.randperm(batch + 3, device="cuda")[:batch].to(torch.int32)
    slots[-1] = -1
    function = getattr(rwkv_jit, f"{name}_update")
    function(pool, *given.values(), state_indices=slots, state_layout=layout, **options)


def varlen(name, lengths, heads, head_size, index=torch.int64, **options):
    """Sequences of any lengths over a pool, one of which has no slot and one no tokens."""
    inputs = comparing.make_inputs(name, BF16, 1, sum(lengths), heads, head_size)
    tokens = {key: x.detach()[0] if x.ndim == 4 else x.detach() for key, x in inputs.items()}  # [tokens, heads, ...]
    pool = torch.randn(len(lengths) + 3, heads, head_size, head_size, device="cuda")
    slots = torch.randperm(len(lengths) + 3, device="cuda")[: len(lengths)].to(index)
    slots[-1] = -1
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(index)  # [sequences + 1]
    function = getattr(rwkv_jit, f"{name}_varlen")
    function(pool, *tokens.values(), cu_seqlens=ends, state_indices=slots, **options)


def rules(name, how, dtype, layout):
    """A few tokens of a derived op over a pool, one of whose rows has no slot."""
    case = derived_cases.make(name, how, (3, 2, 2, 4, 50, 14), dtype, FP32, FP32, layout=layout, device="cuda")
    derived_cases.pooled(case, "update", case.state, state_indices=torch.tensor((2, -1, 0), device="cuda"))


def gated_pools(dtype, index=torch.int64):
    """ssd with the skip and the gate, of rows and of sequences over a pool; one has no slot and one no tokens."""
    slots, ends = (torch.tensor(n, device="cuda", dtype=index) for n in ((4, -1, 0), (0, 5, 6, 6)))
    pool = torch.randn(5, 4, 64, 32, device="cuda")
    x, z = torch.randn(2, 6, 4, 64, device="cuda").to(dtype)  # [6, 4, 64] each
    B, C = torch.randn(2, 6, 2, 32, device="cuda").to(dtype)  # [6, 2, 32] each
    dt, A, D = (torch.rand(*size, device="cuda") for size in ((6, 4), (4,), (4,)))
    rwkv_jit.ssd_varlen(pool, x, dt, -A, B, C, cu_seqlens=ends, D=D, z=z, state_indices=slots)
    x, dt, B, C, z = (y[:3] for y in (x, dt, B, C, z))  # a token of each row
    rwkv_jit.ssd_update(pool, x, dt, -A, B, C, D=D, z=z, state_indices=slots)


def replay(heads, head_size, dtype, batch=5):
    """Tokens that leave entries beside states, a draft that is accepted in part, and the entries into the states."""
    ring = rwkv_jit.ReplayRing(batch + 3, "wkv7", heads, head_size, drafts=3, dtype=dtype)
    pool = torch.randn(batch + 3, heads, head_size, head_size, device="cuda")
    slots = torch.randperm(batch + 3, device="cuda")[:batch].to(torch.int32)
    slots[-1] = -1
    for function in (rwkv_jit.wkv7_replay, rwkv_jit.wkv7_verify):
        tokens = comparing.make_inputs("wkv7", dtype, batch, 3, heads, head_size)
        function(pool, ring, *(x.detach() for x in tokens.values()), state_indices=slots)
    rwkv_jit.replay_commit(pool, ring, torch.arange(batch, device="cuda", dtype=torch.int32) % 4, state_indices=slots)
    rwkv_jit.replay_flush(pool, ring)


def shards(name, lengths, heads, head_size):
    """A sequence in parts, as several processes would have them."""
    inputs = comparing.make_inputs(name, BF16, 2, sum(lengths), heads, head_size, decay="raw")
    test_parallel.check(name, inputs, lengths)


def layer(rows, heads, head_size, dtype=BF16, texts=None):
    """What a layer does beside its products, for a token of each row or packed texts, one of which has no slot."""
    channels, ends = heads * head_size, [0, *texts] if texts else None
    pool = torch.randn(9, channels, device="cuda").to(dtype)
    slots = torch.randperm(9, device="cuda")[: len(texts) if texts else rows].to(torch.int32)
    slots[-1] = -1
    x, add = torch.randn(2, rows, channels, device="cuda").to(dtype)
    weight, bias = torch.randn(2, channels, device="cuda")
    mixes = torch.rand(6, channels, device="cuda")
    packed = {"cu_seqlens": torch.tensor(ends, device="cuda")} if texts else {}
    packed |= {"has_initial_state": slots > 4, "num_active": torch.full((1,), 3, dtype=torch.int32, device="cuda")}
    x, mixed = rwkv_jit.shift_mix(x, weight, bias, mixes, pool, add=add, state_indices=slots, **packed)
    r, k, v, g, rate, y = mixed.view(6, rows, heads, head_size)
    rwkv_jit.prepare_keys(k, v, rate, weight, bias)
    k, v, _, _ = rwkv_jit.prepare_keys(k, v, rate, weight, bias, a0=bias, v_first=r, v_gate=g, v0=weight)
    rwkv_jit.gated_norm(y, g, weight, bias, r, k, v, bias)
    given = {"k": k, "v": v, "rate": rate, "k_k": weight, "k_a": bias}
    calls.call_for(["new_k", "a", "b", "factors"], "prepare_keys", given, ("identity",))
    calls.call_for(["new_rate"], "prepare_keys", given, ("sigmoid",))
    given = {"y": y, "g": g, "weight": weight}
    calls.call_for(["out", "means", "factors"], "gated_norm", given, (64e-5, "identity", "layer"))
    rwkv_jit.activate(mixed, ("tanh", "sigmoid", "relu_squared", "identity", "tanh", "identity"), out=mixed)


def gradients(name, how, sizes, dtype=BF16):
    """A call of a layer's small work in both directions, and without gradients."""
    case = layer_cases.make(name, how, layer_cases.sizes_of(name, how, *sizes), dtype, FP32, "cuda")
    layer_cases.differentiate(case, case.run)
    with torch.no_grad():
        case.run(case.tensors)


def head_decays(name, how, sizes, bounds=None, dtype=BF16, **options):
    """A call with one decay for a head, of few heads: with every gradient from a state, and one without gradients.

    Where decays let them, blocks share a sequence of 128 tokens.
    """
    case = derived_cases.make(name, how, sizes, dtype, FP32, FP32, bounds=bounds, device="cuda")
    usual, of_own.LEAST_BLOCKS = of_own.LEAST_BLOCKS, 0
    head_decay._LEAST_SEGMENT = 64
    derived_cases.differentiate(case, **options)
    with torch.no_grad():
        case.run(**options)
    of_own.LEAST_BLOCKS = usual


def channel_decays(how, sizes, bounds=None, dtype=BF16, wide=FP32, decays=(-1.0, -0.01), **options):
    """A call of kda in kernels of its own, of few heads: with every gradient from a state, and one without gradients.

    Where key heads are fewer, those with gradients are for other kernels.
    """
    case = derived_cases.make(
        "kda", how, (*sizes, 128, 128), dtype, wide, FP32, decays=decays, bounds=bounds, device="cuda"
    )
    usual, of_channels.LEAST_BLOCKS = of_channels.LEAST_BLOCKS, 0
    derived_cases.differentiate(case, **options)
    with torch.no_grad():
        case.run(**options)
    of_channels.LEAST_BLOCKS = usual


def around(name, words, sizes, dtype=BF16, layout="plain"):
    """What stands before a recurrence or behind it, alone."""
    case = operand_cases.make(name, words, sizes, dtype, layout=layout)
    operand_cases.run(case)
    operand_cases.differentiate(case)


def loss(classes, dtype=BF16, **options):
    """Of rows that begin anywhere, one of which does not count, from logits and by chunks."""
    hidden, head = (torch.randn(n, 32, device="cuda", dtype=dtype, requires_grad=True) for n in (5, classes))
    targets = torch.randint(classes, (5,), device="cuda")
    targets[1] = -100
    rwkv_jit.cross_entropy(hidden @ head.T, targets, **options).backward()
    rwkv_jit.linear_cross_entropy(hidden, head, targets.to(torch.int32), chunk_rows=3, **options).backward()


def convolution(batch, tokens, channels, width, dtype=BF16, texts=None, channels_last=False):
    """Of texts in both directions from a state, and of a token of each row, one of which has no slot."""
    x, weight = torch.randn(batch, tokens, channels, device="cuda"), torch.randn(channels, width, device="cuda")
    state = torch.randn(len(texts) - 1 if texts else batch, channels, width - 1, device="cuda")
    leaves = [y.to(dtype).requires_grad_() for y in (x, weight, weight[:, 0], state)]
    packed = {"cu_seqlens": torch.tensor(texts, device="cuda")} if texts else {}
    y, _ = rwkv_jit.causal_conv1d(*leaves[:3], initial_state=leaves[3], activation="silu", **packed)
    torch.autograd.grad(y, leaves, torch.randn_like(y))
    pool = torch.zeros(batch + 3, width, channels, device="cuda", dtype=dtype).transpose(1, 2)
    slots = torch.arange(batch, device="cuda", dtype=torch.int32) - 1
    with torch.no_grad():
        pool = pool if channels_last else pool.contiguous()
        for seen in (None, slots + 1):
            rwkv_jit.causal_conv1d_update(leaves[0], pool, *leaves[1:3], state_indices=slots, cache_seqlens=seen)


GATED = ("wkv5", "wkv6", "gla", "linear_attention")
CALLS = [
    partial(head_decays, "gated_delta_rule", "norm", (2, 100, 1, 2, 128, 128)),
    partial(head_decays, "gated_delta_rule", "", (1, 100, 1, 3, 40, 24), [0, 0, 1, 50, 100], torch.float16),
    partial(head_decays, "delta_rule", "norm", (80, 40, 1, 2, 64, 64), chunk_len=16),
    partial(head_decays, "simple_gla", "", (1, 33, 2, 2, 33, 65)),
    partial(head_decays, "ssd", "D softplus", (1, 70, 1, 4, 128, 64)),
    partial(head_decays, "gated_delta_rule", "norm", (1, 200, 1, 2, 64, 64)),
    partial(head_decays, "gated_delta_rule", "norm", (1, 300, 1, 2, 64, 64), [0, 100, 100, 300]),
    partial(head_decays, "ssd", "", (1, 130, 2, 2, 64, 128), [0, 0, 1, 66, 130, 130], chunk_len=16),
    partial(head_decays, "gated_delta_rule", "", (1, 70, 1, 2, 128, 64), chunk_len=16),
    partial(channel_decays, "raw bias sigmoid norm", (2, 150, 1, 2), wide=BF16),
    partial(channel_decays, "bounded norm", (1, 150, 2, 2), [0, 0, 1, 70, 150], torch.float16),
    partial(channel_decays, "norm", (1, 150, 1, 2)),
    partial(channel_decays, "raw bias sigmoid norm", (2, 150, 2, 2), wide=BF16),
    partial(channel_decays, "norm", (1, 300, 2, 2), decays=(-2000.0, 0.0)),
    *(
        partial(around, name, words, sizes, dtype, layout)
        for name, words in operand_cases.ALL
        for sizes, dtype, layout in (((2, 70, 2, 6, 64, 64), BF16, "heads first"), ((3, 5, 1, 5, 7, 13), FP32, "plain"))
    ),
    *(partial(operand_cases.check_shared_keys, (2, 37, 2, 12, size), BF16) for size in (64, 40)),
    *(partial(op, name, 2, 33, 2, 40, backend="recurrent", dtype=FP32) for name in (*GATED, "wkv7")),
    *(partial(op, name, 1, 70, 2, 64, packed=True, backend="recurrent") for name in ("wkv6", "wkv7")),
    *(partial(op, name, 2, 70, 3, size) for name in (*GATED, "wkv7") for size in (40, 64, 128)),
    *(partial(op, name, 1, 130, 2, 64, packed=True, backend="chunked") for name in ("gla", "wkv7")),
    *(partial(op, name, 1, 1024, 1, 64, backend="split") for name in ("wkv6", "gla", "linear_attention")),
    partial(op, "wkv7", 1, 2048, 1, 64, backend="split", decay="sigmoid"),
    *(partial(op, name, 1, 2100, 1, 64, packed=True, backend="split") for name in ("wkv6", "wkv7")),
    *(partial(op, name, 2, 70, 2, size, decays="mixed") for name in ("wkv6", "wkv7") for size in (64, 256)),
    *(partial(op, "wkv7", 2, 1030, 3, size, decays="mixed", backend="chunked") for size in (64, 128)),
    *(partial(op, name, 2, 70, 2, 100, num_threads=128) for name in ("wkv6", "wkv7")),
    *(partial(op, name, 2, 90, 2, 200, 136) for name in (*GATED, "wkv7")),
    *(partial(op, name, 1, 90, 2, 256, 512) for name in ("wkv6", "linear_attention")),
    *(partial(op, name, 1, 90, 2, 200, 136, chunk_len=32) for name in ("wkv5", "gla")),
    *(partial(op, "wkv7", 2, 130, 2, 256, decay="sigmoid", num_threads=threads) for threads in (None, 256)),
    partial(op, "wkv7", 1, 130, 2, 192, decay="sigmoid", chunk_len=32),
    partial(op, "wkv7", 1, 90, 2, 512, decay="sigmoid", backend="split", packed=True),
    *(
        partial(narrow, name, 2, 70, 2, size, dtype=dtype)
        for name in (*GATED, "wkv7")
        for size in (64, 100)
        for dtype in (FP32, BF16)
    ),
    *(partial(narrow, name, 1, 70, 2, 7, 13, packed=True, dtype=FP32) for name in ("wkv5", "gla", "wkv7")),
    *(
        partial(narrow, name, 1, 2048, 1, 64, dtype=FP32, **more)
        for name, more in (("wkv6", {}), ("linear_attention", {}), ("wkv7", {"decay": "sigmoid"}))
    ),
    *(partial(narrow, name, 1, 90, 2, 256, 512, dtype=FP32) for name in ("wkv6", "linear_attention")),
    *(partial(scan_in_parts, "wkv7", batch, 640, 1, 256, decay="sigmoid") for batch in (1, 2)),
    *(
        partial(gradients, name, how, sizes, dtype)
        for name, how in layer_cases.ALL
        for sizes, dtype in (((37, 3, 64), BF16), ((5, 2, 7), FP32))
    ),
    *(partial(gradients, "norm_shift", "6 add packed first", (37, 1, 2560), dtype) for dtype in (BF16, FP32)),
    *(partial(wkv4, 2, 70, 33, dtype) for dtype in (FP32, BF16)),
    partial(wkv4, 1, 700, 64, BF16, backend="split"),
    *(partial(wkv4_update, 5, tokens, 33, dtype) for tokens in (1, 11) for dtype in (FP32, BF16)),
    *(partial(timex, 3, 2, tokens, dtype) for tokens in (1, 77, 700) for dtype in (FP32, BF16)),
    *(partial(timex, batch, 1, 2900, dtype) for batch in (1, 20) for dtype in (FP32, BF16)),
    *(partial(timex, 3, 2, tokens, FP32, "transforms") for tokens in (77, 2000, 3000, 8000, 16384)),
    *(partial(timex, 3, 2, tokens, BF16, "transforms") for tokens in (768, 2001)),
    *(
        partial(update, name, 3, tokens, 2, *sizes, state=state, layout=layout, **more)
        for name in (*GATED, "wkv7")
        for layout in ("vk", "kv")
        for tokens, sizes, state, more in (
            (1, (64, 64), FP32, {}),
            (3, (50, 13), BF16, {"rounding": "stochastic", "seed": 5}),
            (2, (300, 136), FP32, {}),
        )
    ),
    partial(update, "gla", 300, 1, 2, 128, 128, layout="kv"),
    *(
        partial(varlen, name, lengths, 2, head_size, index)
        for name in (*GATED, "wkv7")
        for lengths, head_size, index in (((0, 1, 9, 70), 64, torch.int64), ((40, 1, 0), 40, torch.int32))
    ),
    *(
        partial(rules, name, how, dtype, layout)
        for name, how in derived_cases.ALL
        for dtype, layout in ((BF16, "vk"), (FP32, "kv"))
    ),
    partial(gated_pools, BF16),
    partial(gated_pools, FP32, torch.int32),
    *(partial(replay, 2, head_size, dtype) for head_size in (64, 40) for dtype in (FP32, BF16)),
    *(
        partial(derived_cases.replay_in_any_order, name, how, layout, dtype, FP32, random.Random(3), device="cuda")
        for name, how in derived_cases.ALL
        for dtype, layout in ((BF16, "vk"), (FP32, "kv"))
    ),
    *(partial(shards, name, (64, 1, 128), 2, 64) for name in (*GATED, "wkv7")),
    *(partial(layer, 5, *sizes, dtype=dtype) for sizes in ((4, 64), (3, 33), (1, 1000)) for dtype in (BF16, FP32)),
    partial(layer, 9, 32, 64, texts=(4, 4, 5, 9)),
    *(partial(loss, classes, dtype=dtype) for classes in (3, 1001, 4096) for dtype in (BF16, FP32)),
    partial(loss, 9999, l2_wrap=1e-4),
    *(
        partial(convolution, 2, 37, channels, width, dtype, channels_last=channels == 33)
        for channels in (33, 264)
        for width in (2, 4, 8)
        for dtype in (BF16, FP32)
    ),
    partial(convolution, 1, 37, 264, 4, texts=(0, 0, 2, 20, 20, 37)),
]


def main(part=0, parts=1):
    reached, launched = set(), launch.Launches.launch

    def note(prepared, *given):
        reached.update(step.kernel.name for step in prepared.steps if isinstance(step, launch.Launch))
        launched(prepared, *given)

    launch.Launches.launch = note
    everywhere = set()
    for call in CALLS[part::parts]:
        reached.clear()
        call()
        torch.cuda.synchronize()
        everywhere |= reached
        options = [f"{name}={x}" for name, x in call.keywords.items()]
        print(call.func.__name__, *call.args, *options, "->", ", ".join(sorted(reached)), flush=True)
    missing = set(template.names()) - everywhere
    return f"not launched: {', '.join(sorted(missing))}" if missing and parts == 1 else 0


if __name__ == "__main__":
    sys.exit(main(*(int(x) for x in sys.argv[1].split("/")) if len(sys.argv) > 1 else ()))
