"""What the processes of this tier start with: CuPy cannot be imported, as on a machine that does not have it."""

import sys


class NoCupy:
    """Finds no CuPy, and no other finder is asked."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("cupy", "cupy_backends"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoCupy)
