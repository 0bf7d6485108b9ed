"""Processes of a group, for tests of what they do together."""

import datetime
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = datetime.timedelta(seconds=120)  # of a message that does not come: a rank that fails ends the others


def run(worker, size, *given):
    """Run `worker(rank, size, *given)` in processes of a group: of GPUs where there are enough of them, else of CPUs.

    Where one raises, the others are ended and its error is raised here. Processes of CPUs are forks of one that has
    imported what they need, and has done nothing else.
    """
    method = "spawn" if sys.platform == "win32" or torch.cuda.is_available() else "forkserver"
    if method == "forkserver":
        mp.set_forkserver_preload(["rwkv_jit", "shared_sequences", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = worker, size, os.path.join(folder, "store"), given
        mp.start_processes(_begin, arguments, nprocs=size, start_method=method)


def _begin(rank, worker, size, store, given):
    torch.set_num_threads(1)
    on_gpus = torch.cuda.device_count() >= size
    if on_gpus:
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    more = {"device_id": torch.device("cuda", rank)} if on_gpus else {}
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT, **more
    )
    try:
        worker(rank, size, *given)
    finally:
        dist.destroy_process_group()
    leave()


def leave():
    """End a process whose group is gone: its threads may outlive it, and abort an interpreter that ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
