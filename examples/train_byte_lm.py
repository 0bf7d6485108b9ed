"""Train a small RWKV-7 language model on bytes of Python's own help texts, and let it write.

    python examples/train_byte_lm.py [--steps N] [--batch N] [--length N] [--width N] [--layers N] [--head-size N]
                                     [--compile] [--cpu] [--plot FILE]

Prints the loss at the start and at the end, the loss on text held back, tokens per second, and 200 bytes that the
model writes one at a time with its states carried from byte to byte; --plot draws the loss. On a GPU the defaults are a
model of about 3 million parameters with head size 48 in bfloat16; on a CPU, in plain torch, a much smaller one in
float32, which takes a few minutes. Exits with 1 if the loss did not fall. The model is that of arXiv:2503.14456.
"""

import argparse
import math
import sys
import time
from importlib.util import find_spec
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rwkv_jit

try:
    from tqdm import tqdm
except ImportError:
    sys.exit("this example needs tqdm: pip install matplotlib tqdm")

DEFAULTS = {
    "cuda": {"steps": 400, "batch": 32, "length": 512, "width": 192, "layers": 6, "head_size": 48},
    "cpu": {"steps": 200, "batch": 16, "length": 64, "width": 96, "layers": 3, "head_size": 48},
}


class LayerState(NamedTuple):
    """What a layer knows of the tokens before: its last two inputs [B, C], and the matrices of its heads."""

    time_shift: Tensor
    channel_shift: Tensor
    heads: Tensor  # [B, H, N, N], float32


def shifted(x: Tensor, last: Tensor | None) -> Tensor:
    """Return the token before each token; before the first one, `last` or zeros."""
    first = torch.zeros_like(x[:, :1]) if last is None else last.unsqueeze(1).to(x.dtype)
    return torch.cat([first, x[:, :-1]], dim=1)


class LowRank(nn.Module):
    """bias + inner(x A) B: a small correction, per token, of a value learned per channel. Zero at first."""

    def __init__(self, width: int, rank: int, bias: Tensor | None, inner=nn.Identity):
        super().__init__()
        self.down, self.inner, self.up = nn.Linear(width, rank, bias=False), inner(), nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the corrected value for every token."""
        y = self.up(self.inner(self.down(x)))
        return y if self.bias is None else y + self.bias


class TimeMix(nn.Module):
    """RWKV-7's replacement of attention: a matrix per head that decays, forgets along kk, and learns v for k."""

    def __init__(self, width: int, head_size: int, first: bool):
        super().__init__()
        self.head_size, rank = head_size, max(16, width // 6)
        self.mix = nn.Parameter(torch.full((6, width), 0.5))  # how much of the token before, for each projection
        self.receptance, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        nn.init.zeros_(self.output.weight)
        self.decay = LowRank(width, rank, torch.linspace(-6, 1, width), nn.Tanh)  # from long memory to short
        self.rate = LowRank(width, rank, torch.zeros(width))
        self.keep_first = None if first else LowRank(width, rank, torch.ones(width))
        self.gate = LowRank(width, 2 * rank, None, nn.Sigmoid)
        nn.init.normal_(self.gate.up.weight, std=rank**-0.5)  # a gate of zeros would let nothing through
        self.removal_scale = nn.Parameter(torch.full((width,), 0.85))
        self.rate_scale = nn.Parameter(torch.ones(width))
        self.bonus = nn.Parameter(torch.zeros(width // head_size, head_size))
        self.norm = nn.GroupNorm(width // head_size, width, eps=64e-5)

    def forward(self, x: Tensor, first_v: Tensor | None, last: Tensor | None, state: Tensor | None, keep: bool):
        """Return the mixed tokens, the first layer's v, and with `keep` the heads' matrices after the last token."""
        B, T, C = x.shape
        xr, xw, xk, xv, xa, xg = torch.lerp(x, shifted(x, last), self.mix[:, None, None])
        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        w = -F.softplus(-self.decay(xw).float()) - 0.5
        rate = torch.sigmoid(self.rate(xa))
        if self.keep_first is None:
            first_v = v
        else:
            v = v + (first_v - v) * torch.sigmoid(self.keep_first(xv))
        removal = F.normalize((k * self.removal_scale).view(B, T, -1, self.head_size), dim=-1)
        k = k * (1 + (rate - 1) * self.rate_scale)

        r, k, v, w, rate = (z.view(B, T, -1, self.head_size) for z in (r, k, v, w, rate))
        # Under autocast r is bfloat16 and the others follow it; only the decay stays float32.
        k_, v_, a, b = (z.to(r.dtype) for z in (k, v, -removal, removal * rate))
        y, state = rwkv_jit.wkv7(r, w, k_, v_, a, b, initial_state=state, output_final_state=keep, decay="raw")
        y = self.norm(y.reshape(B * T, C)).view(B, T, C)
        y = y + ((r * k * self.bonus).sum(-1, keepdim=True) * v).reshape(B, T, C)
        return self.output(y * self.gate(xg)), first_v, state


class ChannelMix(nn.Module):
    """Two layers with a squared relu between them, over a mix of this token and the one before."""

    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Parameter(torch.full((width,), 0.5))
        self.key, self.value = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.value.weight)

    def forward(self, x: Tensor, last: Tensor | None) -> Tensor:
        """Return the mixed channels of every token."""
        return self.value(F.relu(self.key(torch.lerp(x, shifted(x, last), self.mix))).square())


class Block(nn.Module):
    """Time mix, then channel mix, each added to what came in."""

    def __init__(self, width: int, head_size: int, first: bool):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.time_mix, self.channel_mix = TimeMix(width, head_size, first), ChannelMix(width)

    def forward(self, x: Tensor, first_v: Tensor | None, state: LayerState | None, keep: bool):
        """Return the tokens, the first layer's v, and with `keep` this layer's state."""
        last_time, last_channel, heads = state or (None, None, None)
        inner = self.norms[0](x)
        mixed, first_v, heads = self.time_mix(inner, first_v, last_time, heads, keep)
        x = x + mixed
        outer = self.norms[1](x)
        x = x + self.channel_mix(outer, last_channel)
        return x, first_v, LayerState(inner[:, -1], outer[:, -1], heads) if keep else None


class ByteModel(nn.Module):
    """Bytes [B, T] to logits [B, T, 256]; with `keep`, also the states after the last byte."""

    def __init__(self, width: int, layers: int, head_size: int):
        super().__init__()
        self.embed, self.norm_in = nn.Embedding(256, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, head_size, first=layer == 0) for layer in range(layers))
        self.norm_out, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, text: Tensor, states: list[LayerState] | None = None, keep: bool = False):
        """Return the logits and one state (or None) per layer."""
        x, first_v, after = self.norm_in(self.embed(text)), None, []
        for layer, block in enumerate(self.blocks):
            x, first_v, state = block(x, first_v, states[layer] if states else None, keep)
            after.append(state)
        return self.head(self.norm_out(x)), after


def load_text() -> tuple[Tensor, Tensor]:
    """Return the help texts of Python's keywords and types as bytes: nine tenths to learn, the rest held back."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.tensor(list(text))
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def sample_batch(data: Tensor, batch: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random stretches of text, and the same one byte on."""
    begin = torch.randint(len(data) - length, (batch, 1))
    rows = data[begin + torch.arange(length + 1)].to(device)
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def write(model: ByteModel, prompt: str, count: int, device: str) -> str:
    """Continue `prompt`: the prompt goes through at once, then one byte per call with the states carried."""
    text = list(prompt.encode())
    logits, states = model(torch.tensor([text], device=device), keep=True)
    for _ in range(count):
        chosen = torch.multinomial(torch.softmax(logits[0, -1].float() / 0.8, dim=-1), 1)
        text.append(chosen.item())
        logits, states = model(chosen.view(1, 1), states, keep=True)
    return bytes(text).decode(errors="replace")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, on_gpu in DEFAULTS["cuda"].items():
        on_cpu = DEFAULTS["cpu"][name]
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{on_gpu} on a GPU, {on_cpu} on a CPU")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile, without a graph break")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    parser.add_argument("--plot", metavar="FILE", help="draw the loss of every step, e.g. loss.png")
    options = parser.parse_args()
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib tqdm")
    options.device = "cpu" if options.cpu or not rwkv_jit.is_available() else "cuda"
    for name, default in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.width % options.head_size:
        parser.error(f"--width {options.width} is not a multiple of --head-size {options.head_size}")
    return options


def draw(losses: list[float], held_back: float, path: str) -> None:
    """Save the loss of every step, and that of text held back."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="tight")
    axis = figure.subplots()
    axis.plot(losses, linewidth=1)
    axis.axhline(held_back, color="black", linestyle="--", linewidth=1, label=f"on text held back: {held_back:.3f}")
    axis.set(xlabel="step", ylabel="loss, nats per byte")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)
    print(f"loss curve: {path}")


def main() -> int:
    options = read_options()
    device = options.device
    torch.manual_seed(0)
    train, held_back = load_text()
    model = ByteModel(options.width, options.layers, options.head_size).to(device)
    matrices = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    others = [p for p in model.parameters() if p not in matrices]
    groups = [{"params": list(matrices), "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{device}: {count / 1e6:.2f} M parameters, {options.width // options.head_size} heads of {options.head_size}"
    )

    def loss_of(text: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits, _ = model(text)
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())

    training_loss = torch.compile(loss_of, fullgraph=True) if options.compile else loss_of
    losses, started = [], 0.0
    progress = tqdm(range(options.steps), unit="step")
    for step in progress:
        # Up over a twentieth of the steps, then down along a cosine.
        rise, done = 20 * (step + 1) / options.steps, step / options.steps
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(rise, 0.55 + 0.45 * math.cos(math.pi * done))
        loss = training_loss(*sample_batch(train, options.batch, options.length, device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step == 0:
            losses[0].item()  # the first step compiles kernels; waiting for it keeps it out of the speed
            started = time.perf_counter()
        if step % 10 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
    values = torch.stack(losses).tolist()
    speed = (options.steps - 1) * options.batch * options.length / (time.perf_counter() - started)

    with torch.no_grad():
        batches = [sample_batch(held_back, options.batch, options.length, device) for _ in range(4)]
        validation = sum(loss_of(*batch).item() for batch in batches) / len(batches)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            written = write(model, "The ", 200, device)
    end = sum(values[-10:]) / len(values[-10:])
    print(f"loss {values[0]:.3f} at the start, {end:.3f} at the end (last steps), {validation:.3f} on text held back")
    print(f"{speed:,.0f} tokens/s after the first step\n\n{written}")
    if options.plot:
        draw(values, validation, options.plot)
    return 0 if end < values[0] else 1


if __name__ == "__main__":
    sys.exit(main())
