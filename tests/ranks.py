"""What several ranks check together, on CPUs or GPUs. As a program: python ranks.py DEVICE DTYPE WORLD CASE...

DTYPE is that of parameters; with bfloat16 they are float32, and ranks compute under autocast.
"""

import contextlib
import copy
import datetime
import itertools
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

import groups
import nn_cases
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import rwkv_jit
from rwkv_jit.parallel import tensor_parallel

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"width": 32, "head_size": 8, "hidden": 48}  # four heads
B, T = 4, 9
# Of a model that rounding harms little: where r.k of a first token is near 0, the norm behind makes any rounding large.
SEED = 12


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets, **more):
        return self.model.loss(tokens, targets, **more)


# ---- one rank's values -------------------------------------------------------------------------------------------


def make(device, seed=SEED):
    """A model that is the same on every rank. The third layer is like the second: four ranks of CPUs do without."""
    layers = 2 if device == "cpu" and dist.get_world_size() > 2 else 3
    return nn_cases.make(torch.get_default_dtype(), seed, **SIZES, layers=layers).to(device)


def make_rows(model, count=B):
    rows = nn_cases.make_tokens(model, count, T + 1).to(model.emb.weight.device)
    tokens, targets = rows[:, :-1], rows[:, 1:].clone()
    targets[:, 0] = -100  # as many in every row, so that means over rows are those of all
    return tokens, targets


def own(x, mesh):
    """The rows of this rank."""
    return x.chunk(mesh.size())[mesh.get_local_rank()]


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def exact(device):
    """The loss and all gradients of one rank that has the whole model and all rows."""
    model = make(device)
    with torch.autocast(device, enabled=False):
        loss = model.loss(*make_rows(model))
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def check_close(x, y, what):
    """Compare values; those under autocast by their norm, as single ones are sums of both signs."""
    if torch.is_autocast_enabled(y.device.type):
        limit = 0.2 if y.dim() else 2.5e-2
        assert (x.double() - y.double()).norm() <= limit * y.double().norm() + 1e-6, what
        return
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if y.dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-4}
    torch.testing.assert_close(x, y, **tolerance, msg=lambda said: f"{what}: {said}")


def check(model, losses, device, mesh):
    """Compare the mean of the ranks' losses, and the gradients, with those of one rank."""
    loss, gradients = exact(device)
    mean = torch.stack([x.detach() for x in losses]).mean()
    dist.all_reduce(mean, group=mesh.get_group())
    check_close(mean / mesh.size(), loss, "loss")
    assert [name for name, _ in model.named_parameters()] == list(gradients)
    for name, x in model.named_parameters():
        assert x.shape == gradients[name].shape, name
        check_close(whole(x.grad), gradients[name], name)


# ---- cases -------------------------------------------------------------------------------------------------------


def of_layers(device, world):
    """The small work of a layer and the losses, of DTensors: whole, or cut along the batch, or channels or heads."""
    mesh = init_device_mesh(device, (world,))
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(shape, generator=generator).to(device)

    def rows(*shape):
        return new(B, T, *shape), (0, 2)  # which dimensions are the batch, and channels or heads

    def heads(*shape):
        return new(*shape), (None, 0)

    targets = torch.randint(11, (B, T), generator=generator).to(device)
    targets[0, :3] = -100
    cases = {
        "token_shift": [rows(32), (new(3, 32), (None, 1)), (new(3, B, T, 32), (1, 3)), (new(B, 32), (0, 1))],
        "prepare_keys": [rows(4, 8), rows(32), rows(32), heads(4, 8), heads(32)],
        "gated_norm": [rows(4, 8), rows(32), heads(32), heads(4, 8), rows(32), rows(4, 8), rows(32), heads(4, 8)],
        "gated": [rows(32), rows(32)],
        "activate": [rows(32), "tanh"],
        "cross_entropy": [(new(B, T, 11), (0, None)), (targets, (0, None))],
        "linear_cross_entropy": [(new(B, T, 32), (0, None)), (new(11, 32), (None, 0)), (targets, (0, None))],
    }
    cases[_keys_and_bonus] = [*cases["prepare_keys"], rows(32), heads(4, 8)]
    for op, given in cases.items():
        for role in (None, 0, 1):  # classes of cross_entropy are not cut: it is whole again
            check_placed(op, mesh, given, role)

    (logits, _), (targets, _) = cases["cross_entropy"]
    logits, targets = (distribute_tensor(x, mesh, [Shard(0)]) for x in (logits, targets))
    apart = rwkv_jit.cross_entropy(logits, targets, reduction="none")
    assert apart.placements == (Shard(0),)
    mean = apart.full_tensor().sum() / (targets.full_tensor() >= 0).sum()
    check_close(mean, rwkv_jit.cross_entropy(logits, targets), "mean")
    none = {
        name: [_placed(*x, 0, mesh) for x in cases[name][:-1]] for name in ("cross_entropy", "linear_cross_entropy")
    }
    for name, inputs in none.items():  # rows of which none counts, on any rank
        loss = getattr(rwkv_jit, name)(*inputs, torch.full_like(targets, -100))
        assert loss.isnan(), name
        for x, grad in zip(inputs, torch.autograd.grad(loss, inputs), strict=True):
            assert torch.equal(whole(grad), torch.zeros_like(whole(x))), name
    # A matrix in parts beside rows that all ranks have, of which there may be fewer than ranks.
    matrix = [x.requires_grad_() for x in (new(11, 32), new(11))]
    for count in (1, 3):
        hidden, targets = new(1, count, 32).requires_grad_(), torch.arange(count, device=device)[None]
        results = []
        rows = [_placed(x.detach(), (None,), 0, mesh) for x in (hidden, targets)]
        for (x, aims), (weight, bias) in (
            ((hidden, targets), matrix), (rows, [_placed(x.detach(), (0,), 0, mesh) for x in matrix]),
        ):  # fmt: skip
            loss = rwkv_jit.linear_cross_entropy(x, weight, aims, bias=bias, l2_wrap=0.1)
            results.append([loss, *map(whole, torch.autograd.grad(loss, [x, weight, bias]))])
        for found, want in zip(*results[::-1], strict=True):
            check_close(found, want, f"{count} rows")
    parts, kinds = distribute_tensor(new(3, 4, 6), mesh, [Shard(1)]), ("tanh", "identity", "sigmoid")
    check_close(rwkv_jit.activate(parts, kinds).full_tensor(), rwkv_jit.activate(parts.full_tensor(), kinds), "kinds")
    packed = [distribute_tensor(x, mesh, [Shard(dim)]) for x, dim in ((new(1, 9, 6), 2), (new(1, 6), 1))]
    bounds = torch.tensor([0, 4, 9], device=device)
    (found,) = rwkv_jit.token_shift(*packed, cu_seqlens=bounds)
    (want,) = rwkv_jit.token_shift(*(x.full_tensor() for x in packed), cu_seqlens=bounds)
    check_close(found.full_tensor(), want, "packed")


def _keys_and_bonus(k, v, rate, k_k, k_a, r, r_k):
    return rwkv_jit.prepare_keys(k, v, rate, k_k, k_a, r=r, r_k=r_k)


def of_derived(device, world):
    """The ops made of wkv7 and gla, of DTensors with two key heads and four value heads."""
    mesh = init_device_mesh(device, (world,))
    generator = torch.Generator().manual_seed(0)

    def rows(*shape):
        return torch.randn(B, T, *shape, generator=generator).to(device), (0, 2)

    def heads(*shape):
        return torch.randn(shape, generator=generator).to(device), (None, 0)

    def kda(q, k, v, g, beta, A_log, dt_bias):
        gates = {"A_log": A_log, "dt_bias": dt_bias, "qk_norm": True, "beta_map": "sigmoid"}
        return rwkv_jit.kda(q, k, v, g, beta, **gates)[0]

    def gated_delta_rule(q, k, v, g, beta, A_log):
        return rwkv_jit.gated_delta_rule(q, k, v, g, beta, A_log=A_log, qk_norm=True)[0]

    def delta_rule(q, k, v, beta):
        return rwkv_jit.delta_rule(q, k, v, beta, qk_norm=True)[0]

    def simple_gla(q, k, v, g):
        return rwkv_jit.simple_gla(q, k, v, -g.exp())[0]

    def ssd(x, dt, A, B, C, D, z, dt_bias):
        return rwkv_jit.ssd(x, dt, -A.exp(), B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=True)[0]

    keys, values = [rows(2, 8), rows(2, 8)], rows(4, 8)
    for function, given in (
        (kda, [*keys, values, rows(4, 8), rows(4), heads(4), heads(4, 8)]),
        (gated_delta_rule, [*keys, values, rows(4), rows(4), heads(4)]),
        (delta_rule, [*keys, values, rows(4)]),
        (simple_gla, [*keys, values, rows(4)]),
        (ssd, [values, rows(4), heads(4), *keys, heads(4), rows(4, 8), heads(4)]),
    ):
        for role in (None, 0, 1):
            check_placed(function, mesh, given, role)


def check_placed(op, mesh, given, role):
    """Compare a call of DTensors, which are whole, or cut along one of two dimensions, with one of plain tensors."""
    alone = [x if isinstance(x, str) else x[0].clone().requires_grad_(x[0].is_floating_point()) for x in given]
    placed = [x if isinstance(x, str) else _placed(*x, role, mesh) for x in given]
    function = getattr(rwkv_jit, op) if isinstance(op, str) else op
    want, found = (function(*inputs) for inputs in (alone, placed))
    want, found = (x if isinstance(x, tuple) else (x,) for x in (want, found))
    for x, y in zip(found, want, strict=True):
        assert isinstance(x, DTensor) == (x.dim() > 0), op  # a loss is whole on every rank
        assert x.shape == y.shape, op
        check_close(whole(x), y, f"{op}, {role}")
    for results in (want, found):
        sum((x * x).sum() for x in results).backward()
    for x, y in zip(placed, alone, strict=True):
        if isinstance(y, torch.Tensor) and y.grad is not None:
            check_close(x.grad.full_tensor(), y.grad, f"gradient of {op}, {role}")


def _placed(x, dims, role, mesh):
    dim = None if role is None else dims[role]
    placed = distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim)])
    return placed.requires_grad_(x.is_floating_point())


def bad_input(device, world):
    """What does not fit is an error before anything is done."""
    mesh, wide = init_device_mesh(device, (world,)), init_device_mesh(device, (1, world))
    others = [DeviceMesh(device, [rank]) for rank in range(world)][1 - dist.get_rank()]
    model, odd = make(device), nn_cases.make(width=24, head_size=8).to(device)
    before = [*odd.parameters()]
    narrow = nn_cases.make(**{**SIZES, "hidden": 49}).to(device)
    tied = make(device)
    tied.head.weight = tied.emb.weight
    x, flat = (distribute_tensor(torch.ones(2, 4, 4, device=device), mesh, [Shard(n)]) for n in (1, 2))
    ids = distribute_tensor(torch.zeros(2, 4, dtype=torch.int64, device=device), mesh, [Shard(0)])
    matrix = distribute_tensor(torch.ones(6, 4, device=device), mesh, [Shard(1)])
    of_rows, alone = flat.redistribute(placements=[Replicate()]), torch.zeros(2, 4, device=device)
    for error, message, call in [
        (TypeError, "mesh: expected a DeviceMesh, got int", lambda: tensor_parallel(model, 2)),
        (ValueError, "mesh: expected one dimension, such as mesh['tp'] of a larger one, got 2",
         lambda: tensor_parallel(model, wide)),
        (ValueError, f"mesh: expected one with this rank, {dist.get_rank()}, got ",
         lambda: tensor_parallel(model, others)),
        (ValueError, "mesh: expected a size that divides the 3 heads of blocks.0.att, got 2",
         lambda: tensor_parallel(odd, mesh)),
        (ValueError, "mesh: expected a size that divides the 49 channels of blocks.0.ffn.key.weight, got 2",
         lambda: tensor_parallel(narrow, mesh)),
        (ValueError, f"model: expected parameters on {device}, as mesh is, got meta (emb.weight)",
         lambda: tensor_parallel(make(device).to("meta"), mesh)),
        (TypeError, "model: expected modules that can be spread over ranks, got Conv1d (1)",
         lambda: tensor_parallel(nn.Sequential(nn.LayerNorm(4), nn.Conv1d(2, 2, 2)).to(device), mesh)),
        (TypeError, "model: expected parameters of one rank, got a DTensor of ",
         lambda: tensor_parallel(tensor_parallel(make(device), mesh), mesh)),
        (RuntimeError, "a model on several ranks can neither decode nor write files",
         lambda: tensor_parallel(make(device), mesh).generate(ids.full_tensor(), 3)),
        (RuntimeError, "a model on several ranks can neither decode nor write files",
         lambda: tensor_parallel(make(device), mesh).prefill(ids.full_tensor(), make(device).new_pool(2))),
        (ValueError, "model: expected weights that are not tied, got emb.weight as head.weight too",
         lambda: tensor_parallel(tied, mesh)),
        (ValueError, "x: expected DTensors placed by Replicate() or Shard(0) (batch) or Shard(2) (channels), got S",
         lambda: rwkv_jit.token_shift(x, matrix)),
        (ValueError, "mixes: expected a DTensor placed by [Shard(dim=1)] of ",
         lambda: rwkv_jit.token_shift(flat, distribute_tensor(torch.ones(1, 4, device=device), mesh, [Shard(0)]))),
        (TypeError, "mixes: expected a DTensor like x, got Tensor", lambda: rwkv_jit.token_shift(flat, alone)),
        (TypeError, "x: expected a DTensor like another argument, got list", lambda: rwkv_jit.gated([1.0], flat)),
        (ValueError, "mixes: expected shape [1 to 6, 2], got None",
         lambda: rwkv_jit.token_shift(flat, None)),
        (TypeError, "activate takes no DTensors if it writes to its arguments; pass to_local() of each",
         lambda: rwkv_jit.activate(x, "tanh", out=x)),
        (TypeError, "shift_mix takes no DTensors; pass to_local() of each",
         lambda: rwkv_jit.shift_mix(flat, alone, alone, alone, alone)),
        (ValueError, "logits: expected DTensors placed by Replicate() or Shard(0) (batch), got S",
         lambda: rwkv_jit.cross_entropy(flat, ids)),
        (ValueError, "weight: expected a DTensor placed by Replicate() or Shard(0) of ",
         lambda: rwkv_jit.linear_cross_entropy(of_rows.redistribute(placements=[Shard(0)]), matrix, ids)),
        (TypeError, "hidden: expected a DTensor like weight, got Tensor. Where FSDP has cut weight, call the module ",
         lambda: rwkv_jit.linear_cross_entropy(alone, fully_shard(nn.Linear(4, 6).to(device)).weight, whole(ids)[0])),
        (ValueError, "weight: expected Replicate() where hidden is cut, ",
         lambda: rwkv_jit.linear_cross_entropy(
             of_rows.redistribute(placements=[Shard(0)]), matrix.redistribute(placements=[Shard(0)]), ids)),
        (ValueError, "targets: expected a DTensor placed by [Replicate()] of ",
         lambda: rwkv_jit.linear_cross_entropy(of_rows, of_rows[0], ids)),
        (TypeError, "targets: expected a DTensor like weight, got Tensor",
         lambda: rwkv_jit.linear_cross_entropy(of_rows, of_rows[0], ids.full_tensor())),
        (TypeError, "weight: expected a DTensor like another argument, got Tensor",
         lambda: rwkv_jit.linear_cross_entropy(of_rows, alone, ids)),
    ]:  # fmt: skip
        try:
            call()
        except error as raised:
            said = str(raised)
        else:
            said = "nothing"
        assert said.startswith(message), f"expected {message}, got {said}"
    assert all(x is y for x, y in zip(odd.parameters(), before, strict=True))


def of_copies(device, world):
    """DistributedDataParallel, also with gradients that are added up over two passes."""
    mesh = init_device_mesh(device, (world,))
    for passes in (1, 2):
        model = make(device)
        loss_of = DistributedDataParallel(Loss(model), process_group=mesh.get_group())
        losses = []
        for place, part in enumerate(zip(*(own(x, mesh).chunk(passes) for x in make_rows(model)), strict=True)):
            loss_of.require_backward_grad_sync = place == passes - 1
            losses.append(loss_of(*part))
            (losses[-1] / passes).backward()
        check(model, losses, device, mesh)
    # A rank without any target has a loss of NaN, and no part in the gradients.
    model = make(device)
    tokens, targets = (own(x, mesh) for x in make_rows(model))
    targets = targets if mesh.get_local_rank() else torch.full_like(targets, -100)
    loss_of = DistributedDataParallel(Loss(model), process_group=mesh.get_group())
    loss = loss_of(tokens, targets)
    loss.backward()
    assert bool(loss.isnan()) == (mesh.get_local_rank() == 0)
    alone = make(device)
    if mesh.get_local_rank():
        alone.loss(tokens, targets).backward()
    for (name, x), y in zip(model.named_parameters(), alone.parameters(), strict=True):
        want = torch.zeros_like(y) if y.grad is None else y.grad
        dist.all_reduce(want, group=mesh.get_group())
        check_close(x.grad, want / world, name)


def of_shards(device, world):
    """FSDP2, of each block and of two at once, also with activations that are computed again."""
    mesh = init_device_mesh(device, (world,))
    for checkpointing, together in itertools.product((False, True), (1, 2)):
        model = sharded(make(device), mesh, together)
        model.checkpointing = checkpointing
        loss = model.loss(*(own(x, mesh) for x in make_rows(model)))
        loss.backward()
        check(model, [loss], device, mesh)


def of_small_shards(device, world):
    """FSDP2 of modules inside of layers and of the head alone: each rank has the loss of its own rows."""
    mesh = init_device_mesh(device, (world,))
    alone = make(device)
    for part in ("head", "att", "ffn", "ln1", "ln_x", nn.Linear):
        model = make(device)
        inside = [
            x for name, x in model.named_modules()
            if (name.rpartition(".")[2] == part if isinstance(part, str) else isinstance(x, part))
        ]  # fmt: skip
        for module in inside:
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "loss")
        rows = [own(x, mesh) for x in make_rows(model)]
        loss = model.loss(*rows)
        loss.backward()
        check_close(loss.detach(), alone.loss(*rows).detach(), f"loss of {part}")
        check(model, [loss], device, mesh)


def sharded(model, mesh, together=1):
    blocks = list(model.blocks)
    for begin in range(0, len(blocks), together):
        fully_shard(blocks[begin : begin + together], mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")
    return model


def of_heads(device, world):
    """Tensor parallelism: loss and gradients, with activations that are computed again too; parts and packed texts."""
    mesh = init_device_mesh(device, (world,))
    for checkpointing in (False, True):
        model = tensor_parallel(make(device, seed=SEED + dist.get_rank()), mesh)  # the first rank's values count
        model.checkpointing = checkpointing
        loss = model.loss(*make_rows(model))
        loss.backward()
        check(model, [loss], device, mesh)
    alone, model = make(device), tensor_parallel(make(device), mesh)
    tokens, targets = make_rows(alone)
    bounds = torch.tensor([0, 3, B * T], device=device)
    found, want = (_in_parts(each, tokens, targets, bounds) for each in (model, alone))
    for x, y in zip(found, want, strict=True):
        check_close(x, y, "parts and packed texts")
    for (name, x), y in zip(model.named_parameters(), alone.parameters(), strict=True):
        check_close(x.grad.full_tensor(), y.grad, name)
    for (name, x), (other, y) in zip(model.state_dict().items(), alone.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(x.full_tensor(), y)
    assert model.blocks[1].att.key.weight.to_local().shape == (SIZES["width"] // world, SIZES["width"])
    assert model.blocks[1].ffn.value.weight.to_local().shape == (SIZES["width"], SIZES["hidden"] // world)


def _in_parts(model, tokens, targets, bounds):
    """Losses and logits of texts in two parts, with gradients through the state, and of packed texts."""
    first, state = model.loss(tokens[:, :4], targets[:, :4], return_state=True)
    second, state = model.loss(tokens[:, 4:], targets[:, 4:], state=state, return_state=True)
    logits = model(tokens.reshape(1, -1), cu_seqlens=bounds)
    ends = sum(x.square().sum() for each in state for x in (each.time_shift, each.channel_shift))
    (first + 2 * second + logits.square().mean() + ends).backward()
    return [first.detach(), second.detach(), logits.detach(), ends.detach()]


def of_families(device, world):
    """Tensor parallelism of time mixing and channel mixing of RWKV-4, 5 and 6, in two parts with the state between."""
    mesh = init_device_mesh(device, (world,))
    for family in (4, 5, 6):
        for kind in ("TimeMix", "ChannelMix"):
            sizes = {"head_size": 8} if kind == "TimeMix" and family > 4 else {}
            torch.manual_seed(0)
            alone = getattr(rwkv_jit.nn, f"RWKV{family}{kind}")(32, 1, 3, **sizes, device=device)
            generator = torch.Generator().manual_seed(0)
            for x in alone.parameters():  # of which some begin as zeros
                x.data.add_(torch.randn(x.shape, generator=generator).to(x) / 4)
            model = tensor_parallel(copy.deepcopy(alone), mesh)
            x = torch.randn(B, T, 32, generator=generator).to(device)
            given = [x.clone().requires_grad_() for _ in range(2)]
            results = []
            for module, inputs in zip((alone, model), given, strict=True):
                first, state = module(inputs[:, :4])
                second, state = module(inputs[:, 4:], state)
                last = state[0] if kind == "TimeMix" else state
                results.append([first.detach(), second.detach(), last.detach()])
                sum((y * y).sum() for y in (first, second, last)).backward()
            for found, want in zip(*results[::-1], strict=True):
                check_close(found, want, type(alone).__name__)
            check_close(given[1].grad, given[0].grad, f"gradient of x in {type(alone).__name__}")
            for (name, found), want in zip(model.named_parameters(), alone.parameters(), strict=True):
                check_close(found.grad.full_tensor(), want.grad, f"{type(alone).__name__}.{name}")


def of_parts(device, world):
    """Ranks that have a part of each sequence, under DistributedDataParallel and FSDP2, and with some heads each."""
    mesh = init_device_mesh(device, (world,))
    of_heads = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("cp", "tp")) if world > 2 else None
    alone = make(device)
    rows = nn_cases.make_tokens(alone, 2, 4 * world + 1).to(device)
    loss = alone.loss(rows[:, :-1], rows[:, 1:])
    loss.backward()
    for kind in ("copies", "shards", *(["heads"] if of_heads else [])):
        model, parts = make(device), mesh if kind != "heads" else of_heads["cp"]
        if kind == "copies":
            loss_of = DistributedDataParallel(Loss(model), process_group=mesh.get_group())
        elif kind == "shards":
            loss_of = Loss(sharded(model, mesh))
        else:
            loss_of = Loss(sharded(tensor_parallel(model, of_heads["tp"]), parts))
        place, count = parts.get_local_rank(), parts.size()
        tokens, targets = (x.chunk(count, 1)[place] for x in (rows[:, :-1], rows[:, 1:]))
        part = loss_of(tokens, targets, shard=rwkv_jit.parallel.Shard(parts))
        part.backward()
        mean = part.detach() / count
        dist.all_reduce(mean, group=parts.get_group())
        check_close(mean, loss.detach(), f"loss of {kind}")
        for (name, x), y in zip(model.named_parameters(), alone.parameters(), strict=True):
            check_close(whole(x.grad), y.grad, f"{name} of {kind}")


def of_heads_and_shards(device, world):
    """FSDP2 of a model whose heads are spread: a mesh of two dimensions."""
    mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(tensor_parallel(make(device), mesh["tp"]), mesh["dp"])
    loss = model.loss(*(own(x, mesh["dp"]) for x in make_rows(model)))
    loss.backward()
    check(model, [loss], device, mesh["dp"])
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.param_groups(lr=1e-3, weight_decay=0.1)).step()


def resumes_copies(device, world):
    """The example goes on from a checkpoint to the bit, under DistributedDataParallel."""
    _resumes(device, "--dp", "--accumulate", "2")


def resumes_shards(device, world):
    """The same under FSDP2."""
    _resumes(device, "--fsdp", "--checkpointing")


def resumes_parts(device, world):
    """The same of ranks that have a part of each sequence."""
    _resumes(device, "--fsdp", "--cp=2")


def resumes_heads_and_shards(device, world):
    """The same under FSDP2 of a model whose heads are spread."""
    _resumes(device, "--fsdp", "--tp=2")


def _resumes(device, *options):
    given = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given)
    folder, rank = Path(given[0]), dist.get_rank()
    sizes = {"steps": 4, "batch": 4, "length": 8, "width": 32, "layers": 2, "head-size": 8, "save-every": 2}
    common = [f"--{name}={x}" for name, x in sizes.items()]
    command = [*common, f"--out={folder}", *options, *(["--cpu"] if device == "cpu" else [])]
    _run_example(command)
    newest, kept = folder / "checkpoints" / "4", folder / "kept"
    if rank == 0:
        shutil.move(newest, kept)
    dist.barrier()
    _run_example(command)
    if rank == 0:
        found, want = (dict(_flat(_read(path, folder))) for path in (newest, kept))
        assert found.keys() == want.keys()
        assert [name for name in want if name.startswith("/random")]
        differ = [name for name, x in want.items() if not _is_same(found[name], x)]
        assert differ == [], f"they differ: {differ}"
        written = torch.load(folder / "model.pth", weights_only=True)
        of_model = {name.removeprefix("/model/"): x for name, x in want.items() if name.startswith("/model/")}
        assert written.keys() == of_model.keys()
        assert all(torch.equal(written[name], x.cpu()) for name, x in of_model.items())
        before = _read(folder / "checkpoints" / "2", folder)
        after = _read(newest, folder)
        assert any(not torch.equal(before["model"][name], x) for name, x in after["model"].items())
        assert (folder / "log.jsonl").read_text().count('"loss"') == 1  # of the last step, from the run that went on
        shutil.rmtree(folder)
    dist.barrier()


def _run_example(arguments):
    """Run the example in this rank, which has met the others already."""
    starts, ends, argv = dist.init_process_group, dist.destroy_process_group, sys.argv
    dist.init_process_group, dist.destroy_process_group = lambda: None, lambda: None
    sys.argv = ["train_lm.py", *arguments]
    try:
        runpy.run_path(str(ROOT / "examples" / "train_lm.py"), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise AssertionError(f"the example ended with {ended.code}") from ended
    finally:
        dist.init_process_group, dist.destroy_process_group, sys.argv = starts, ends, argv


def _read(path, folder):
    dcp_to_torch_save(path, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=False)


def _flat(x, name=""):
    if isinstance(x, dict):
        for key, each in x.items():
            yield from _flat(each, f"{name}/{key}")
    else:
        yield name, x


def _is_same(x, y):
    return torch.equal(x, y) if isinstance(y, torch.Tensor) else x == y


# ---- ranks -------------------------------------------------------------------------------------------------------


def run(rank, device, dtype, world, store, names):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    more = {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        more["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
        timeout=datetime.timedelta(minutes=2), **more,
    )  # fmt: skip
    is_narrow = dtype == "bfloat16"
    torch.set_default_dtype(torch.float32 if is_narrow else getattr(torch, dtype))
    # Outside of autocast there is no other one: it would keep what the example casts, from one step to the next.
    with torch.autocast(device, torch.bfloat16) if is_narrow else contextlib.nullcontext():
        for name in names:
            globals()[name](device, world)
            if rank == 0:
                print("passed", name, flush=True)
    dist.barrier()  # no rank leaves while another one is in its last exchange
    dist.destroy_process_group()
    groups.leave()


if __name__ == "__main__":
    _, device, dtype, world, *names = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        method = "fork" if device == "cpu" and hasattr(os, "fork") else "spawn"
        if method == "fork":  # what optimizers and the example import; each rank would do it
            import matplotlib.figure  # noqa: F401
            import torch._dynamo
        given = device, dtype, int(world), f"{folder}/store", names
        multiprocessing.start_processes(run, given, int(world), start_method=method)
