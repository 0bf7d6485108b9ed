"""What several ranks check together, on CPUs or GPUs. As a program: python ranks.py DEVICE WORLD CASE..."""

import datetime
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

import nn_cases
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"width": 32, "head_size": 8, "hidden": 48}  # four heads
B, T = 4, 9


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        return self.model.loss(tokens, targets)


# ---- one rank's values -------------------------------------------------------------------------------------------


def make(device, seed=0):
    """A model that is the same on every rank; float32 on GPUs, whose kernels have no float64."""
    return nn_cases.make(torch.float32 if device == "cuda" else torch.float64, seed, **SIZES).to(device)


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
    loss = model.loss(*make_rows(model))
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def check_close(x, y, what):
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


def of_shards(device, world):
    """FSDP2, also with activations that are computed again."""
    mesh = init_device_mesh(device, (world,))
    for checkpointing in (False, True):
        model = sharded(make(device), mesh)
        model.checkpointing = checkpointing
        loss = model.loss(*(own(x, mesh) for x in make_rows(model)))
        loss.backward()
        check(model, [loss], device, mesh)


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")
    return model


def resumes_copies(device, world):
    """The example goes on from a checkpoint to the bit, under DistributedDataParallel."""
    _resumes(device, "--dp", "--accumulate", "2")


def resumes_shards(device, world):
    """The same under FSDP2."""
    _resumes(device, "--fsdp", "--checkpointing")


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
        assert differ == []
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


CASES = {
    case.__name__: case for case in (of_copies, of_shards, resumes_copies, resumes_shards)
}  # fmt: skip


# ---- ranks -------------------------------------------------------------------------------------------------------


def run(rank, device, world, store, names):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    more = {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        more["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=60), **more,
    )  # fmt: skip
    for name in names:
        CASES[name](device, world)
        if rank == 0:
            print("passed", name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _, device, world, *names = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (device, int(world), f"{folder}/store", names), int(world))
