"""What holds for every call: some kernels are launched, within what a block may have, and the fake says what is saved.

Sizes, architectures and options are drawn at random. Nothing is compiled, and no tensor has memory.
"""

import threading
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import rwkv_jit
from rwkv_jit.schedules.table import OPS

# KiB of shared memory that a block may have at most, by the programming guide; PTX may run on the least of the newer.
MOST_SHARED = {
    "sm_60": 48, "sm_70": 96, "sm_75": 64, "compute_75": 64, "sm_80": 163, "compute_80": 163, "sm_86": 99, "sm_89": 99,
    "sm_90": 227, "sm_90a": 227, "sm_100": 227, "sm_120": 99,
}  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WITH_HEADS = [name for name, op in OPS.items() if op.has_heads]


class Call(NamedTuple):
    """A call of an op."""

    op: str
    arch: str
    dtype: torch.dtype
    head_size: int
    value_size: int
    batch: int
    tokens: int
    heads: int
    is_packed: bool
    has_state: bool
    training: bool
    decay: str
    decay_bound: float | None
    state_layout: str
    chunk_len: int | None
    num_threads: int | None
    switches: tuple[bool, bool]  # whether rows of other types may be narrow, and whether results have any batch

    def tensors(self, device):
        """The inputs in the order of the op, the initial state and cu_seqlens."""
        sizes = {
            "B": self.batch, "T": self.tokens, "H": self.heads, "K": self.head_size, "V": self.value_size,
        }  # fmt: skip
        inputs = [
            torch.empty([sizes[dim] for dim in dims], dtype=self.dtype, device=device, requires_grad=self.training)
            for dims in OPS[self.op].inputs.values()
        ]
        sequences, state, bounds = self.batch, None, None
        if self.is_packed:
            sequences, bounds = 3, torch.empty(4, dtype=torch.int64, device=device)
        if self.has_state:
            shape = [sequences, self.heads, *(sizes[dim] for dim in self.state_layout.upper())]
            state = torch.empty(shape, device=device, requires_grad=self.training)
        return inputs, state, bounds

    def options(self):
        """The options of the public function."""
        decay = {} if self.decay == "none" else {"decay": self.decay, "decay_bound": self.decay_bound}
        return {
            "state_layout": self.state_layout, "chunk_len": self.chunk_len, "num_threads": self.num_threads, **decay,
        }  # fmt: skip

    def arguments(self, device):
        """The arguments of the torch op of the forward, which saves."""
        inputs, state, bounds = self.tensors(device)
        options = (1.0, self.decay, self.state_layout, 64, self.chunk_len, self.num_threads, "auto", None, None)
        return (*inputs, state, bounds, *options, *self.switches, False, True, True)


@st.composite
def calls(draw, pinned=False):
    """Any call that the ops' pages allow; with `pinned` geometries that a caller chose, which may be refused."""
    op, is_packed = draw(st.sampled_from(WITH_HEADS)), draw(st.booleans())
    # Large and small ones by turns: a single range would be drawn from near its low end.
    sizes = st.sampled_from([64, 128, 256]) | st.integers(1, 136) | st.integers(137, 1100)
    tokens = st.integers(1, 100) | st.integers(1024, 9000)
    head_size = draw(sizes)
    decay = "none" if OPS[op].decay == "none" else draw(st.sampled_from(["raw", "sigmoid", "log", "direct"]))
    has_bound = decay not in ("none", "sigmoid")
    return Call(
        op, draw(st.sampled_from(list(MOST_SHARED))), draw(st.sampled_from(DTYPES)), head_size,
        draw(st.just(head_size) | sizes), 1 if is_packed else draw(st.integers(1, 3)), draw(tokens),
        draw(st.sampled_from([1, 2, 7, 64])), is_packed, draw(st.booleans()), draw(st.booleans()), decay,
        draw(st.sampled_from([None, -0.5, -2.0, -4.0, -8.0, -9.0])) if has_bound else None,
        draw(st.sampled_from(["vk", "kv"])),
        draw(st.sampled_from([None, 16, 32, 64])) if pinned else None,
        draw(st.sampled_from([None, 32, 64, 128, 256, 512])) if pinned else None,
        draw(st.tuples(st.booleans(), st.booleans())),
    )  # fmt: skip


@pytest.fixture
def pretended(gpus, nothing_known, monkeypatch):
    """Tensors without memory take the way of CUDA tensors, to a driver that takes notes; nothing is compiled.

    All that this file knows of the package's modules is here, but for the table of ops.
    """
    from rwkv_jit.call import checks, registry, tensors, torch_op
    from rwkv_jit.call import switches as modes
    from rwkv_jit.kernels import compiler, cuda, identity, signatures
    from rwkv_jit.kernels.cache import Compiled, Resources

    def compiled(rendered, arch, parameters):
        return Compiled(gpus.archs[0].encode(), arch, {rendered.name: Resources(32)})

    def new(shape, strides, dtype):
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    monkeypatch.setenv("RWKVJIT_CACHE", "0")
    monkeypatch.setattr(compiler, "compile", compiled)
    monkeypatch.setattr(identity, "identity", lambda: "12.9 0123abcd")
    for module in (checks, torch_op):
        monkeypatch.setattr(module, "is_for_kernels", lambda backend, x: True)
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(tensors, "validate", lambda name, x: None)
    monkeypatch.setattr(tensors, "new", new)
    monkeypatch.setattr(tensors, "packing", lambda cu_seqlens, tokens: cu_seqlens)
    monkeypatch.setattr(tensors, "readable_packing", lambda cu_seqlens: cu_seqlens)
    monkeypatch.setattr(checks, "check_packing", lambda cu_seqlens, first: None)
    side = SimpleNamespace(raw=8, follow=list, join=list)
    monkeypatch.setattr(cuda, "side_stream", lambda device, stream: side)
    monkeypatch.setattr(cuda, "parameter_sizes", lambda function, most: None)
    monkeypatch.setattr(cuda, "make_current", lambda device: gpus.with_context.add(threading.get_ident()))
    monkeypatch.setattr(cuda, "prepared_zero", lambda address, count, stream: int)
    monkeypatch.setattr(cuda, "read_integers", lambda address, count, stream: [0] * count)  # all kernels are needed
    monkeypatch.setattr(gpus, "occupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 2, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of "meta"
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(gpus, "parameter_sizes", lambda function, most=None: ())  # which do not matter here

    def launches(call):
        """Run the public function, and the gradients of what it returns; return what the driver was asked for."""
        signatures.forget()
        gpus.take()
        monkeypatch.setenv("RWKVJIT_ARCH", call.arch)
        precise, rows_alone = call.switches
        monkeypatch.setattr(modes, "current", lambda: (("fp32", "bf16") if precise else (), rows_alone))
        inputs, state, bounds = call.tensors("meta")
        with torch.set_grad_enabled(call.training):
            results = getattr(rwkv_jit, call.op)(*inputs, state, True, bounds, **call.options())
            if call.training:
                leaves = [*inputs, *([] if state is None else [state])]
                torch.autograd.grad(results, leaves, [torch.empty_like(x) for x in results])
        return gpus.take()

    def forward(call):
        """Run what runs the torch op on a GPU."""
        signatures.forget()
        monkeypatch.setenv("RWKVJIT_ARCH", call.arch)
        with torch.no_grad():
            run = registry._runner(f"{call.op}_fwd")["run"]
            return run(*call.arguments("meta"), decay_bound=call.decay_bound)

    return SimpleNamespace(launches=launches, forward=forward)


def check_launches(call, launches):
    assert launches
    for launch in launches:
        assert launch.shared_bytes <= MOST_SHARED[call.arch] * 1024, launch.entry
        x, y, z = launch.grid
        assert 1 <= x < 2**31, launch.entry
        assert max(y, z) <= 65535, launch.entry
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        assert 32 <= threads <= 1024, launch.entry
        assert threads % 32 == 0, launch.entry


anything_goes = settings(
    max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@anything_goes
@given(call=calls())
def test_every_call_has_kernels_that_fit_its_gpu(pretended, call):
    check_launches(call, pretended.launches(call))


@anything_goes
@given(call=calls(pinned=True))
def test_a_geometry_of_the_caller_fits_or_is_refused(pretended, call):
    try:
        launches = pretended.launches(call)
    except rwkv_jit.UnsupportedConfigError as error:
        assert any(name in str(error) for name in ("chunk_len", "num_threads", "CHUNK_LEN", "NUM_THREADS"))  # noqa: PT017
    else:
        check_launches(call, launches)


@anything_goes
@given(call=calls())
def test_the_fake_promises_what_the_forward_returns_and_saves(pretended, call):
    made = pretended.forward(call)
    with FakeTensorMode(), torch.no_grad():
        op = getattr(torch.ops.rwkv_jit, f"{call.op}_fwd")
        promised = op(*call.arguments("cpu"), decay_bound=call.decay_bound)
    described = [[(tuple(x.shape), x.dtype, x.stride()) for x in results] for results in (made, promised)]
    assert described[0] == described[1]
