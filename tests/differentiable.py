"""Every function that has gradients, as one of its tensors that may have one: for what holds of all of them."""

import derived_cases
import layer_cases
import torch

import rwkv_jit

RECURRENCES = {
    "wkv4": "w:C u:C k:BTC v:BTC", "wkv5": "r:BTHK k:BTHK v:BTHV w:HK u:HK",
    "wkv6": "r:BTHK k:BTHK v:BTHV w:BTHK u:HK", "wkv7": "r:BTHK w:BTHK k:BTHK v:BTHV a:BTHK b:BTHK",
    "gla": "q:BTHK k:BTHK v:BTHV g:BTHK", "linear_attention": "q:BTHK k:BTHK v:BTHV",
}  # fmt: skip
ALL = [
    *RECURRENCES, "timex", "causal_conv1d", "cross_entropy", "linear_cross_entropy", *layer_cases.WAYS,
    *derived_cases.WAYS,
]  # fmt: skip


def make(name, dtype=torch.float64, device="cpu"):
    """Return a function that returns a list of results, and its tensors that may have a gradient."""
    sizes = {"B": 2, "T": 6, "H": 2, "K": 4, "V": 4, "C": 8}

    def random(letters):
        return torch.randn([sizes[x] for x in letters], device=device).to(dtype) / 3

    if name in RECURRENCES:
        given = {x[0]: random(x[2:]) for x in RECURRENCES[name].split()}
        if name == "gla":
            given["g"] = -given["g"].abs()
        given["state"] = random("BHVK") if name != "wkv4" else torch.zeros(2, 3, 8, device=device).to(dtype)
        return lambda *x: list(getattr(rwkv_jit, name)(*x, output_final_state=True)), [*given.values()]
    if name == "timex":
        return lambda *x: [rwkv_jit.timex(*x)], [random("CT"), random("BCT")]
    if name == "causal_conv1d":
        return lambda x, w, b, s: [rwkv_jit.causal_conv1d(x, w, b, initial_state=s)[0]], [
            random("BTC"),
            random("CV"),
            random("C"),
            torch.randn(2, 8, 3, device=device).to(dtype),
        ]
    if name.endswith("cross_entropy"):
        targets = torch.tensor([1, 3, -100, 0, 2, 3], device=device)
        if name == "cross_entropy":
            return lambda x: [rwkv_jit.cross_entropy(x, targets)], [random("TC")]
        return lambda x, w: [rwkv_jit.linear_cross_entropy(x, w, targets)], [random("TC"), random("VC")]
    if name in layer_cases.WAYS:
        how = layer_cases.WAYS[name][-1]
        of_rows = layer_cases.sizes_of(name, how, 6, 2, 4)
        case = layer_cases.make(name, how, of_rows, dtype, dtype, device)
        names = [own for own, x in case.tensors.items() if x.is_floating_point()]
        run = lambda *x: case.run(case.tensors | dict(zip(names, x, strict=True)))  # noqa: E731
    else:
        case = derived_cases.make(name, derived_cases.WAYS[name][-1], dtype=dtype, device=device)
        names = [*case.tensors]
        run = lambda *x: list(case.replaced(dict(zip(names, x, strict=True))).run())  # noqa: E731
    return run, [case.tensors[own] for own in names]
