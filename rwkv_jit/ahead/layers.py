"""Which kernels the small work of a layer will need: requests, before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

from rwkv_jit.kernels import kernel
from rwkv_jit.schedules import layer_gradients, loss
from rwkv_jit.schedules import layers as steps
from rwkv_jit.schedules.layer_gradients import Options
from rwkv_jit.schedules.layers import Given, Sequences
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Result, Schedule


class _Layer(NamedTuple):
    """What a layer of a family calls."""

    shifts: tuple[tuple[int, bool], ...]  # the mixes of each `token_shift`, and whether tokens have amounts
    norms: tuple[tuple[int, bool], ...]  # the mixes of each `norm_shift`, and whether something is added
    steps: tuple[tuple[int, bool], ...]  # the mixes of each `shift_mix` of an update, and whether something is added
    gate: str  # of `gated_norm`, which has the bonus in RWKV-7 alone


LAYERS = {
    "wkv5": _Layer(((4, False), (2, False)), (), ((4, False), (2, True)), "silu"),
    "wkv6": _Layer(((1, False), (5, True), (2, False)), (), ((3, False), (2, True)), "silu"),
    "wkv7": _Layer((), ((6, False), (1, True)), ((6, False), (6, True), (1, True)), "identity"),
}
_BIAS_PAIRS: tuple[tuple[str, ...], ...] = ((), ("a0", "v0"))  # what may be absent
_COUNTS = (1, 2, 4, 8)  # of elements, by which neighbours that a thread takes at once differ
_COLUMNS = tuple(1 << power for power in range(7, 13))  # of logits, by which threads differ


def requests(p: Problem, width: int, w_type: str, direction: str) -> list[kernel.Request]:
    """Return the kernels of a layer of `width` channels in one direction, or in updates over a pool.

    Those of both directions are of training, with the loss; those of updates are of decode and of prompts.
    """
    made: list[Schedule] = []
    for parameters in dict.fromkeys((p.types["v"], "fp32")):
        calls = _Calls(p, width, parameters)
        if direction == "update":
            made += calls.updates(w_type)
        elif direction == "forward":
            made += calls.forwards()
        else:
            made += calls.backwards()
    if direction != "update":
        made += _losses(p, direction)
    return [request for each in made for request in each.requests(p.gpu)]


class _Calls(NamedTuple):
    """The calls of a layer whose parameters have one type."""

    p: Problem
    width: int
    parameters: str

    @property
    def layer(self) -> _Layer:
        return LAYERS[self.p.op.name]

    @property
    def is_rwkv7(self) -> bool:
        return self.p.op.name == "wkv7"

    @property
    def heads(self) -> tuple[int, int]:
        """How many there are, by which threads of few differ, and their size."""
        return max(self.width // self.p.K, 1), self.p.K

    def given(self, op: str, sizes: tuple[int, ...], without: Iterable[str] = (), **more: str) -> Given:
        """Return what the steps of a call go by, which lacks some inputs, or has others of these types."""
        own, entry, left_out = self.p.types["v"], steps.OPS[op], set(without)
        types = {x: self.parameters if x in entry.wide else own for x in entry.inputs if x not in left_out}
        if "mixes" in types and not self.is_rwkv7:  # whose modules give them in float32
            types["mixes"] = "fp32"
        return Given(self.p.gpu, types | more, 1, sizes)

    def shifts(self) -> list[tuple[Given, Sequences]]:
        """Return the calls of `token_shift`: alone or behind a part that came before, packed or not."""
        return [
            (
                self.given("token_shift", (self.width, mixes), _absent(amounts=has_amounts, first=has_first)),
                Sequences(1, bound_bytes=bound_bytes),
            )
            for (mixes, has_amounts), has_first, bound_bytes in product(self.layer.shifts, (False, True), (0, 4, 8))
        ]

    def norms(self) -> list[tuple[Given, Sequences]]:
        """Return the calls of `norm_shift`, whose residual is as wide as parameters are."""
        several = product(self.layer.norms, (False, True), (0, 4, 8))
        return [
            (
                self.given(
                    "norm_shift", (self.width, mixes), _absent(add=has_add, first=has_first), x=self.parameters
                )._replace(results={"mixed0": Result((1,), self.p.types["v"])}),
                Sequences(1, bound_bytes=bound_bytes),
            )
            for (mixes, has_add), has_first, bound_bytes in several
        ]  # fmt: skip

    def keys(self) -> list[Given]:
        """Return the calls of `prepare_keys`: of the first layer, and of others."""
        if not self.is_rwkv7:
            return []
        sizes, own = self.heads, self.p.types["v"]
        first = self.given("prepare_keys", sizes, ("v_first", "v_gate", "v0"), rate=own)
        return [first, self.given("prepare_keys", sizes, rate=own, v_gate=own)]

    def norm(self, is_update: bool = False) -> Given:
        """Return the call of `gated_norm`: RWKV-7 makes its bonus there in updates, and with the keys in training."""
        if not self.is_rwkv7:
            return self.given("gated_norm", self.heads, ("r", "k", "v", "r_k", "bonus"))
        return self.given("gated_norm", self.heads, ("bonus",) if is_update else ("r", "k", "v", "r_k"))

    def elements(self) -> list[Given]:
        """Return the calls of `gated`, which RWKV-7 has not."""
        return [] if self.is_rwkv7 else [self.given("gated", (self.width * count,)) for count in _COUNTS]

    def activations(self) -> list[Given]:
        """Return the calls of `activate`."""
        return [self.given("activate", (count,)) for count in _COUNTS]

    def forwards(self) -> list[Schedule]:
        """Return the schedules of the forward."""
        return [
            *(steps.token_shift(*each) for each in self.shifts()),
            *(steps.norm_shift(*each, 0.0) for each in self.norms()),
            *(steps.prepare_keys(each, "sigmoid") for each in self.keys()),
            *self.behind(self.norm()),
        ]

    def behind(self, norm: Given) -> list[Schedule]:
        """Return the schedules of what stands behind the recurrence and between matrices, in decode too."""
        return [
            steps.gated_norm(norm, 0.0, self.layer.gate, "layer"),
            *(steps.gated(each, "sigmoid") for each in self.elements()),
            *(steps.activate(each, ("identity",), False) for each in self.activations()),
        ]

    def backwards(self) -> list[Schedule]:
        """Return the schedules of the backward, for all gradients."""
        norm = Options(kinds=(self.layer.gate, "layer"))
        several: list[tuple[str, Given, Options]] = [
            *(("token_shift", each, Options(texts=texts)) for each, texts in self.shifts()),
            *(("norm_shift", each, Options(texts=texts)) for each, texts in self.norms()),
            *(("prepare_keys", each, Options(kinds=("sigmoid",))) for each in self.keys()),
            ("gated_norm", self.norm(), norm),
            *(("gated", each, Options(kinds=("sigmoid",))) for each in self.elements()),
            *(("activate", each, Options(kinds=("identity",))) for each in self.activations()),
        ]
        return [self._backward(*each) for each in several]

    def _backward(self, op: str, given: Given, options: Options) -> Schedule:
        results = {f"d{x}": Result((1,), given.types[x]) for x in steps.OPS[op].inputs if x in given.types}
        grads = dict.fromkeys((f"grad_{x}" for x in self._made(op, given)), self.p.types["v"])
        if op == "norm_shift":
            grads["grad_residual"] = given.types["x"]
        given = given._replace(types={**given.types, **grads}, results=results)
        return layer_gradients.backward(op, given, options, [*steps.OPS[op].inputs])

    def _made(self, op: str, given: Given) -> Sequence[str]:
        """Return what a call makes."""
        names = [*layer_gradients.RESULTS[op]]
        if op in steps.SHIFTS:
            begin = names.index("mixed0")
            return names[: begin + given.sizes[1]] + names[begin + steps.MOST_MIXES :]
        return [x for x in names if x != "new_v" or "v_first" in given.types]

    def updates(self, w_type: str) -> list[Schedule]:
        """Return the schedules of decode and of prompts, over a pool."""
        own = self.p.types["v"]
        several = [
            steps.shift_mix(
                self.given("shift_mix", (self.width, mixes), _absent(add=has_add), shift=kept), sequences, 0.0
            )
            for (mixes, has_add), kept, sequences in product(
                self.layer.steps, dict.fromkeys((own, self.p.state_type)),
                (Sequences(1), Sequences(1, 2), Sequences(1, bound_bytes=4), Sequences(1, bound_bytes=8)),
            )
        ]  # fmt: skip
        several += self.behind(self.norm(is_update=True))
        several += [  # of RWKV-6, behind what `shift_mix` makes
            steps.token_shift(given, texts)
            for given, texts in self.shifts()
            if {"amounts", "first"} <= given.types.keys() and not texts.bound_bytes
        ]
        if not self.is_rwkv7:
            return several
        return several + [
            steps.prepare_keys(
                self.given("prepare_keys", self.heads, (*first, *biases, "r", "r_k"), **gates), "sigmoid"
            )
            for first, gates in (
                (("v_first", "v_gate", "v0"), {"rate": w_type}),
                ((), {"rate": w_type, "v_gate": w_type}),
            )
            for biases in _BIAS_PAIRS
        ]


def _absent(**has: bool) -> list[str]:
    return [name for name, is_there in has.items() if not is_there]


def _losses(p: Problem, direction: str) -> list[Schedule]:
    """Return the schedules of the loss: of any vocabulary, with a pull on the largest logit and without."""
    several: list[Any] = [
        loss.Given(p.gpu, p.types["v"], 1, columns, target_bytes, l2_wrap=l2_wrap)
        for columns, target_bytes, l2_wrap in product(_COLUMNS, (4, 8), (0.0, 1.0))
    ]
    return [loss.forward(each) if direction == "forward" else loss.backward(each, True) for each in several]
