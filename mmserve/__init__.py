"""mmserve: documents in, answers with page citations out, through our own inference engine."""

from importlib.metadata import version

__version__ = version("mmserve")
