"""How fast the ops are beside other libraries, what the service costs, and how kernels became fast.

Run from a checkout, by `python -m bench`. No wheel has it. It measures with `inputs` and `figures` of `rwkv_jit.desk`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the checkout
