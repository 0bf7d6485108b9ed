"""`python -m rwkv_jit` is the program `rwkv-jit`."""

import sys

from rwkv_jit.desk.cli import main

sys.exit(main())
