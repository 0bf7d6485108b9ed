"""Train an RWKV-7 language model of any size on a text or on tokens, on one GPU, many, or a CPU.

    python examples/train_lm.py [--data FILE] [--out FOLDER] [--steps N] [--width N] [--layers N] ...
    torchrun --nproc-per-node 8 examples/train_lm.py --fsdp --tp 2 ...

FILE is any text, whose bytes are the tokens, a .npy of any integers, or a .bin of uint16 or uint32 tokens; the last two
are read as they are needed. By default it is Python's help. The last tenth is held back. Ranks that are left by --tp
(heads over ranks) and --cp (each sequence over ranks) have different sequences: --dp gives each of them the whole
model, and --fsdp a part of it. Losses, tokens per second and the share of the GPU's peak go to the progress bar and to
FOLDER: a line of JSON each, a picture, TensorBoard's files where that is installed, and checkpoints, from which the
same command goes on, to the bit. The model is that of arXiv:2503.14456, its parameters and rates those of its trainer.
"""

import argparse
import json
import math
import os
import pickle
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import rwkv_jit
from rwkv_jit.nn import RWKV7

try:
    from tqdm import tqdm
except ImportError:
    sys.exit("this example needs tqdm: pip install matplotlib tqdm")

DEFAULTS = {
    "cuda": {"steps": 400, "batch": 32, "length": 512, "width": 256, "layers": 6},
    "cpu": {"steps": 100, "batch": 8, "length": 64, "width": 64, "layers": 2},
}
SMALL = 256  # the width up to which threads of a CPU wait for each other longer than they compute
SHORT = 4096  # tokens of a pass up to which graphs are faster
GATHERED = 64_000_000  # parameters at least that --fsdp gathers at once: each time takes the host about a millisecond
# What may be in a checkpoint's description of itself.
DESCRIPTIONS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
PLAIN = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")} | {
    ("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
BFLOAT16_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # of dense matrices, a second


# ---- data --------------------------------------------------------------------------------------------------------


def load(options: argparse.Namespace) -> tuple[numpy.ndarray, numpy.ndarray, int]:
    """Return tokens to learn from, those held back, and how many there may be; a .npy or .bin stays on the disk.

    Raises OSError or ValueError where they cannot be read, or are no tokens of that vocabulary.
    """
    path, vocabulary = options.data, options.vocabulary
    if path is not None and path.suffix in (".npy", ".bin"):
        is_npy = path.suffix == ".npy"
        try:
            tokens = numpy.lib.format.open_memmap(path, "r") if is_npy else numpy.memmap(path, options.bin_dtype, "r")
        except ValueError as error:
            kind = "an intact .npy" if is_npy else f"a .bin of {options.bin_dtype} tokens"
            raise ValueError(f"--data {path} is not {kind}: {error}") from None
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise ValueError(f"--data {path}: expected integers in a row, got {tokens.dtype} of shape {tokens.shape}")
    else:
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode() if path is None else path.read_bytes()
        tokens, vocabulary = numpy.frombuffer(text, "uint8"), vocabulary or 256
    cut = len(tokens) * 9 // 10
    if len(tokens) - cut <= options.length:
        sys.exit(f"--data has {len(tokens)} tokens: more than {10 * options.length} are needed for --length")
    vocabulary = vocabulary or 65536
    if numpy.iinfo(tokens.dtype).max >= vocabulary or tokens.dtype.kind == "i":  # or else no token can be too large
        least, most = tokens.min(), tokens.max()
        if least < 0 or most >= vocabulary:
            got = f"up to {most}" if least >= 0 else f"{least} to {most}"
            raise ValueError(
                f"tokens of --data: expected 0 to {vocabulary - 1}, got {got} (--vocabulary sets the limit)"
            )
    return tokens[:cut], tokens[cut:], vocabulary


@cache
def order(windows: int, epoch: int) -> numpy.ndarray:
    """Return the order in which an epoch reads the windows of the data."""
    return numpy.random.default_rng(epoch).permutation(windows)


def rows(tokens: numpy.ndarray, length: int, first: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    """Return sequences by their numbers, which go on over all epochs, and the same one token on."""
    windows = (len(tokens) - 1) // length
    places = (divmod(number, windows) for number in range(first, first + count))
    begins = [order(windows, epoch)[place] * length for epoch, place in places]
    stacked = numpy.stack([tokens[begin : begin + length + 1] for begin in begins]).astype(numpy.int64)
    both = torch.from_numpy(stacked).to(device)
    return both[:, :-1], both[:, 1:]


# ---- ranks -------------------------------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """Who computes what: where this rank stands among those with other sequences, and with other parts of them."""

    data: DeviceMesh  # of all ranks that have other tokens, whose gradients are averaged
    heads: DeviceMesh
    parts: DeviceMesh  # of each sequence
    place: int  # of this rank's sequences, among `count` of such
    count: int
    rank: int  # of all
    world: int


def join(options: argparse.Namespace) -> Ranks:
    """Meet the other ranks that torchrun has started, or nobody."""
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**alone)
    world, tp, cp = dist.get_world_size(), options.tp, options.cp
    if world % (tp * cp):
        sys.exit(f"{world} ranks are no multiple of --tp {tp} times --cp {cp}")
    if world > tp and not (options.dp or options.fsdp):
        sys.exit(f"{world // tp} ranks have different tokens: choose --dp or --fsdp")
    count = world // (tp * cp)
    if options.batch % (options.accumulate * count):
        sys.exit(f"--batch {options.batch} is no multiple of {options.accumulate} passes of {count} ranks")
    mesh = init_device_mesh(options.device, (world // tp, tp), mesh_dim_names=("data", "heads"))
    split = init_device_mesh(options.device, (count, cp, tp), mesh_dim_names=("rows", "parts", "heads"))
    place = split.get_local_rank("rows")
    return Ranks(mesh["data"], mesh["heads"], split["parts"], place, count, dist.get_rank(), world)


class Loss(nn.Module):
    """The loss of a model as its `forward`, which is all that DistributedDataParallel looks at."""

    def __init__(self, model: RWKV7):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, **more) -> Tensor:
        """Return the mean loss of the next tokens."""
        return self.model.loss(tokens, targets, **more)


def spread(model: RWKV7, options: argparse.Namespace, ranks: Ranks) -> nn.Module:
    """Spread a model over the ranks, and return what makes its loss."""
    if options.tp > 1:
        rwkv_jit.parallel.tensor_parallel(model, ranks.heads)
    training = Loss(model)
    if options.compile and (options.fsdp or options.tp > 1 or options.cp > 1):  # ranks meet between the layers
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    elif options.compile:
        training.compile(dynamic=False)  # a graph for each length: layers of any length would run as their parts
    if options.fsdp:
        blocks = list(model.blocks)
        together = math.ceil(GATHERED / sum(x.numel() for x in blocks[-1].parameters()))
        for begin in range(0, len(blocks), together):
            fully_shard(blocks[begin : begin + together], mesh=ranks.data)
        fully_shard(model, mesh=ranks.data)
        register_fsdp_forward_method(model, "loss")
    if options.dp:
        # Buckets of gradients would be made anew after the first step, also of a run that goes on: other last digits.
        return DistributedDataParallel(training, process_group=ranks.data.get_group(), find_unused_parameters=True)
    return training


def averaged(training: nn.Module, model: RWKV7, now: bool) -> AbstractContextManager:
    """Say whether the gradients of this pass are averaged over the ranks, or of a later one with them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    is_copied = isinstance(training, DistributedDataParallel)
    return training.no_sync() if is_copied and not now else nullcontext()


def mean_over(x: Tensor, ranks: Ranks) -> float:
    """Return the mean of a number that each rank has for its tokens."""
    x = x.detach() / ranks.data.size()
    dist.all_reduce(x, group=ranks.data.get_group())
    return x.item()


# ---- files -------------------------------------------------------------------------------------------------------


def everything(model: RWKV7, optimizer: torch.optim.Optimizer, rank: int, step: int = 0) -> dict:
    """Return all that a run goes on from; its place in the data goes by the step."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    return {"model": of_model, "optimizer": of_optimizer, "step": step, f"random_{rank}": random}


class Metadata(pickle.Unpickler):
    """Reads what a checkpoint says of itself: a pickle of numbers, names and torch's descriptions of tensors."""

    def find_class(self, module: str, name: str):
        """Return a class of such a description. What else a pickle may name could run anything."""
        if name.isidentifier() and module in ("torch", *DESCRIPTIONS):
            found = getattr(sys.modules[module], name, None)
            is_value = isinstance(found, (torch.dtype, torch.layout, torch.memory_format))
            is_described = module in DESCRIPTIONS and isinstance(found, type) and found.__module__ == module
            if is_value or (is_described and (is_dataclass(found) or issubclass(found, Enum))):
                return found
        if (module, name) in PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class Planner(dcp.DefaultLoadPlanner):
    """Loads numbers that stand beside tensors, and nothing that runs."""

    def load_bytes(self, read_item, value) -> None:
        """Load one of them."""
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError:  # whose text says how to run it all the same
            raise ValueError(f"{read_item.storage_index.fqn} holds more than numbers and tensors") from None
        value.seek(0)
        super().load_bytes(read_item, value)


def check(checkpoint: Path) -> set[str]:
    """Check that a checkpoint's metadata, which torch unpickles whatever they name, are such; return what it holds."""
    try:
        with (checkpoint / ".metadata").open("rb") as file:
            return set(Metadata(file).load().state_dict_metadata)
    except Exception as error:  # an unpickler raises a dozen kinds
        sys.exit(f"{checkpoint} is no checkpoint of this program, and is not read: {error}")


def save_model(path: Path, model: RWKV7, rank: int) -> None:
    """Write the parameters, of which each rank may have a part, to a file that official programs read."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        vocabulary, width = whole["emb.weight"].shape
        alone = RWKV7(vocabulary, width, len(model.blocks), model.head_size, device="meta")
        alone.load_state_dict(whole, assign=True)
        alone.save_checkpoint(path)


def resume(folder: Path, model: RWKV7, optimizer: torch.optim.Optimizer, rank: int) -> int:
    """Go on from the newest checkpoint that is complete, and return how many steps it had."""
    done = [int(path.parent.name) for path in folder.glob("*/.metadata")]
    if not done:
        return 0
    state, checkpoint = everything(model, optimizer, rank), folder / str(max(done))
    more = sorted(name for name in check(checkpoint) if name.startswith("model.") and name[6:] not in state["model"])
    if more:
        raise ValueError(f"{checkpoint} is of another model: it has {more[0]} too")
    try:
        dcp.load(state, checkpoint_id=checkpoint, planner=Planner())
    except dcp.api.CheckpointException as error:  # with what each rank stumbled over
        cause = next(iter(error.failures.values()))[0]
        why = str(cause).partition("\n")[0] or type(cause).__name__
        raise ValueError(f"{checkpoint} is damaged or of another model: {why}") from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state[f"random_{rank}"]["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state[f"random_{rank}"]["cuda"])
    return state["step"]


class Log:
    """Lines of JSON, and TensorBoard's files where it is installed; of the first rank alone."""

    def __init__(self, folder: Path | None, rank: int, step: int):
        self.path, self.board = None, None
        if folder is None or rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        kept = [line for line in self.read() if line["step"] <= step]  # not what came after the checkpoint
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def read(self) -> list[dict]:
        """Return all lines."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def write(self, **line: float) -> None:
        """Add a line."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if self.board is not None:
            for name in line.keys() - {"step"}:
                self.board.add_scalar(name, line[name], line["step"])

    def draw(self) -> None:
        """Save a picture of the loss."""
        if self.path is None or find_spec("matplotlib") is None:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3.6), layout="tight")
        axis = figure.subplots()
        lines = [line for line in self.read() if "loss" in line]
        axis.plot([line["step"] for line in lines], [line["loss"] for line in lines], linewidth=1)
        axis.set(xlabel="step", ylabel="loss, nats per token")
        figure.savefig(self.path.with_name("loss.png"), dpi=120)
        print(f"loss curve: {self.path.with_name('loss.png')}")


# ---- training ----------------------------------------------------------------------------------------------------


def limited(kind: type, least: float, above: bool = False):
    """Return a reader of a finite number from `least`, or above it."""

    def read(text: str):
        value = kind(text)
        if not (least < value if above else least <= value) or value == math.inf:
            raise argparse.ArgumentTypeError(f"expected {'more than' if above else 'at least'} {least}, got {text}")
        return value

    read.__name__ = kind.__name__
    return read


def read_options() -> argparse.Namespace:
    count, positive = limited(int, 1), limited(float, 0, above=True)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, on_gpu in DEFAULTS["cuda"].items():
        parser.add_argument(f"--{name}", type=count, help=f"{on_gpu} on a GPU, {DEFAULTS['cpu'][name]} on a CPU")
    parser.add_argument("--head-size", type=count, default=64)
    parser.add_argument("--data", type=Path, help="a text, or a .npy or .bin of tokens; Python's help by default")
    parser.add_argument("--bin-dtype", choices=["uint16", "uint32"], default="uint16", help="of the tokens of a .bin")
    parser.add_argument("--vocabulary", type=count, help="256 for a text, 65536 for tokens")
    parser.add_argument("--out", type=Path, help="folder of the log, the picture and checkpoints; none by default")
    parser.add_argument("--save-every", type=count, default=1000, help="steps from checkpoint to checkpoint (1000)")
    parser.add_argument("--log-every", type=count, default=10, help="steps from line to line of the log (10)")
    parser.add_argument("--accumulate", type=count, default=1, help="passes whose gradients a step adds up")
    parser.add_argument("--lr", type=positive, default=1e-3)
    parser.add_argument("--warmup", type=limited(int, 0), default=20, help="steps until that is reached (20)")
    parser.add_argument("--weight-decay", type=limited(float, 0), default=0.1)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    parser.add_argument("--graph", choices=["auto", "on", "off"], default="auto", help="repeat steps from CUDA graphs")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    parser.add_argument("--dp", action="store_true", help="the model on every rank (DistributedDataParallel)")
    parser.add_argument("--fsdp", action="store_true", help="a part of the model on every rank (FSDP2)")
    parser.add_argument("--tp", type=count, default=1, help="ranks that share the heads; not with --dp")
    parser.add_argument("--cp", type=count, default=1, help="ranks that share each sequence")
    parser.add_argument("--peak", type=positive, help="FLOPs a second that the GPU can do; known of a few")
    options = parser.parse_args()
    options.device = "cpu" if options.cpu or not rwkv_jit.is_available() else "cuda"
    for name, default in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.device == "cpu" and options.width <= SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if options.dp and (options.fsdp or options.tp > 1):
        parser.error("--dp goes neither with --fsdp nor with --tp")
    several = options.dp or options.fsdp or options.tp > 1 or options.cp > 1
    if several and options.graph == "on":
        parser.error("--graph on is for one process: not with --dp, --fsdp, --tp and --cp")
    # Where a pass has few tokens the host takes longer than the GPU.
    is_short = options.batch * options.length <= SHORT * options.accumulate
    if options.graph == "auto" and (several or options.compile or options.device == "cpu" or not is_short):
        options.graph = "off"
    if options.width % options.head_size:
        parser.error(f"--width {options.width} is no multiple of --head-size {options.head_size}")
    if options.length % options.cp:
        parser.error(f"--length {options.length} is no multiple of --cp {options.cp}")
    if options.device == "cuda" and options.peak is None:
        name = torch.cuda.get_device_name()
        options.peak = next((peak for known, peak in BFLOAT16_PEAKS.items() if known in name), None)
    return options


def factor_at(step: int, options: argparse.Namespace) -> float:
    """Return the share of the learning rate: up to it, then down along a cosine to a tenth of it."""
    done = min(max(step - options.warmup, 0) / max(options.steps - options.warmup, 1), 1)
    return min((step + 1) / max(options.warmup, 1), 0.55 + 0.45 * math.cos(math.pi * done))


def flops_of_token(model: RWKV7) -> float:
    """Return the FLOPs of a token, forward and backward: six for each weight of a matrix, and the recurrence."""
    matrices = sum(x.numel() for name, x in model.named_parameters() if x.dim() == 2 and name != "emb.weight")
    return 6 * matrices + 3 * len(model.blocks) * 8 * model.emb.weight.shape[1] * model.head_size


def say_next(options: argparse.Namespace, has_bytes: bool) -> None:
    """Print the commands that use the model: with the list of its tokens where these are no bytes."""
    more = [*([] if has_bytes else ["--vocabulary", "FILE"]), *(["--cpu"] if options.device == "cpu" else [])]
    here, path = Path(__file__).parent, str(options.out / "model.pth")
    for what, command in (
        ("sample", [str(here / "sample.py"), path]),
        ("serve", [str(here / "serve.py"), "--checkpoint", path]),
    ):
        print(f"{what}: {shlex.join(['python', *command, *more])}")


def main() -> int | str:
    options = read_options()
    ranks, device = join(options), options.device
    try:
        learned, held_back, vocabulary = load(options)
        torch.manual_seed(0)
        model = RWKV7(vocabulary, options.width, options.layers, options.head_size, device=device)
        model.checkpointing = options.checkpointing
        flops, size = flops_of_token(model), sum(x.numel() for x in model.parameters())
        training = spread(model, options, ranks)
        is_graphed = options.graph != "off" and ranks.world == 1
        groups = model.param_groups(lr=options.lr, weight_decay=options.weight_decay)
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-18, fused=is_graphed or None)
        rates = [group["lr"] for group in optimizer.param_groups]
        folder = None if options.out is None else options.out / "checkpoints"
        step = 0 if folder is None else resume(folder, model, optimizer, ranks.rank)
        log = Log(options.out, ranks.rank, step)
    except (OSError, ValueError) as error:  # of files and options
        return str(error)
    count = options.batch // (options.accumulate * ranks.count)  # sequences of a pass, of this rank
    if ranks.rank == 0:
        print(f"{device}: {size / 1e6:.2f} M parameters, ranks: {ranks.world}")
        if step >= options.steps:
            print(f"{options.out} is already at step {step}: --steps {options.steps} trains no further")

    def loss_of(tokens: numpy.ndarray, number: int, training: Callable[..., Tensor] = training) -> Tensor:
        inputs, targets = rows(tokens, options.length, number + ranks.place * count, count, device)
        more = {}
        if options.cp > 1:
            more["shard"] = rwkv_jit.parallel.Shard(ranks.parts)
            inputs, targets = (x.chunk(options.cp, 1)[ranks.parts.get_local_rank()] for x in (inputs, targets))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return training(inputs, targets, **more)

    if is_graphed:
        graphed = rwkv_jit.nn.graphed_step(model, optimizer, max_norm=1.0, accumulate=options.accumulate)
    losses, started, tokens = [], time.perf_counter(), 0
    progress = tqdm(total=max(options.steps, step), initial=step, unit="step", disable=ranks.rank > 0)
    while step < options.steps:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor_at(step, options)
        for turn in range(options.accumulate):
            number = step * options.batch + turn * count * ranks.count
            if is_graphed:  # which does all that follows, too
                losses.append(loss_of(learned, number, graphed) / options.accumulate)
                continue
            with averaged(training, model, turn == options.accumulate - 1):
                loss = loss_of(learned, number) / options.accumulate
                loss.backward()
            losses.append(loss.detach())
        if is_graphed:
            norm = graphed.norm
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        step, tokens = step + 1, tokens + options.batch * options.length
        progress.update()
        if step % options.log_every == 0 or step == options.steps:
            mean = mean_over(torch.stack(losses).sum(), ranks) / (len(losses) / options.accumulate)
            speed = tokens / (time.perf_counter() - started)
            line = {"step": step, "loss": mean, "lr": optimizer.param_groups[0]["lr"], "tokens_per_second": speed}
            line["gradient_norm"] = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
            if options.peak is not None:
                line["flops_use"] = flops * speed / options.peak / ranks.world
            log.write(**line)
            progress.set_postfix(loss=f"{mean:.3f}", tokens=f"{speed:,.0f}/s")
            losses, started, tokens = [], time.perf_counter(), 0
        if folder is not None and (step % options.save_every == 0 or step == options.steps):
            begun = time.perf_counter()
            dcp.save(everything(model, optimizer, ranks.rank, step), checkpoint_id=folder / str(step))
            started += time.perf_counter() - begun  # no tokens were to be had in that time
    progress.close()

    with torch.no_grad():
        final = mean_over(loss_of(held_back, 0), ranks)
    log.write(step=step, held_back=final)
    if ranks.rank == 0:
        print(f"loss {final:.3f} on what was held back")
    log.draw()
    if options.out is not None:
        save_model(options.out / "model.pth", model, ranks.rank)
        if ranks.rank == 0:
            say_next(options, learned.dtype == numpy.uint8)
    dist.destroy_process_group()
    if ranks.world == 1 and not options.fsdp and learned.dtype == numpy.uint8:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            written = model.generate(torch.tensor([list(b"The ")], device=device), 200, temperature=0.8)
        print(bytes(written[0].tolist()).decode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
