"""The fewest bytes that a call can move, and how long they take at the speed of a copy."""

from __future__ import annotations

from rwkv_jit.bench.cases import Case, names_of


def least_bytes(case: Case) -> int:
    """Return the fewest bytes through memory: every input is read once in a pass, every result written once.

    With I the bytes of the inputs, Y those of y, which are those of its gradient, and S those of the state in float32:

        forward I + Y;   backward I + Y + I;   forward+backward both;   prefill I + Y + S;   decode I + Y + 2 S

    The backward reads the inputs again, as the gradient of y comes after the whole forward. What a kernel keeps between
    the passes, or between its own parts, is not counted: an algorithm could do without it.

    Parameters
    ----------
    case : Case
        The call.

    Returns
    -------
    int
    """
    inputs, output, state = _sizes(case)
    forward, backward = inputs + output, inputs + output + inputs
    return {
        "forward": forward,
        "backward": backward,
        "forward+backward": forward + backward,
        "prefill": forward + state,
        "decode": forward + 2 * state,
    }[case.phase]


def _sizes(case: Case) -> tuple[int, int, int]:
    """Return the bytes of the inputs, of y and of the state."""
    batch, tokens, heads, head_size, value_size = case.shape
    keys, values, item = batch * tokens * heads * head_size, batch * tokens * heads * value_size, case.dtype.itemsize
    channels = heads * head_size
    if case.op == "wkv4":
        return item * (2 * channels + 2 * keys), item * keys, 4 * 3 * batch * channels
    if case.op == "timex":
        return item * (channels * tokens + keys), item * keys, 0
    inputs = 0
    for name in names_of(case.op):
        elements = {"v": values, "u": channels}.get(name, channels if (case.op, name) == ("wkv5", "w") else keys)
        inputs += elements * (4 if case.wide_decay and name in ("w", "g") else item)
    return inputs, item * values, 4 * batch * heads * head_size * value_size


def floor_ms(case: Case, copy_tb_per_s: float) -> float:
    """Return the milliseconds of the fewest bytes at the bandwidth of a copy, in terabytes (10^12) a second."""
    return least_bytes(case) / copy_tb_per_s * 1e-9
