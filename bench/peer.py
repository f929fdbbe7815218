"""NVIDIA Dynamo 1.6.1's multi-stage omni mode with a no-op engine, measured on another run of such a two-core machine.

Its own router, stage workers, runtime and HTTP front end, and vLLM-Omni's shared-memory connector. Against a raw hop of
0.105 ms, a copy of 16 MiB of 3 ms and a stock chain of about 100 requests/s: compare ratios, not times.
"""

from __future__ import annotations

KIB, MIB = 1 << 10, 1 << 20

#: By path, stages and bytes per hop: p50 and p99 in ms of 1 client; requests/s and p99 of 16; of 64.
_MEASURED = {
    ("Python", 1, KIB): ((2.5, 7.3), (973, 25), (1211, 82)),
    ("Python", 2, KIB): ((4.0, 9.3), (559, 45), (570, 224)),
    ("Python", 3, KIB): ((6.0, 11.0), (391, 56), (457, 220)),
    ("Python", 3, MIB): ((15.0, 21.0), (121, 164), (134, 573)),
    ("Python", 3, 16 * MIB): ((150, 154), (10, 1613), (6, 10315)),
    ("HTTP", 1, KIB): ((2.8, 8.0), (894, 25), (842, 122)),
    ("HTTP", 2, KIB): ((4.8, 10.3), (485, 49), (598, 170)),
    ("HTTP", 3, KIB): ((6.5, 12.0), (357, 62), (395, 221)),
}


def beside(path: str, stages: int, payload: int, clients: int) -> str:
    """Its figures of the same cell, as text; empty where there are none. Its router stands for our Python path."""
    found = _MEASURED.get((path, stages, payload))
    if found is None:
        return ""
    first, p99 = found[{1: 0, 16: 1, 64: 2}[clients]]
    return f"p50 {first:g}, p99 {p99:g}" if clients == 1 else f"{first:g}/s, p99 {p99:g}"
