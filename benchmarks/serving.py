"""The server under clients: how much faster many at once are, and a soak of mixed requests.

Starts `dflash-jax serve` as a user does and talks to it over HTTP. Needs httpx, which no extra
brings (`pip install httpx`). Run from the repository:

    python benchmarks/serving.py throughput          # plain, DFlash, adaptive; 1 client and 16
    python benchmarks/serving.py soak --requests 500 # mixed requests, clients that vanish
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from decode import PROMPTS
from measure import total_of

CLIENTS = 16
_START = "import sys; from dflash_jax.cli.main import main; sys.exit(main())"


class Server(NamedTuple):
    """A running server: its address, its process, and seconds from start to ready."""

    url: str
    process: subprocess.Popen[bytes]
    started: float


@contextlib.contextmanager
def serving(target: str, *options: str) -> Iterator[Server]:
    """`dflash-jax serve` on a free port until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", _START, "serve", target, "--port", str(port), *options]
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}: {command}")
            time.sleep(0.2)
        yield Server(url, process, time.perf_counter() - begun)
    finally:
        process.terminate()
        process.wait(60)


def metrics(server: Server) -> dict[str, float]:
    """Every number of /metrics by its name and labels."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def resident_bytes(server: Server) -> int:
    """Memory of the server's process (Linux)."""
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell a process's memory")


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> int:
    """One greedy chat; the tokens that came back."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer.json()["usage"]["completion_tokens"]


async def _all(url: str, prompts: Sequence[str], clients: int, max_tokens: int) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        begun = time.perf_counter()
        tokens = await total_of(lambda prompt: ask(client, prompt, max_tokens), prompts, clients)
        seconds = time.perf_counter() - begun
    return {
        "requests_per_second": len(prompts) / seconds,
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
    }


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Requests and tokens a second: one client at a time against many, plain and drafted.

    The order is turned round in every repetition; the medians are reported.
    """
    found: dict[str, Any] = {"clients": args.clients, "max_tokens": args.max_tokens, "arms": {}}
    # Each prompt comes several times and is made unlike the others at its first word: no reuse.
    prompts = [f"{number}. {PROMPTS[number % len(PROMPTS)]}" for number in range(args.requests)]
    width = ["--max-draft-len", str(args.max_draft_len)] if args.max_draft_len else []
    arms = {
        "plain": ["--speculation", "none"],
        "DFlash": width,
        "DFlash, adaptive": ["--adaptive", *width],
    }
    for name in args.arms or arms:
        options = [*arms[name], "--max-seq-len", "512", "--max-batch-size", str(args.clients)]
        with serving(args.target, *options) as server:
            taken: dict[int, list[dict[str, float]]] = {1: [], args.clients: []}
            for turn in range(args.repeats):
                order = [1, args.clients] if turn % 2 else [args.clients, 1]
                for clients in order:
                    few = prompts[: max(4, len(prompts) // 4)] if clients == 1 else prompts
                    run = _all(server.url, few, clients, args.max_tokens)
                    taken[clients].append(asyncio.run(run))
            counts = metrics(server)
        arm: dict[str, Any] = {"start_seconds": server.started}
        for clients, runs in taken.items():
            middle = sorted(runs, key=lambda run: run["tokens_per_second"])[len(runs) // 2]
            arm[f"{clients} at a time"] = middle
        many, one = arm[f"{args.clients} at a time"], arm["1 at a time"]
        arm["ratio"] = many["tokens_per_second"] / one["tokens_per_second"]
        arm["acceptance_length"] = counts["dflash_acceptance_length"]
        arm["compiles_in_service"] = counts["dflash_compiles_in_service"]
        found["arms"][name] = arm
    return found


def _mixed(rng: random.Random) -> dict[str, Any]:
    """A request of any kind."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": " ".join(rng.choices("abcdefgh", k=30))}],
        "max_tokens": rng.randint(1, 24),
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        body["messages"].insert(
            0, {"role": "system", "content": "You are a helpful assistant. " * 4}
        )
    for name, values in (
        ("temperature", (0, 0.7, 1.3)),
        ("top_p", (0.5, 0.9, 1)),
        ("top_k", (0, 1, 20)),
        ("n", (1, 1, 2)),
        ("seed", (1, 2)),
        ("stop", ("e", ["zz", "."])),
        ("presence_penalty", (-1, 1)),
        ("speculate", (True, False)),
    ):
        if rng.random() < 0.3:
            body[name] = rng.choice(values)
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    return body


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[str, None]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            yield line


async def _soak(url: str, requests: int, clients: int, seed: int) -> dict[str, int]:
    rng, counts = random.Random(seed), {"answered": 0, "vanished": 0, "errors": 0}
    left = list(range(requests))

    async def one(client: httpx.AsyncClient) -> str:
        body, vanishes = _mixed(rng), rng.random() < 0.2
        if body["stream"]:
            lines = 0
            async with contextlib.aclosing(_stream(client, body)) as stream:
                async for line in stream:
                    lines += 1
                    if vanishes and lines > 3:
                        return "vanished"
                    if '"error"' in line:
                        return "errors"
            return "answered"
        if vanishes:
            with contextlib.suppress(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json=body, timeout=0.05)
            return "vanished"
        answer = await client.post("/v1/chat/completions", json=body)
        return "answered" if answer.status_code == 200 else "errors"

    async def work() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            while left:
                left.pop()
                counts[await one(client)] += 1

    await asyncio.gather(*(work() for _ in range(clients)))
    return counts


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Mixed requests from many clients, a fifth of which vanish; what is left afterwards."""
    options = ["--max-seq-len", "512", "--max-batch-size", str(args.slots)]
    options += [] if args.drafter is None else ["--drafter", args.drafter]
    with serving(args.target, *options) as server:
        asyncio.run(_soak(server.url, args.requests // 5, args.clients, seed=0))
        before = resident_bytes(server)
        begun = time.perf_counter()
        counts = asyncio.run(_soak(server.url, args.requests, args.clients, seed=1))
        seconds = time.perf_counter() - begun
        end = time.monotonic() + 60
        while (found := metrics(server))["dflash_slots_busy"] and time.monotonic() < end:
            time.sleep(0.1)
        return {
            **counts,
            "seconds": seconds,
            "start_seconds": server.started,
            "compiles_in_service": found["dflash_compiles_in_service"],
            "slots_busy": found["dflash_slots_busy"],
            "queue_waiting": found["dflash_queue_waiting"],
            "prefix_hits": found["dflash_prefix_hits_total"],
            "memory_before": before,
            "memory_after": resident_bytes(server),
        }


def main() -> None:
    """Runs one of the two and prints one JSON document."""
    parser = argparse.ArgumentParser(description="The server under clients.")
    parser.add_argument("kind", choices=("throughput", "soak"))
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", help="of the soak; demo brings its own")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-draft-len", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", nargs="*", help="of throughput; default: all")
    args = parser.parse_args()
    print(json.dumps((throughput if args.kind == "throughput" else soak)(args), indent=2))


if __name__ == "__main__":
    main()
