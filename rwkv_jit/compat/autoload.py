"""What the environment asks for: a line that wheels put beside the package imports this when Python begins.

So RWKVJIT_FLA=1 needs no line in a program. Neither torch nor FLA is imported.
"""

from __future__ import annotations

from rwkv_jit import env
from rwkv_jit.compat import fla

if env.runs_fla():
    fla.install()
