"""Public data sets, one module each: `DATA_SET` describes it, the module's name is the task's."""

import pkgutil


def data_set_names() -> tuple[str, ...]:
    """The names of the public data sets, sorted."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in modules if not name.startswith("_")))
