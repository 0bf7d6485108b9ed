"""Who is measured on a case, and the rows of it: everyone on the same inputs, in turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import rwkv_jit
from bench import cases, timing
from bench.cases import OF_FEW, POOLED, REPLAY, VARLEN, VERIFY, Case, Given
from rwkv_jit.call import rule, switches, torch_op
from rwkv_jit.call.options import complete
from rwkv_jit.desk import bench, figures, inputs
from rwkv_jit.desk.bench import one_line
from rwkv_jit.desk.inputs import OURS, REFERENCES, UPDATE
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.ops import timex, wide_keys
from rwkv_jit.plain.reference import decay_factor
from rwkv_jit.schedules import wkv4
from rwkv_jit.schedules.problem import Problem

MOST_LOOPED_TOKENS = 128  # of a loop in torch: its launches are many, and its time grows no other way than linearly
BUDGET_MS = 4000.0  # of the rounds of a case
MOST_TOKENS = 300  # of a row, where errors are taken: the reference walks over them in float64
MOST_ROWS = 64  # of an update, where errors are taken
MOST_SETS = 256  # of inputs
_MOST_STATES = 2**28  # elements that the reference keeps for its backward

Inputs = Sequence[Tensor]
Run = Callable[[Inputs, Tensor | None, Mapping[str, Any]], tuple[Tensor | None, Any]]
COLUMNS = (
    "suite", "op", "shape", "dtype", "phase", "inputs", "who", "what", "median_ms", "low_ms", "high_ms", "runs",
    "in_graph", "host_us", "calls_us", "floor_ms", "fraction", "peak_mib", "error", "errors", "other_error", "other",
    "skipped",
)  # fmt: skip
SHOWN = {
    "by": "{who} {what}", "ms": "{median_ms:.4f}", "quartiles": "{low_ms:.4f} to {high_ms:.4f}",
    "of the floor": "{fraction:.0%}", "in a graph": "{in_graph}", "host us": "{host_us:.1f}", "": "{mark}",
    "calls us": "{calls_us:.1f}",
    "peak MiB": "{peak_mib:.1f}", "error": "{error:.1e}", "other": "{other_error:.1e}",
}  # fmt: skip
METHODS = (
    "Median and quartiles of the GPU's time by CUDA events, after a warm-up, in rounds over everyone of a case; small "
    "calls and those over a pool in a CUDA graph, the others queued while the GPU waits. Inputs come round when they "
    "have left the L2 cache. Clocks as found. Floor: the fewest bytes of a call at the bandwidth of a copy in the same "
    "run. Host: until a call has returned, in the fastest row of calls; a † marks where it takes longer than the GPU, "
    "so that calls one after another take its time. Calls: what is in a graph, one after another without it, until the "
    "GPU has ended. Peak: memory of a call, of a backward with its forward, and the inputs. Error: relative L2 of the "
    "call that was timed against float64, the largest of y, the gradients and the states of few tokens over a pool, "
    "over at most 300 tokens of a row, or 64 rows. Other: the largest distance, over all tokens, from another backend "
    "of ours, or from our call over the pool."
)


class Entry(NamedTuple):
    """A case, and the backends of ours that are measured on it."""

    suite: str | None
    case: Case
    backends: Sequence[str] | None = None  # all that can do it


class Contestant(NamedTuple):
    """Who is measured: a backend of ours, or a peer.

    `run` takes inputs, the state before them or None, and what else a case has: whether the state behind them is
    wanted, and the ends of packed sequences. It returns y and that state; y is None where it computes nothing, but
    takes the time that others are held against. `convert` makes such inputs of the op's, as differentiable operations,
    and `convert_state` such states of the op's, and after an update the op's of such; they are not timed.

    A call over a pool gives states in the order of the rows, but to what is a `verb` of pools: that gets the pool, the
    slots in it, memory for y, and what else the verb takes, and returns the pool.
    """

    who: str
    what: str
    run: Run
    convert: Callable[[Inputs], Inputs] = lambda inputs: inputs
    convert_state: Callable[[Tensor], Tensor] = lambda state: state
    is_foreign: bool = False  # whether it is tried in a process of its own first, as it may end one
    verb: str = ""


# ---- ours --------------------------------------------------------------------------------------------------------


def backend_of(case: Case, given: Given, asked: str) -> str:
    """Return the backend that a case takes where this one is asked for, as the rule of its calls chooses it.

    That of a call over a pool is its verb, as "update"; segments and kernels of large heads are "split", as calls name
    them; "dedicated" are kernels that an op has for itself. Raises UnsupportedConfigError where it cannot do it: what
    is in the way.
    """
    if case.is_pooled:
        return case.phase
    arrays = [*given.inputs, *[None] * (len(case.about.inputs) - len(given.inputs))]  # optional ones stand behind
    problem = problem_of(case, given, arrays, asked)
    if case.op == "wkv4":
        return wkv4.backend_of(problem)
    if case.op == "timex":
        directions = [case.phase] if case.phase in ("forward", "backward") else ["forward", "backward"]
        return ", ".join(dict.fromkeys(timex.choose(problem, direction) for direction in directions))
    running = rule.seen(problem)
    if running.op.family == "diagonal" and asked in ("auto", "split"):  # keys that are too long go in parts
        sizes = wide_keys.part_sizes(running)
        problem = problem if len(sizes) == 1 else problem._replace(K=sizes[0], backend="auto")
    algorithm = torch_op.resolved(problem, given.inputs, is_direct=True).backend
    return "split" if algorithm in ("segments", "large", "large_segments") else algorithm


def problem_of(case: Case, given: Given, arrays: Sequence[Tensor | None], asked: str) -> Problem:
    """Return the problem of a case as its call describes it."""
    traits = {name: case.options.get(name, default) for name, default in case.about.traits.items()}
    options = {name: value for name, value in case.options.items() if name not in traits}
    whole = complete(case.about, {**options, "backend": asked}, given.inputs[0])
    return torch_op.problem_of(
        case.about, arrays, given.state, given.cu_seqlens,
        torch_op.asked_options(whole, given.inputs[0].dtype, switches.current()), case.phase in inputs.WITH_STATES,
        case.has_gradients, traits=tuple(traits.items()), is_direct=True,
    )  # fmt: skip


def ours(case: Case, given: Given, asked: Sequence[str] | None = None) -> tuple[list[Contestant], dict[str, str]]:
    """Return our contestants, first what "auto" takes, and what is in the way of backends that were asked for.

    By default all backends that can do it are. Names that come to the same backend are one contestant. Beside a call
    over a pool there is what a caller would take without it.
    """
    if case.is_pooled:
        beside_it = {REPLAY: UPDATE, VERIFY: UPDATE, VARLEN: "forward"}
        several = [case.phase, *([beside_it[case.phase]] if case.phase in beside_it else [])]
        return [our_call(case, "auto", each) for each in several], {}
    taken: dict[str, Contestant] = {}
    obstacles: dict[str, str] = {}
    for name in inputs.backends_of(case.op, case.phase) if asked is None else asked:
        try:
            backend = backend_of(case, given, name)
        except UnsupportedConfigError as error:
            if asked is not None:
                obstacles[name] = str(error)
            continue
        taken.setdefault(backend, our_call(case, name, backend))
    return list(taken.values()), obstacles


def our_call(case: Case, asked: str, backend: str) -> Contestant:
    """Return the contestant that asks for a backend of ours, or calls a function of pools, which takes "auto" alone."""
    if backend not in POOLED:
        return Contestant(OURS, backend, _calling(inputs.OPS[case.op], backend=asked, **case.options))
    step = partial(getattr(rwkv_jit, f"{case.op}_{backend}"), **case.options)

    def run(x: Inputs, pool: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
        ring, others = more["ring"], more["others"]
        return (step(pool, *x, **others) if ring is None else step(pool, ring, *x, **others)), pool

    def in_one_row(x: Inputs) -> Inputs:  # [1, B T, ..]
        several = zip(case.names, x, strict=True)
        return [each.flatten(0, 1)[None] if "T" in case.dims(name) else each for name, each in several]

    convert = in_one_row if backend == VARLEN else list
    return Contestant(OURS, backend, run, convert, verb=backend)


def _calling(function: Callable[..., Any], **options: Any) -> Run:
    """Return what calls an op, or its reference, with a state where there is one."""

    def run(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
        y, final = function(*inputs, **({} if state is None else {"initial_state": state}), **more, **options)
        return y, final

    return run


# ---- torch -------------------------------------------------------------------------------------------------------


def torch_peers(case: Case) -> list[Contestant]:
    """Return what torch alone can do of a case; for few tokens a copy of the states, which reads and writes them."""
    if case.phase in OF_FEW:
        copy = Contestant(
            "torch", "copy", lambda _, both, more: (None, None if both is None else both[1].copy_(both[0])),
            convert_state=lambda states: torch.stack([states, states]),
        )  # fmt: skip
        steps = [Contestant("torch", "step in place", partial(_step, case))]
        return [copy, *(steps if case.phase == UPDATE and case.op not in cases.DERIVED else ())]
    if case.op == "timex":
        return [Contestant("torch", "conv1d", _conv1d), Contestant("torch", "fft", _fft)]
    if case.op in ("wkv5", "wkv6") and case.shape[1] <= MOST_LOOPED_TOKENS and case.kind != "packed":
        return [Contestant("torch", "naive loop", _calling(inputs.OPS[case.op], backend="reference", **case.options))]
    return []


def _conv1d(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, None]:
    w, k = inputs
    _, channels, tokens = k.shape
    padded = torch.nn.functional.pad(k, (tokens - 1, 0))
    return torch.nn.functional.conv1d(padded, w.unsqueeze(1), groups=channels), None


def _fft(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, None]:
    w, k = inputs
    tokens = k.shape[-1]
    spectra = [torch.fft.rfft(x.float(), n=2 * tokens) for x in (w.flip(-1), k)]
    return torch.fft.irfft(spectra[0] * spectra[1], n=2 * tokens)[..., :tokens].to(k.dtype), None


def _step(case: Case, inputs: Inputs, states: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """Make the step of an update by products of matrices, in the dtype of the states, which change in place."""
    assert states is not None
    op, (batch, _, heads, head_size, value_size) = case.about, case.shape
    given = dict(zip(op.names, inputs, strict=True))

    def rows(name: str, wide: torch.dtype = states.dtype) -> Tensor:
        """Return an input as a row for each head of each sequence."""
        x = given[name].to(wide)
        return x.expand(batch, 1, heads, x.shape[-1]).reshape(batch * heads, 1, x.shape[-1])

    r, k, v = map(rows, "rkv")
    scale = head_size**-0.5 if op.scale is None else op.scale
    r = r if scale == 1 else scale * r
    kv = (states if case.state_layout == "kv" else states.mT).view(batch * heads, head_size, value_size)
    # The bonus of u is for the token itself, of which the state before it knows nothing.
    y = r @ kv + (r * rows("u") * k).sum(-1, keepdim=True) * v if "u" in given else None
    if "a" in given:
        k, v = torch.cat([k, rows("b")], 1), torch.cat([v, rows("a") @ kv], 1)
    if "w" in given:
        kv.mul_(decay_factor(rows("w", torch.float32), case.decay).to(kv.dtype).mT)
    kv.baddbmm_(k.mT, v)
    y = r @ kv if y is None else y
    return y.view(batch, 1, heads, value_size).to(given["v"].dtype), states


# ---- rows --------------------------------------------------------------------------------------------------------


def row(entry: Entry, who: str = OURS, what: str = "-", skipped: str | None = None) -> dict[str, Any]:
    """Return a row without figures."""
    of_case = bench.row_of(entry.case, (who, what), skipped)
    return dict.fromkeys(COLUMNS) | of_case | {"suite": entry.suite, "inputs": entry.case.kind, "in_graph": False}


def rows_of(entry: Entry, copy_tb_per_s: float, peers: Sequence[Contestant] = ()) -> list[dict[str, Any]]:
    """Measure a case on a GPU, with peers beside ours; return a row for each contestant, skipped ones last.

    The floor goes by the bandwidth of a copy.
    """
    case = entry.case
    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    # Calls take sets of inputs in turn: one comes round when everything of it has left the cache, if they suffice.
    sets, flush = [cases.given_for(case)], None
    sets += [cases.given_for(case) for _ in range(min(2 * cache_bytes // sets[0].size(), MOST_SETS - 1))]
    own, refused = ours(case, sets[0], entry.backends)
    skipped = [row(entry, OURS, name, why) for name, why in refused.items()]
    if sum(given.size() for given in sets) <= 2 * cache_bytes:
        flush = torch.empty(2 * cache_bytes, dtype=torch.uint8, device="cuda")
    ready: list[tuple[Contestant, timing.Turns, int]] = []
    for contestant in (*own, *peers):
        try:
            ready.append((contestant, *_ready(case, contestant, sets, flush)))
        except Exception as error:
            skipped.append(row(entry, contestant.who, contestant.what, one_line(error)))
    timed = figures.interleaved([turns.ms for _, turns, _ in ready], BUDGET_MS)
    judged = _errors(case, [contestant for contestant, _, _ in ready], sets[0], ours(case, sets[0])[0])
    floor = cases.floor_ms(case, sets[0], copy_tb_per_s)
    measured = []
    for (contestant, turns, peak), times, errors in zip(ready, timed, judged, strict=True):
        who = (contestant.who, contestant.what)
        if isinstance(times, Exception):
            skipped.append(row(entry, *who, one_line(times)))
        elif not all(map(math.isfinite, (*errors["errors"].values(), errors["other_error"] or 0.0))):
            skipped.append(row(entry, *who, "its results are not finite, so it has no speed"))
        # Calls over a pool have changed their states many times.
        elif case.is_pooled and not all(
            bool(x.isfinite().all()) for call in turns.calls for x in call() if x is not None
        ):
            skipped.append(row(entry, *who, "its states did not stay finite, so it has no speed"))
        else:
            measured.append(
                row(entry, *who)
                | figures.spread(times)
                | {"in_graph": turns.in_graph, "host_us": turns.host_us, "calls_us": turns.calls_us, "floor_ms": floor}
                | {"fraction": floor / statistics.median(times), "peak_mib": peak / 2**20, **errors}
            )
    return measured + skipped


def run_once(case: Case, contestant: Contestant, given: Given) -> Callable[[], Any]:
    """Return the call of a case by a contestant; for a backward alone, the forward runs here.

    One over a pool changes states of its own, and holds what it returned last: new memory is another for each set.
    """
    inputs = [
        x.detach().requires_grad_(case.has_gradients and x.requires_grad) for x in contestant.convert(given.inputs)
    ]
    state, more = beside(case, contestant, given)
    if case.is_pooled:
        last: list[Any] = []

        def step() -> Any:
            last[:] = [contestant.run(inputs, state, more)]
            return last[0]

        return step
    if not case.has_gradients:
        return lambda: contestant.run(inputs, state, more)
    leaves = [x for x in inputs if x.requires_grad]
    grad: Any = torch.autograd.grad
    if case.phase == "forward+backward":
        return lambda: grad(contestant.run(inputs, None, more)[0], leaves, given.dy)
    y = contestant.run(inputs, None, more)[0]
    return lambda: grad(y, leaves, given.dy, retain_graph=True)


def beside(case: Case, contestant: Contestant, given: Given) -> tuple[Tensor | None, dict[str, Any]]:
    """Return the state a contestant begins with, a copy as calls change it, and what else it is given with inputs."""
    if contestant.verb and given.state is not None:
        return given.state.clone(), _over_a_pool(case, contestant.verb, given)
    more: dict[str, Any] = {"output_final_state": True} if case.is_pooled or case.phase in inputs.WITH_STATES else {}
    if given.cu_seqlens is not None:
        more["cu_seqlens"] = given.cu_seqlens
    states = given.states()
    return None if states is None else contestant.convert_state(states), more


def _over_a_pool(case: Case, verb: str, given: Given) -> dict[str, Any]:
    """Return what a call of a verb takes: a ring or None, and others by name."""
    others: dict[str, Any] = {"state_indices": given.slots, "out": torch.empty_like(given.dy)}
    if verb == VARLEN:
        batch, tokens = given.dy.shape[:2]
        equal = torch.arange(0, batch * tokens + 1, tokens, device=given.dy.device)
        ends = (equal if given.cu_seqlens is None else given.cu_seqlens).int()
        out = others["out"].flatten(0, 1)[None]  # [1, B T, H, V]
        others |= {"out": out, "cu_seqlens": ends, "max_seqlen": int(ends.diff().max())}
    if verb not in (REPLAY, VERIFY):
        return {"ring": None, "others": others}
    (batch, tokens, *sizes), new_ring = case.shape, cast(Any, rwkv_jit.ReplayRing)
    ring = new_ring(
        batch, case.op, *sizes, drafts=tokens if verb == VERIFY else 0, dtype=case.dtype, state_dtype=case.state_dtype,
        device=given.dy.device, key_heads=case.key_heads,
    )  # fmt: skip
    # Slots are in all phases, so that a call takes the average of a cycle, and their entries leave states as they are.
    ring.cursors.copy_(torch.arange(batch) % (ring.length + 1))
    if ring.d is not None:
        ring.d.fill_(1)
    return {"ring": ring, "others": others}


def _states_behind(case: Case, contestant: Contestant, final: Tensor, given: Given, more: Mapping[str, Any]) -> Tensor:
    """Return the states that a call over a pool leaves, in the order of the rows, with all that its ring has."""
    if not contestant.verb:
        return contestant.convert_state(final)
    if (ring := more.get("ring")) is not None and given.slots is not None:
        about: dict[str, Any] = {"state_layout": case.state_layout, "state_indices": given.slots}
        if contestant.verb == VERIFY:
            rwkv_jit.replay_commit(final, ring, torch.full_like(given.slots, case.shape[1]), **about)
        rwkv_jit.replay_flush(final, ring, **about)
    return final[given.slots]


def _ready(case: Case, contestant: Contestant, sets: Sequence[Given], flush: Tensor | None) -> tuple[timing.Turns, int]:
    """Compile, tune and warm a contestant up; return its turns, and the memory of one call with its inputs."""
    first = run_once(case, contestant, sets[0])
    first()
    torch.cuda.synchronize()
    # The states of a pool are those of the set: what makes a copy of them is no part of the call.
    whole = first if case.is_pooled else lambda: run_once(case, contestant, sets[0])()
    peak = figures.peak_bytes(whole) + sets[0].size()
    calls = [first, *(run_once(case, contestant, given) for given in sets[1:])]
    for call in calls:
        call()
    small = not case.has_gradients and sets[0].dy.numel() < timing.SMALL
    return timing.Turns(calls, timing.MANY if small else timing.FEW if case.is_pooled else 0, flush), peak


# ---- errors ------------------------------------------------------------------------------------------------------

Results = dict[str, Tensor]  # y; the gradients by the names of their inputs: dr, dw; and the state behind an update


def _errors(
    case: Case, everyone: Sequence[Contestant], given: Given, own: Sequence[Contestant]
) -> list[dict[str, Any]]:
    """Return the relative L2 errors of the call that was timed.

    The first tokens of a row depend on nothing behind them. Where the gradient of y is zero elsewhere, so do their
    gradients. So float64 judges the whole call, with its backend and geometry, by the first tokens of its first row.
    All tokens of it are held against another backend of ours. Of few tokens over a pool float64 judges y and the states
    of the first rows, whose slots lie anywhere in the pool; those of others are held against ours, in all rows. States
    behind prompts are held against those of the op.

    For each contestant there are errors, by the names of the results; error, the largest of them; other, the backend of
    ours that did it too; and other_error, the largest distance to that. They are None where something cannot be done,
    or the reference has no memory.
    """
    state = math.prod(case.shape[2:]) if case.about.has_heads else 1
    tokens = min(case.shape[1], MOST_TOKENS, max(16, _MOST_STATES // state))
    exact = Contestant("float64", "reference", _calling(REFERENCES[case.op], **case.options))
    wanted = _results(case, exact, _first_tokens(case, given, tokens))
    if case.phase == VARLEN:  # whose states are those behind all tokens
        wanted.pop("state", None)
    begun = given._replace(dy=torch.zeros_like(given.dy))
    beginning(case, "y", begun.dy, tokens).copy_(beginning(case, "y", given.dy, tokens))
    # First those that are made for exact sums and not for speed.
    judges = sorted(own, key=lambda backend: backend.what not in ("recurrent", "fft"))
    found = cache(partial(_results, case, given=given))
    judged = []
    for contestant in everyone:
        errors = _distances(case, _results(case, contestant, begun) if wanted else {}, wanted, tokens)
        who = (contestant.who, contestant.what)
        judge = next((backend for backend in judges if who != (OURS, backend.what)), None)
        distances = _distances(case, _results(case, contestant, given), found(judge)) if judge else {}
        judged.append({
            "error": max(errors.values(), default=None), "errors": errors,
            "other": judge.what if judge and distances else None,
            "other_error": max(distances.values(), default=None),
        })  # fmt: skip
    return judged


def beginning(case: Case, name: str, x: Tensor, tokens: int) -> Tensor:
    """Return the part of an input, of y or of their gradients that the first tokens of the first row need.

    Of few tokens over a pool, and of states in the order of the rows, it is that of the first rows.
    """
    if case.op == "timex":  # the last column of w is that of the token itself
        return x[:, -tokens:] if name in ("w", "dw") else x[:1, :, :tokens]
    if "T" not in case.dims(name.removeprefix("d")):
        return x
    return x[:MOST_ROWS] if case.phase in OF_FEW else x[:1, :tokens]


def _first_tokens(case: Case, given: Given, tokens: int) -> Given:
    """Return in float64 what decides about the first tokens of the first row, or about the first rows over a pool."""
    first = [
        beginning(case, name, x.detach(), tokens).double().requires_grad_(x.requires_grad)
        for name, x in zip(case.names, given.inputs, strict=True)
    ]
    ends = None if given.cu_seqlens is None else given.cu_seqlens.clamp(max=tokens).unique()
    state = given.states(MOST_ROWS if case.phase in OF_FEW else 1 if ends is None else len(ends) - 1)
    return Given(
        first, beginning(case, "y", given.dy, tokens).double(), None if state is None else state.double(), ends
    )  # fmt: skip


def _results(case: Case, contestant: Contestant, given: Given) -> Results:
    """Return what a contestant finds, as the op's callers would; nothing where it cannot do it."""
    try:
        inputs = contestant.convert(given.inputs if case.has_gradients else [x.detach() for x in given.inputs])
        state, more = beside(case, contestant, given)
        y, final = contestant.run(inputs, state, more)
        if y is None:
            return {}
        results = {"y": y.detach().view_as(given.dy)}
        if case.has_gradients:
            leaves = {f"d{name}": x for name, x in zip(case.names, given.inputs, strict=True) if x.requires_grad}
            results |= zip(leaves, torch.autograd.grad(y, list(leaves.values()), given.dy), strict=True)
        if case.is_pooled:
            results["state"] = _states_behind(case, contestant, final, given, more).detach()
        return results
    except Exception:
        return {}


def _distances(case: Case, results: Results, wanted: Results, tokens: int | None = None) -> dict[str, float]:
    """Return the relative L2 distance of each result, of the first tokens alone where these are given."""
    distances = {}
    for name, want in wanted.items() if results else ():
        x = results[name] if tokens is None else beginning(case, name, results[name], tokens)
        wide = torch.float64 if tokens is not None else torch.float32
        distances[name] = float((x.to(wide) - want.to(wide)).norm() / want.to(wide).norm())
    return distances
