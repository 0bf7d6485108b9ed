"""Models of the Hugging Face Hub on these ops: RWKV-4 of transformers, remote code, and layers for `kernels`."""

import sys
import types

import pytest
import torch
from torch import nn
from torch.utils import cpp_extension

import rwkv_jit
from rwkv_jit import compat
from rwkv_jit.compat import hf, loading

B, T, H, N = 2, 19, 3, 8
C = H * N
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)


@pytest.fixture(autouse=True)
def installed():
    compat.install()
    yield
    compat.uninstall()


def rows(*shape, dtype=torch.float32, scale=0.5):
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def check(found, want, dtype):
    for x, y in zip(found, want, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y).norm() <= LIMITS[dtype] * y.norm()


# ---- RWKV-4 of transformers --------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def device(self):
        class Device(str):
            type = "cuda"

        return Device("cpu")


def plain(x):
    return x.as_subclass(torch.Tensor) if isinstance(x, OnGpu) else x


@pytest.fixture
def modeling(monkeypatch):
    """Transformers' module, which takes its path for GPUs; the kernel that it finds there gets CPU tensors."""
    pytest.importorskip("transformers")
    from transformers.models.rwkv import modeling_rwkv

    ours = modeling_rwkv.rwkv_cuda_kernel
    calls = []

    def on_cpu(name, function):
        def run(*tensors):
            calls.append(name)
            function(*map(plain, tensors))

        return run

    def attend(w, u, k, v, state=None, return_state=False):
        if k.shape[1] == 1:
            return modeling_rwkv.rwkv_linear_attention_cpu(w, u, k, v, state, return_state)
        moved = [x.as_subclass(OnGpu) for x in (w, u, k, v)]
        y, last = modeling_rwkv.RwkvLinearAttention.apply(*moved, state, return_state)
        return plain(y), last and [plain(x) for x in last]

    functions = {name: on_cpu(name, x) for name, x in vars(ours).items() if callable(x)}
    kernel = types.SimpleNamespace(max_seq_length=ours.max_seq_length, **functions)
    monkeypatch.setattr(modeling_rwkv, "rwkv_cuda_kernel", kernel)
    monkeypatch.setattr(modeling_rwkv, "attend", attend, raising=False)
    monkeypatch.setattr(modeling_rwkv, "calls", calls, raising=False)
    return modeling_rwkv


@DTYPES
@pytest.mark.parametrize("with_state", [False, True])
def test_transformers_function_of_rwkv4_runs_on_our_kernel(modeling, dtype, with_state):
    """Gradients are checked without a state: the function drops that of the state."""
    inputs = [rows(C, dtype=dtype), rows(C, dtype=dtype), rows(B, T, C, dtype=dtype), rows(B, T, C, dtype=dtype)]
    state = [rows(B, C), rows(B, C).abs() + 0.1, rows(B, C)] if with_state else None
    leaves = [x.clone().requires_grad_(not with_state) for x in inputs]
    y, last = modeling.attend(*leaves, state, with_state)
    exact = [x.double().requires_grad_() for x in inputs]
    initial = torch.stack(state, 1).double() if with_state else None
    want, final = rwkv_jit.wkv4_ref(*exact, initial, True)
    assert y.dtype == dtype
    check([y], [want.detach()], dtype)
    suffix = "_bf16" if dtype == torch.bfloat16 else ""
    if with_state:
        check(last, final.detach().unbind(1), dtype)
        assert modeling.calls == [f"forward_with_state{suffix}"]
    else:
        dy = rows(B, T, C, dtype=dtype)
        check(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, exact, dy.double()), dtype)
        assert modeling.calls == [f"forward{suffix}", f"backward{suffix}"]


def test_rwkv4_of_transformers_trains_and_generates_the_same(modeling, monkeypatch):
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(1)
    config = RwkvConfig(
        vocab_size=97, context_length=16, hidden_size=32, num_hidden_layers=3, bos_token_id=0, eos_token_id=0
    )
    model = RwkvForCausalLM(config)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.2)
    text = torch.randint(1, 97, (B, 23))  # longer than the context

    def run():
        loss = model.train()(text, labels=text).loss
        grads = map(plain, torch.autograd.grad(loss, list(model.parameters())))
        options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            half = model.eval()(text[:, :11], use_cache=True)
            rest = model(text[:, 11:], state=half.state, use_cache=True)
        return [loss.detach(), *grads, rest.logits, *rest.state], model.generate(text, **options)

    want, chosen = run()
    assert not modeling.calls
    monkeypatch.setattr(modeling, "rwkv_linear_attention", modeling.attend)
    found, generated = run()
    assert {"forward", "backward", "forward_with_state"} == set(modeling.calls)
    assert generated.tolist() == chosen.tolist()
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-5)


def test_rwkv4_of_transformers_loads_no_kernel_of_its_own(monkeypatch):
    """Where it would ask the Hub: there is a GPU and ninja."""
    pytest.importorskip("transformers")
    from transformers import RwkvConfig
    from transformers.integrations import hub_kernels
    from transformers.models.rwkv import modeling_rwkv

    from rwkv_jit.compat import hf_rwkv4

    for name in ("is_ninja_available", "is_torch_cuda_available", "is_kernels_available"):
        monkeypatch.setattr(modeling_rwkv, name, lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **options: types.SimpleNamespace())
    modeling_rwkv.RwkvModel(RwkvConfig(vocab_size=97, context_length=16, hidden_size=32, num_hidden_layers=2))
    assert modeling_rwkv.rwkv_cuda_kernel is hf_rwkv4.KERNEL


ORDERS = """
import sys
sys.path.insert(0, sys.argv[1])
from rwkv_jit import compat
name = "transformers.models.rwkv.modeling_rwkv"
def theirs():
    model = sys.modules[name]
    return model.rwkv_cuda_kernel is None and model.load_wkv_cuda_kernel.__module__ == name
def ours():
    model = sys.modules[name]
    room = sys.modules["rwkv_jit.compat.hf_rwkv4"]
    return model.rwkv_cuda_kernel is room.KERNEL and model.load_wkv_cuda_kernel is room.load_wkv_cuda_kernel
if "before" in sys.argv:
    compat.install()
if "undone" in sys.argv:
    compat.uninstall()
import transformers.models.rwkv.modeling_rwkv
if "after" in sys.argv or "undone" in sys.argv:
    assert theirs()
    compat.install()
assert ours()
compat.install()
compat.uninstall()
assert theirs()
compat.install()
assert ours()
"""


@pytest.mark.parametrize("when", [["before"], ["after"], ["before", "undone"]], ids=" ".join)
def test_rwkv4_of_transformers_in_every_order(child, tmp_path, when):
    """With as much of transformers as is replaced; once with all of it, where it is installed."""
    folder = tmp_path / "transformers" / "models" / "rwkv"
    folder.mkdir(parents=True)
    for each in (folder, *folder.parents[:2]) if "undone" not in when else ():
        (each / "__init__.py").touch()
    text = "rwkv_cuda_kernel = None\ndef load_wkv_cuda_kernel(context_length): pass\n"
    (folder / "modeling_rwkv.py").write_text(text, encoding="utf-8")
    child(ORDERS, str(tmp_path), *when, after="transformers.modeling_utils" if "undone" in when else "torch")


# ---- remote code -------------------------------------------------------------------------------------------------


def remote_inputs(name, dtype):
    r, k, v, w = (rows(B, T, C, dtype=dtype) for _ in range(4))
    if name == "rwkv5_linear_attention":
        w = rows(H, N, dtype=dtype)
    return r, k, v, w, rows(H, N, dtype=dtype)


def by_heads(x):
    return x.unflatten(-1, (H, N)) if x.shape[-1] == C else x


REMOTE = pytest.mark.parametrize("name", ["rwkv5_linear_attention", "rwkv6_linear_attention"])


@DTYPES
@REMOTE
@pytest.mark.parametrize("with_state", [False, True])
def test_linear_attention_of_remote_code(name, dtype, with_state):
    """The state lies within one of all layers, as models keep it, and has gradients."""
    inputs = remote_inputs(name, dtype)
    all_layers = rows(B, H, N, N, 4)
    state = all_layers[..., 2] if with_state else None
    leaves = [x.clone().requires_grad_() for x in (*inputs, *([state] if with_state else []))]
    strided = torch.stack([leaves[5]] * 4, -1)[..., 2] if with_state else None
    out, last = getattr(hf, name)(True, *leaves[:5], strided)
    exact = [x.double().requires_grad_() for x in (*inputs, *([state] if with_state else []))]
    want, final = getattr(rwkv_jit, f"wkv{name[4]}_ref")(
        *map(by_heads, exact[:5]), initial_state=exact[5] if with_state else None, output_final_state=True,
        state_layout="kv",
    )  # fmt: skip
    assert out.dtype == last.dtype == torch.float32
    check([out.detach(), last.detach()], [want.detach(), final.detach()], dtype)
    dout, dlast = rows(B, T, H, N, dtype=dtype), rows(B, H, N, N)
    found = torch.autograd.grad([out, last], leaves, [dout.float(), dlast])
    check(found, torch.autograd.grad([want, final], exact, [dout.double(), dlast.double()]), dtype)
    kept = all_layers.clone()
    getattr(hf, name)(False, *inputs, state)
    assert torch.equal(all_layers, kept)


@REMOTE
def test_linear_attention_says_what_does_not_fit(name):
    call, (r, k, v, w, u) = getattr(hf, name), remote_inputs(name, torch.float32)
    with pytest.raises(ValueError, match=r"time_first: expected shape \[heads, head size\], got \[24\]"):
        call(True, r, k, v, w, u.flatten(), None)
    with pytest.raises(ValueError, match=r"value: expected shape \[B, T, 24\], got \[2, 19, 3, 8\]"):
        call(True, r, k, v.view(B, T, H, N), w, u, None)
    with pytest.raises(ValueError, match=r"time_decay: expected shape .*, got \[2\]"):
        call(True, r, k, v, w.flatten()[:2], u, None)
    with pytest.raises(ValueError, match=r"^state: expected shape \[2, 3, 8, 8\]"):
        call(True, r, k, v, w, u, torch.zeros(B, C, N))
    with pytest.raises(TypeError, match=r"^key: expected torch\.float32 like receptance, got torch\.float16"):
        call(True, r, k.half(), v, w, u, None)
    with pytest.raises(TypeError, match=r"^time_decay: expected a torch\.Tensor, got NoneType"):
        call(True, r, k, v, None, u, None)


def remote_module(**functions):
    module = types.ModuleType("transformers_modules.remote")
    vars(module).update(functions)
    return module


def theirs(training, receptance, key, value, time_decay, time_first, state):
    raise AssertionError("theirs")


def test_patch_of_a_module_and_back():
    module = remote_module(rwkv6_linear_attention=theirs, other=theirs)
    for _ in range(2):
        assert hf.patch(module) == ["transformers_modules.remote.rwkv6_linear_attention"]
        assert module.rwkv6_linear_attention is hf.rwkv6_linear_attention
        assert module.other is theirs
    compat.uninstall()
    assert module.rwkv6_linear_attention is theirs


def test_uninstall_leaves_what_somebody_else_has_replaced_since():
    module = remote_module(rwkv5_linear_attention=theirs)
    hf.patch(module)
    module.rwkv5_linear_attention = 5
    compat.uninstall()
    assert module.rwkv5_linear_attention == 5


def test_patch_of_a_model(monkeypatch):
    module = remote_module(rwkv5_linear_attention=theirs)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = """
from torch import nn
class Attention(nn.Module):
    def forward(self, *inputs):
        return rwkv5_linear_attention(True, *inputs)
"""
    exec(source, vars(module))
    nowhere = type("Nowhere", (nn.Identity,), {"__module__": "made.on.the.fly"})
    model = nn.Sequential(nowhere(), module.Attention())
    assert hf.patch(model) == ["transformers_modules.remote.rwkv5_linear_attention"]
    inputs = remote_inputs("rwkv5_linear_attention", torch.float32)
    want = hf.rwkv5_linear_attention(True, *inputs, None)
    assert all(torch.equal(x, y) for x, y in zip(model[1](*inputs, None), want, strict=True))


def recurrent(receptance, decay, key, value, a, b, initial_state, attention_mask=None):
    return "recurrent", attention_mask


def test_patch_of_rwkv7(monkeypatch):
    monkeypatch.setattr(compat, "rwkv7_recurrent", recurrent, raising=False)

    def theirs(receptance, decay, key, value, a, b, initial_state, attention_mask=None):
        raise AssertionError("theirs")

    module = remote_module(rwkv7_recurrent=theirs)
    hf.patch(module)
    assert module.rwkv7_recurrent(*range(7), attention_mask=8) == ("recurrent", 8)
    compat.uninstall()
    assert module.rwkv7_recurrent is theirs


def test_patch_says_what_does_not_fit():
    with pytest.raises(TypeError, match="target: expected a module of Python or a torch.nn.Module, got 3"):
        hf.patch(3)
    with pytest.raises(
        ValueError, match=r"expected a module with rwkv5_linear_attention or .*, got torch\.nn\.modules"
    ):
        hf.patch(nn.Linear(2, 2))
    module = remote_module(rwkv5_linear_attention=theirs, rwkv6_linear_attention=lambda receptance, key: None)
    with pytest.raises(
        ValueError, match=r"remote\.rwkv6_linear_attention: expected the arguments training, rec.*, got receptance, key"
    ):
        hf.patch(module)
    assert module.rwkv5_linear_attention is theirs


def test_build_of_rwkv5_is_none_of_rwkv4(monkeypatch, tmp_path):
    """Both are called wkv_64; the one of RWKV-5 is in remote code, which goes on in Python where it fails."""
    monkeypatch.setattr(loading, "_torch_load", lambda *given, **named: "torch builds it")
    for sources in ([tmp_path / "wkv5_op.cpp", "wkv5_cuda.cu"], "cuda/wkv5_op.cpp"):
        assert cpp_extension.load(name="wkv_64", sources=sources) == "torch builds it"
        assert cpp_extension.load("wkv_64", sources, verbose=True) == "torch builds it"
    assert hasattr(cpp_extension.load("wkv_64", [str(tmp_path / "wkv5" / "wkv_op.cpp")]), "backward")


# ---- layers for kernels ------------------------------------------------------------------------------------------


def layer_of_hub(name):
    import kernels

    @kernels.use_kernel_forward_from_hub(name)
    class Layer(nn.Module):
        def forward(self, training, receptance, key, value, time_decay, time_first, state):
            raise AssertionError("theirs")

    return Layer()


def kernelized(module, mode):
    """The module with our functions; an error where `kernels` leaves it as it is."""
    import kernels

    with kernels.use_kernel_mapping(hf.kernel_mapping(), inherit_mapping=False):
        return kernels.kernelize(nn.Sequential(module), mode=mode, device="cpu", use_fallback=False)[0]


@REMOTE
@pytest.mark.parametrize("mode", ["TRAINING", "INFERENCE"])
def test_kernels_puts_our_functions_into_layers(name, mode):
    kernels = pytest.importorskip("kernels")
    layer = kernelized(layer_of_hub(name), kernels.Mode[mode])
    inputs = remote_inputs(name, torch.float32)
    want = getattr(hf, name)(True, *inputs, None)
    assert all(torch.equal(x, y) for x, y in zip(layer(True, *inputs, None), want, strict=True))


def test_kernels_puts_our_functions_in_the_place_of_functions(monkeypatch):
    kernels = pytest.importorskip("kernels")
    monkeypatch.setattr(kernels.layer.layer, "_CACHED_LAYER", {})
    monkeypatch.setattr(compat, "rwkv7_recurrent", recurrent, raising=False)

    @kernels.use_kernel_forward_from_hub("rwkv7_recurrent")
    def rwkv7_recurrent(receptance, decay, key, value, a, b, initial_state, attention_mask=None):
        raise AssertionError("theirs")

    @kernels.use_kernelized_func(rwkv7_recurrent)
    class Layer(nn.Module):
        def forward(self, *inputs):
            return rwkv7_recurrent(*inputs, attention_mask=8)

    assert kernelized(Layer(), kernels.Mode.INFERENCE)(*range(7)) == ("recurrent", 8)


def test_mapping_without_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ImportError, match="layers for Hugging Face's kernels need it: pip install kernels"):
        hf.kernel_mapping()


def test_kernels_compiles_our_layers():
    kernels = pytest.importorskip("kernels")
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    layer = kernelized(layer_of_hub("rwkv6_linear_attention"), mode)
    inputs = remote_inputs("rwkv6_linear_attention", torch.float32)
    found = torch.compile(layer, backend="eager", fullgraph=True)(True, *inputs, None)
    assert torch.equal(found[0], layer(True, *inputs, None)[0])


def test_kernels_refuses_a_layer_of_other_arguments(monkeypatch):
    kernels = pytest.importorskip("kernels")

    @kernels.use_kernel_forward_from_hub("rwkv6_linear_attention")
    class Layer(nn.Module):
        def forward(self, x):
            return x

    monkeypatch.setattr(kernels.layer.layer, "_CACHED_LAYER", {})  # of layers that were checked before
    with pytest.raises(TypeError, match="different number of arguments"):
        kernelized(Layer(), kernels.Mode.TRAINING)


def test_use_kernels_of_transformers_finds_our_layers():
    kernels = pytest.importorskip("kernels")
    transformers = pytest.importorskip("transformers")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.attention, self.rest = layer_of_hub("rwkv6_linear_attention"), nn.Linear(2, 2)

    model = Model(transformers.PretrainedConfig())
    with kernels.use_kernel_mapping(hf.kernel_mapping()):
        model.set_use_kernels(True)
    inputs = remote_inputs("rwkv6_linear_attention", torch.float32)
    assert torch.equal(model.attention(True, *inputs, None)[0], hf.rwkv6_linear_attention(True, *inputs, None)[0])


def test_config_of_transformers_finds_our_layers(monkeypatch):
    """As `set_use_kernels` does with a KernelConfig, up to the GPU that it asks for."""
    kernels = pytest.importorskip("kernels")
    kernel_config = pytest.importorskip("transformers.utils.kernel_config")
    monkeypatch.setattr(kernel_config, "infer_device", lambda model: "cuda")
    config = kernel_config.KernelConfig(
        {"rwkv6_linear_attention": f"{hf.KERNELS}:rwkv6_linear_attention"}, use_local_kernel=True
    )
    model = nn.Sequential(layer_of_hub("rwkv6_linear_attention"))
    config.sanitize_kernel_mapping(model)
    config.create_compatible_mapping(model)
    ours = hf.kernel_mapping()["rwkv6_linear_attention"]["cuda"]
    assert config.kernel_mapping == {"rwkv6_linear_attention": {"cuda": {kernels.Mode.TRAINING: ours}}}
    assert issubclass(ours.load(), nn.Module)


# ---- models of others --------------------------------------------------------------------------------------------

WITH_FLA = """
import pathlib, sys
from rwkv_jit import compat
compat.install()
import importlib, transformers
sys.modules["fla"] = None  # where it is installed
found = 0
for path in sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
    if path.stem == "modeling_rwkv" or '"fla")' in path.read_text(encoding="utf-8"):
        importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        found += 1
from rwkv_jit.compat import hf_rwkv4
assert transformers.models.rwkv.modeling_rwkv.rwkv_cuda_kernel is hf_rwkv4.KERNEL
print(found)
"""


def test_models_that_look_for_fla_are_imported_without_it(child):
    pytest.importorskip("transformers")
    assert int(child(WITH_FLA, after="transformers.modeling_utils").stdout) >= 7
