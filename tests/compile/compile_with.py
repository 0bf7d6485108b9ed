"""Compile one kernel an op with the NVRTC of a folder that its wheel was unpacked to, and read all other templates.

``python compile_with.py FOLDER VERSION``, a process of its own, as one keeps the NVRTC that it loads first. It prints
the version of the compiler, what it compiled and what it read.
"""

import ctypes
import json
import sys
from pathlib import Path

OPS = ("wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention", "timex")
# With these sizes calls take every template: short keys, those that fill the registers, and those that are taken apart.
HEAD_SIZES = (16, 128, 256)


def load(folder):
    """Load a wheel's libraries; CuPy takes what is loaded already."""
    found = [path for path in sorted(folder.glob("nvidia/*/lib/libnvrtc*.so*")) if ".alt." not in path.name]
    assert len(found) == 2, found  # the builtins and the compiler, which needs them
    for path in found:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def requests_of(op, arch):
    """Return the kernels that calls of an op may take."""
    import torch

    from rwkv_jit.ahead import requests
    from rwkv_jit.call import switches

    # timex has no heads, but kernels for rows of either length.
    sizes = {"wkv4": [(None, None, None)], "timex": [(None, tokens, 8) for tokens in (256, 3000)]}
    switches.set_bfloat16_precision("high" if op == "gla" else "medium")  # which takes a template more
    return [
        request
        for head_size, tokens, batch in sizes.get(op, [(head_size, None, None) for head_size in HEAD_SIZES])
        for direction in (*requests.DIRECTIONS, *([requests.UPDATE] if op in ("wkv4", "wkv7") else []))
        for request in requests.call_requests(requests.Calls(
            op, head_size, torch.bfloat16, arch, direction, tokens=tokens, batch=batch,
            **({"width": 2048, "rings": [(4, 4)]} if (op, direction) == ("wkv7", requests.UPDATE) else {}),
        ))
    ]  # fmt: skip


def layer_requests(arch):
    """Return kernels of a layer's small work in training, of the loss and of convolutions, one of each template."""
    import test_layer
    import test_layer_convolution
    import test_layer_loss

    from rwkv_jit.kernels.gpu import Gpu

    forwards = [test_layer.request(name, arch=arch) for name in ("gated", "token_shift", "norm_shift")]
    backwards = [
        test_layer.gradients(name, arch=arch)
        for name in ("token_shift", "norm_shift", "prepare_keys", "gated_norm", "activate")
    ]
    wide = test_layer.backward("norm_shift", 4096, arch=arch).requests(Gpu(arch))
    losses = [test_layer_loss.request(direction, arch) for direction in test_layer_loss.DIRECTIONS]
    convolutions = [test_layer_convolution.request(way, arch) for way in test_layer_convolution.DIRECTIONS]
    losses.append(test_layer_loss.scale(arch))
    return [*forwards, *backwards, *wide, *losses, *convolutions]


def derived_requests(arch):
    """Return the kernels of derived ops in training, and of updates."""
    import operand_cases
    import problems
    import test_update_rules
    import torch

    from rwkv_jit.schedules import channel_decay, head_decay, operands, replay, update

    given = problems.head_decays(problems.Core(True, has_norm=True), arch, B=1, N=1, T=32768, training=True)
    schedules = [head_decay.forward(given), head_decay.backward(given)]
    if arch == "sm_90":
        channels = problems.channel_decays(problems.ChannelCore("softplus", has_bias=True), training=True)
        schedules += [channel_decay.forward(channels), channel_decay.backward(channels)]
    around = [
        operand_cases.of_problem(name, words, (1, 9, 2, 4, 64, 64), torch.bfloat16, torch.float32, given.gpu)
        for name, words in operand_cases.ALL
    ]
    for rule in (("kda", "raw bias sigmoid norm"), ("ssd", "D z bias softplus")):
        of_rule, pool = test_update_rules.problem_of(*rule, arch, (64, 64), 1, "kv", "fp32"), update.Pool(1, 0)
        schedules += [update.schedule(of_rule, pool), replay.schedule(of_rule, pool, replay.Ring(5, 5, 5), 1)]
    delta = "softplus bias sigmoid l2 q", (8, 4096, 8, 8, 64)
    schedules += operand_cases.delta_schedules(*delta, torch.bfloat16, torch.float32, given.gpu)
    schedules += [direction(case) for case in around for direction in (operand_cases.forward, operand_cases.backward)]
    behind = next(case for case, (name, _) in zip(around, operand_cases.ALL, strict=True) if name == "behind")
    (last,) = operand_cases.forward(behind).launches
    over_slots = operands.over_slots(last, operands.Slots(16, 4, -1, 3)).request(given.gpu)
    return [over_slots, *(request for schedule in schedules for request in schedule.requests(given.gpu))]


def read(request):
    """Let NVRTC read a kernel's source and check its rules, which takes a twentieth of the time of a compile."""
    from rwkv_jit.kernels import compiler, cuda

    rendered = request.template.render(request.parameters)
    headers = zip(*((text.encode(), name.encode()) for name, text in rendered.headers), strict=True)
    texts, names = map(list, headers)
    program = cuda.nvrtc().createProgram(rendered.source, "parameters.cu", texts, names)
    target = compiler.target_for(request.arch)
    try:
        cuda.nvrtc().compileProgram(program, [*compiler.options(target), "--fdevice-syntax-only"])
    except cuda.nvrtc().NVRTCError:
        sys.exit(f"{rendered.name} for {target}: {cuda.nvrtc().getProgramLog(program)}")


def main(folder, version):
    """Compile for sm_80, and read for sm_90 too, whose kernels for warp groups are templates of their own."""
    load(Path(folder))
    from rwkv_jit.kernels import identity, kernel

    assert version.startswith(f"{identity.version()}."), f"{identity.version()} was loaded for {version}"
    assert all(path.startswith(folder) for path in identity.libraries()), identity.libraries()
    registers, one_each = {}, {}
    for op in OPS:
        first, *others = requests_of(op, "sm_80")
        registers[op] = kernel.get(first).registers
        one_each |= {request.template.name: request for request in (*others, *requests_of(op, "sm_90"))}
    more = *layer_requests("sm_80"), *derived_requests("sm_80"), *derived_requests("sm_90")
    one_each |= {request.template.name: request for request in more}
    for request in one_each.values():
        read(request)
    print(json.dumps({"nvrtc": identity.version(), "registers": registers, "read": sorted(one_each)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
