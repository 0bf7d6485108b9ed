"""What the site shows of functions whose docstrings are written as their modules are loaded: those of references."""

import inspect
from typing import Any

import griffe


class Documented(griffe.Extension):
    """Takes the docstring of a function that `documented` decorates from the function itself."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Look at a function that has been read."""
        if any("documented" in str(decorator.value) for decorator in func.decorators):
            text = inspect.getdoc(griffe.dynamic_import(func.path))
            func.docstring = text and griffe.Docstring(text, parent=func)
