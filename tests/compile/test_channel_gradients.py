import torch, pytest, derived_cases, rwkv_jit
from test_results import relative, BF16, FP16, FP32
from rwkv_jit.derived import channel_decays


@pytest.mark.parametrize(
    ("how", "sizes", "dtype", "wide", "bounds", "decays"),
    [
        ("raw bias norm", (1, 70, 1, 1, 128, 128), BF16, BF16, None, None),
        ("bounded flat bias norm", (1, 150, 2, 2, 128, 128), FP16, FP32, [0, 0, 20, 150], None),
        ("raw norm", (1, 200, 1, 1, 128, 128), BF16, FP32, None, [-2000.0, -0.1, -4.0]),
        ("norm twice_sigmoid", (1, 130, 2, 2, 128, 128), BF16, BF16, None, None),
    ],
)
def test_all(interpreted, monkeypatch, how, sizes, dtype, wide, bounds, decays):
    torch.manual_seed(0)
    interpreted.use("sm_90")
    case = derived_cases.make("kda", how, sizes, dtype, wide, FP32, bounds=bounds)
    if decays:
        shape = case.inputs["g"].shape
        largest = torch.tensor(decays)[torch.arange(shape[1]) // 64 % len(decays)].view(-1, 1, 1)
        case = derived_cases.with_decays(case, largest * torch.rand(shape) * (torch.rand(shape) < 0.5))
    monkeypatch.setattr(channel_decays, "LEAST_BLOCKS", 0)
    results, grads, weights = derived_cases.differentiate(case)
    wanted, wanted_grads = derived_cases.exactly(case, weights)
    errors = {n: relative(g, wanted_grads[n]) for n, g in grads.items()}
    errors |= {i: relative(*p) for i, p in enumerate(zip(results, wanted))}
    limit = 1.5e-2 if dtype == BF16 else 3e-3
    assert all(e < limit for e in errors.values()), errors
