"""What mkdocs.yml cannot say: the site shows the version of the package."""

import re
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "rwkv_jit" / "kernels" / "__init__.py"


def on_config(config: Any) -> Any:
    """Add the version to the title of every page."""
    version = re.search(r'^__version__ = "(.+)"$', PACKAGE.read_text(encoding="utf-8"), re.MULTILINE)
    config.site_name = f"{config.site_name} {version[1]}"
    return config
