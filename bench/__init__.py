"""How fast the ops are beside other libraries, what the service costs, and how kernels became fast.

Run from a checkout, by `python -m bench`. No wheel has it. What it measures with is `rwkv_jit.desk.bench`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the checkout
