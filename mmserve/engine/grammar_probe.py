"""Compiles one grammar of llguidance, read from standard input, within bounds of memory and time; the exit code tells.

A program of its own, since nothing inside a process can end a compilation that has begun: the intersection of a few
patterns may take 2 to the power of their length.
"""

import resource
import sys

MAX_SECONDS = 3
MAX_BYTES = 1024**3


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import llguidance

    # What a grammar allows and what it costs to find out hardly depend on the tokens.
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), sys.stdin.read(), log_level=0)
    matcher.compute_bitmask()


if __name__ == "__main__":
    main()
