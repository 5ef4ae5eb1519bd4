"""Write tests/vectors/noise.json: what the engine's noise must be, from Python integers alone.

Shares no code with mlx_worker, so that the two can be wrong only independently. Run from the
repository root: python scripts/make_noise_vectors.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path

MASK = 0xFFFFFFFF
STREAMS = ("choose", "draft", "residual", "accept")

# Known answers published with Random123 (kat_vectors, threefry2x32 20).
PUBLISHED = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]
SEEDS = (0, 1, -1, 42, 2**32, 2**63 + 5, -(2**63))
EDGE_BITS = (0, 1, 2, 255, 2**23 - 1, 2**23, 2**24 + 1, 2**31, 2**32 - 2**28, 2**32 - 2**20)


def rotated(word: int, turn: int) -> int:
    return ((word << turn) | (word >> (32 - turn))) & MASK


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32, 20 rounds, written from the paper's table of rotations."""
    schedule = (key[0], key[1], 0x1BD11BDA ^ key[0] ^ key[1])
    turns = (13, 15, 26, 6, 17, 29, 16, 24)
    x, y = (counter[0] + schedule[0]) & MASK, (counter[1] + schedule[1]) & MASK
    for i in range(20):
        x = (x + y) & MASK
        y = rotated(y, turns[i % 8]) ^ x
        if i % 4 == 3:
            block = i // 4 + 1
            x = (x + schedule[block % 3]) & MASK
            y = (y + schedule[(block + 1) % 3] + block) & MASK
    return x, y


def hashed(key: tuple[int, int]) -> tuple[int, int]:
    return threefry(key, (0, 1))


def mixed(key: tuple[int, int], data: int) -> tuple[int, int]:
    return hashed((key[0], (key[1] + data) & MASK))


def stream_key(seed: int, choice: int, stream: str) -> tuple[int, int]:
    seed %= 2**64
    root = hashed((seed & MASK, seed >> 32))
    return mixed(mixed(root, choice), STREAMS.index(stream))


def gumbel(bits: int) -> float:
    return -math.log(-math.log1p(-(bits + 0.5) / 2**32))


def main() -> None:
    for key, counter, words in PUBLISHED:
        assert threefry(key, counter) == words
    keys = [
        {"seed": s, "choice": c, "stream": n, "key": stream_key(s, c, n)}
        for s in SEEDS
        for c in (0, 7)
        for n in STREAMS
    ]
    noise = []
    for seed in SEEDS:
        key = stream_key(seed, 0, "choose")
        for position in (0, 1, 131_071):
            for i in (0, 1, 4_095, 262_143):
                bits = mixed(mixed(key, position), i)[0]
                noise.append({"seed": seed, "position": position, "id": i, "gumbel": gumbel(bits)})
    vectors = {
        "hash": [{"key": key, "words": hashed(key)} for key, _, _ in PUBLISHED],
        "keys": keys,
        "gumbel": [{"bits": b, "gumbel": gumbel(b)} for b in EDGE_BITS],
        "noise": noise,
    }
    lines = [
        f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        for name, rows in vectors.items()
    ]
    Path("tests/vectors/noise.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
