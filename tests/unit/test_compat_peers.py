"""What flash-rwkv, RWKV-PEFT and Wind RWKV build, and the module rwkvfla: against float64, and who answers for it."""

import sys

import pytest
import torch
from compat_inputs import LIMITS, B, H, N, T, agree, by_token, channels, delta_inputs, near, rows, states
from torch.utils import cpp_extension

import rwkv_jit
from rwkv_jit import compat
from rwkv_jit.compat import loading


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


# ---- extensions --------------------------------------------------------------------------------------------------


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


def load(name, *sources):
    return cpp_extension.load(name=name, sources=[f"a/b/{x}" for x in sources], is_python_module=False)


class Infctx(torch.autograd.Function):
    """As RWKV-PEFT has it: the saved state is the one that the forward overwrites."""

    @staticmethod
    def forward(ctx, module, r, k, v, w, u, s):
        ctx.module = module
        ctx.save_for_backward(r, k, v, w, u, s)
        y = torch.full_like(r, torch.nan)
        module.forward(*r.shape, u.shape[0], r, k, v, w, u, s, y)
        return y

    @staticmethod
    def backward(ctx, gy):
        r, k, v, w, u, s = ctx.saved_tensors
        gr, gk, gv, gw = (torch.full_like(r, torch.nan) for _ in range(4))
        gu, gs = torch.full_like(r[:, 0], torch.nan), torch.full_like(s, torch.nan)
        ctx.module.backward(*r.shape, u.shape[0], r, k, v, w, u, s, gy, gr, gk, gv, gw, gu, gs)
        return None, gr, gk, gv, gw, gu.sum(0).view_as(u), gs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_infctx_moves_the_state_on_and_has_the_gradients_of_the_one_before(dtype, installed):
    module, sizes = load("wkv6infctx"), (B, T, H, N)
    r, k, v, own_w = by_token(sizes, dtype)
    w = -torch.exp(own_w) if dtype == torch.float32 else own_w  # as the extension wkv6 has it
    u, given = rows(H, N, dtype=dtype), states(sizes, dtype)
    leaves = [x.contiguous().requires_grad_() for x in (*channels(r, k, v, w), u, given)]
    state = leaves[-1].clone()
    y = Infctx.apply(module, *leaves[:-1], state)
    moved, gy = state.detach().clone(), rows(B, T, H * N, dtype=dtype)
    exact = [x.double().requires_grad_() for x in (r, k, v, own_w, u, given)]
    want, last = rwkv_jit.wkv6_ref(*exact, True)
    grads = torch.autograd.grad(y, leaves, gy)
    of = torch.autograd.grad(want, exact, gy.double().view_as(want))
    near((y, moved, *grads), (want, last, *of), LIMITS[dtype])
    assert torch.equal(state, moved)


def test_infctx_of_a_state_that_no_forward_overwrote(installed):
    module, sizes = load("wkv6infctx"), (B, T, H, N)
    rows_, u, s = [x.flatten(2).contiguous() for x in by_token(sizes, torch.bfloat16)], rows(H, N), states(sizes)
    rows_ = [x.float() for x in rows_]
    gy, says = rows(B, T, H * N), (B, T, H * N, H)
    results = []
    for name in ("wkv6infctx", "wkv6state"):
        buffers = [torch.full(x.shape, torch.nan) for x in (*rows_, rows_[0][:, 0], s)]
        load(name).backward(*says, *rows_, u, s, gy, *buffers)
        results.append(buffers)
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(ValueError, match=r"s: expected shape \[3, 2, 5, 5\], got \[2, 5, 5\]"):
        module.forward(*says, *rows_, u, s[0], torch.empty(B, T, H * N))


def test_both_modules_of_flash_rwkv_in_a_process(installed):
    """They are built under one name. w of 5 is the decay, of 6 its logarithm."""
    sizes, says = (B, T, H, N), (B, T, H * N, H)
    five, six = load("flash_rwkv_5", "wkv5_op.cpp", "wkv5_kernel.cu"), load("flash_rwkv_5", "wkv6_op.cpp", "wkv6.cu")
    assert not hasattr(six, "backward_fp32")
    r, k, v, w = (x.contiguous() for x in by_token(sizes, torch.float32))
    u, gy = rows(H, N), rows(*sizes)
    for module, reference, own in ((five, rwkv_jit.wkv5_ref, rows(H, N)), (six, rwkv_jit.wkv6_ref, w)):
        state, y = states(sizes), torch.full(sizes, torch.nan)
        given = torch.exp(-torch.exp(own)) if module is five else -torch.exp(own)
        want, last = reference(*(x.double() for x in (r, k, v, own, u, state)), True)
        module.forward_fp32(*says, state, r, k, v, given, u, y)
        near((y, state), (want, last))
    own = rows(H, N)
    grads = [torch.full(sizes, torch.nan) for _ in range(3)] + [torch.full((B, H * N), torch.nan) for _ in range(2)]
    log = -torch.exp(own)
    five.backward_fp32(*says, r, k, v, torch.exp(log), log, u, gy, *grads)
    exact = [x.double().requires_grad_() for x in (r, k, v, own, u)]
    of = torch.autograd.grad(rwkv_jit.wkv5_ref(*exact)[0], exact, gy.double())
    near((*grads[:3], *(x.sum(0) for x in grads[3:])), of)


def test_another_extension_of_that_name_is_built_by_torch(installed, monkeypatch):
    monkeypatch.setattr(loading, "_torch_load", lambda *given, **named: "built")
    assert load("flash_rwkv_5", "mine.cpp") == "built"
    assert cpp_extension.load("flash_rwkv_5", "mine.cpp") == "built"
    assert hasattr(cpp_extension.load("flash_rwkv_5", "a/wkv6_op.cpp"), "forward_bf16")


@pytest.mark.parametrize(
    "name", ["chunked_cuda", "chunked_cuda_varlen", "backstepping_smallhead", "backstepping_longhead"]
)
def test_extensions_of_wind(name, installed):
    """With and without scratch, in two head sizes, and gradients in the dtype of their tensors."""
    load(f"wind_{name}")
    ops, packed = getattr(torch.ops, f"wind_{name}"), name.endswith("varlen")
    for size in (5, 8):
        sizes = (1 if packed else B, 35, H, size)
        r, w, k, v, a, b = delta_inputs(sizes)
        lengths = torch.tensor([0, 16, 35]) if packed else None
        count = 2 if packed else B
        s0, dlast, dy = rows(count, H, size, size), rows(count, H, size, size), rows(*sizes)
        inputs, more = [w, r, k, v, a, b], [lengths] if packed else []
        if packed:
            inputs, dy = [x[0] for x in inputs], dy[0]
        s = torch.empty(*(() if packed else (B,)), H, 2, size, size)
        scratch = [s, torch.empty(dy.shape)] if "backstepping" in name else [s]
        exact = [x.double().requires_grad_() for x in (r, w, k, v, a, b, s0)]
        want, final = rwkv_jit.wkv7_ref(*exact, True, lengths)
        of = torch.autograd.grad([want, final], exact, [dy.double().view_as(want), dlast.double()])
        can_be_none = name != "backstepping_smallhead"
        for given in ([None] * len(scratch) if can_be_none else scratch, scratch):
            y, last = torch.full(dy.shape, torch.nan), torch.full(s0.shape, torch.nan)
            ops.forward(*inputs, s0, y, *given, last, *more)
            near((y, last), (want, final))
        wide = torch.float64
        dw, dq, *others = [torch.full(dy.shape, torch.nan, dtype=wide) for _ in range(6)]
        ds0 = torch.full(s0.shape, torch.nan)
        ops.backward(*inputs, dy, *scratch, dlast, dw, dq, *others, ds0, *more)
        near((dq, dw, *others, ds0), of)


def routed(r, w, k, v, a, b, s0, statei):
    """RWKV-7 where each token reads and changes one of a head's states, token by token."""
    last, y = list(s0.unbind(2)), []
    for t in range(r.shape[1]):
        rows, out = [x[:, t] for x in (r, torch.exp(-torch.exp(w)), k, v, a, b)], 0
        for i, state in enumerate(last):
            r_, w_, k_, v_, a_, b_ = (x[:, :, None] for x in rows)
            new = state * w_ + (state @ a_.mT) * b_ + v_.mT * k_
            mine = (statei[:, t] == i)[..., None, None]
            last[i] = torch.where(mine, new, state)
            out = out + torch.where(mine, new @ r_.mT, 0.0)
        y.append(out[..., 0])
    return torch.stack(y, 1), torch.stack(last, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 35])
def test_heads_with_several_states(tokens, dtype, installed):
    """Of Wind RWKV; one head never has one of its states."""
    load("wind_smallhead_moh", "smallhead_moh.cu", "smallhead_moh.cpp")
    sizes, states = (B, tokens, H, N), 3
    r, w, k, v, a, b = (x.contiguous() for x in delta_inputs(sizes, dtype))
    s0, dlast, dy = rows(B, H, states, N, N), rows(B, H, states, N, N), rows(*sizes, dtype=dtype)
    statei = torch.randint(0, states, sizes[:3], dtype=torch.int32)
    statei[:, :, 0] %= 2
    s_offset = (statei.unsqueeze(-1) == torch.arange(states)).sum(1).cumsum(2).int()
    s, sa = torch.empty(B, H, (tokens - 1) // 16 + 1, N, N), torch.empty(sizes)
    exact = [x.double().requires_grad_() for x in (r, w, k, v, a, b, s0)]
    want = routed(*exact, statei)
    of = torch.autograd.grad(want, exact, [dy.double(), dlast.double()])
    y, last = torch.full(sizes, torch.nan, dtype=dtype), torch.full(s0.shape, torch.nan)
    ops, limit = torch.ops.wind_smallhead_moh, LIMITS[dtype]
    ops.forward(w, r, k, v, a, b, s0, y, s, sa, last, statei, s_offset)
    near((y, last), want, limit)
    given = s0.clone()
    s0.fill_(torch.nan)  # it is the caller's
    dw, dq, *others = [torch.full(sizes, torch.nan, dtype=dtype) for _ in range(6)]
    ds0 = torch.full(s0.shape, torch.nan)
    ops.backward(w, r, k, v, a, b, dy, s, sa, dlast, dw, dq, *others, ds0, last, statei, s_offset)
    near((dq, dw, *others, ds0), of, limit)
    with pytest.raises(ValueError, match="^s: expected the tensor that a forward was called with"):
        ops.backward(w, r, k, v, a, b, dy, s + 0, sa, dlast, dw, dq, *others, ds0, last, statei, s_offset)
    statei[0, 0, 0] = states
    with pytest.raises(ValueError, match=r"^statei: expected shape \[3, \d+, 2\] and numbers from 0 to 2$"):
        ops.forward(w, r, k, v, a, b, given, y, s, sa, last, statei, s_offset)


def test_schemas_of_wind(installed):
    for name in ("chunked_cuda", "chunked_cuda_varlen", "backstepping_smallhead", "backstepping_longhead"):
        load(f"wind_{name}")
    forward = torch.ops.wind_chunked_cuda_varlen.forward.default._schema
    assert " ".join(x.name for x in forward.arguments) == "w q k v a b s0 y s sT cu_seqlens"
    forward = torch.ops.wind_backstepping_longhead.forward.default._schema
    assert " ".join(x.name for x in forward.arguments if isinstance(x.type, torch.OptionalType)) == "s sa"
    backward = torch.ops.wind_backstepping_longhead.backward.default._schema
    assert " ".join(x.name for x in backward.arguments) == "w q k v a b dy s sa dsT dw dq dk dv da db ds0"
    assert " ".join(x.name for x in backward.arguments if x.alias_info) == "dw dq dk dv da db ds0"


# ---- rwkvfla -----------------------------------------------------------------------------------------------------


@pytest.fixture
def rwkvfla(installed):
    from rwkvfla.ops import rwkv6, rwkv7

    return rwkv6.chunk_rwkv6, rwkv7.chunk_rwkv7


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunk_rwkv7(rwkvfla, is_log, head_first, dtype):
    sizes = (B, T, H, N)
    r, w, k, v, a, b = delta_inputs(sizes, dtype)
    inputs = (r, -torch.exp(w) if is_log else w, k, v, a, b, states(sizes, dtype))

    def function(r, w, k, v, a, b, s):
        r, w, k, v, a, b = (x.transpose(1, 2) if head_first else x for x in (r, w, k, v, a, b))
        decay = {"log_w": w} if is_log else {"w": w}
        y, last = rwkvfla[1](
            r=r, k=k, v=v, a=a, b=b, **decay, scale=0.5, initial_state=s, output_final_state=True,
            head_first=head_first,
        )  # fmt: skip
        return (y.transpose(1, 2) if head_first else y), last

    options = {"state_layout": "kv", "scale": 0.5, "decay": "log" if is_log else "raw"}
    _, last = agree(function, lambda *x: rwkv_jit.wkv7_ref(*x, True, **options), inputs)
    assert last.dtype == torch.float32
    with pytest.raises(ValueError, match="w: expected w or log_w, got neither"):
        rwkvfla[1](*inputs[:5])
    assert rwkvfla[1](r, k, v, a, b, w, output_final_state=False)[1] is None


@pytest.mark.parametrize("named", [None, False, True])
def test_chunk_rwkv6(rwkvfla, named):
    """RWKV-PEFT gives heads before tokens and does not say so; the heads of u tell."""
    sizes = (B, T, H, N)
    for head_first in (False, True) if named is None else (named,):
        inputs = (*by_token(sizes, torch.float32)[:3], -rows(*sizes).abs(), rows(H, N), states(sizes))

        def function(r, k, v, w, u, s, head_first=head_first):
            r, k, v, w = (x.transpose(1, 2) if head_first else x for x in (r, k, v, w))
            y, last = rwkvfla[0](
                r, k, v, w, u=u, scale=1.0, initial_state=s, output_final_state=True,
                **({} if named is None else {"head_first": named}),
            )  # fmt: skip
            return (y.transpose(1, 2) if head_first else y), last

        agree(function, lambda *x: rwkv_jit.wkv6_ref(*x, True, decay="log", state_layout="kv"), inputs)
    r, k, v, w, u, _ = inputs
    if not head_first:
        y = rwkvfla[0](r, k, v, w, u)[0]
        torch.testing.assert_close(y, rwkv_jit.wkv6(r, k, v, w, u, scale=N**-0.5, decay="log")[0])
    square = [x[:, :H] for x in (r, k, v, w)] if not head_first else [torch.zeros(1, H, H, N)] * 4
    with pytest.raises(ValueError, match="head_first: expected True or False where there are as many tokens as heads"):
        rwkvfla[0](*square, u)
    assert rwkvfla[0](*square, u, head_first=False)[0].shape == square[0].shape


def test_rwkvfla_is_there_between_install_and_uninstall():
    compat.install()
    compat.install()
    import rwkvfla

    assert rwkvfla.ops.rwkv6.chunk_rwkv6.__module__ == "rwkv_jit.compat.rwkvfla"
    with pytest.raises(ImportError, match="fused_k_rwkv7"):
        from rwkvfla.ops.rwkv7 import fused_k_rwkv7  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"rwkvfla\.layers"):
        import rwkvfla.layers  # noqa: F401
    compat.uninstall()
    assert not [name for name in sys.modules if name.startswith("rwkvfla")]
    with pytest.raises(ModuleNotFoundError, match="rwkvfla"):
        import rwkvfla  # noqa: F811


def test_rwkvfla_imports_torch_when_it_is_imported(child):
    child(
        "import sys, rwkv_jit.compat as c; c.install(); assert 'torch' not in sys.modules\n"
        "from rwkvfla.ops.rwkv7 import chunk_rwkv7; assert 'torch' in sys.modules"
    )


def test_the_package_itself_is_taken_where_it_is_installed(child, tmp_path):
    """Also for a module that this version of it has not."""
    (tmp_path / "rwkvfla" / "ops").mkdir(parents=True)
    for folder in ("rwkvfla", "rwkvfla/ops"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "rwkvfla" / "ops" / "rwkv6.py").write_text("chunk_rwkv6 = 'own'")
    child(f"""
import sys, rwkv_jit.compat as c
sys.path.append({str(tmp_path)!r})
c.install()
from rwkvfla.ops.rwkv6 import chunk_rwkv6
assert chunk_rwkv6 == "own"
try:
    import rwkvfla.ops.rwkv7
except ModuleNotFoundError:
    c.uninstall()
    assert "rwkvfla.ops.rwkv6" in sys.modules
else:
    raise AssertionError
""")
