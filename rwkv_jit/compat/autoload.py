"""What the environment asks for: a line that wheels put beside the package imports this when Python begins.

So RWKVJIT_FLA=1 and RWKVJIT_COMPAT=1 need no line in a program. Neither torch nor FLA is imported.
"""

from __future__ import annotations

from rwkv_jit import compat, env
from rwkv_jit.compat import fla

if env.runs_fla():
    fla.install()
if env.runs_compat():
    compat.install()
