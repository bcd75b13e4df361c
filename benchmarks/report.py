"""The tables of `decode.py`, on stderr; every figure comes from its document."""

from typing import Any

from rich.console import Console
from rich.table import Table


def show(document: dict[str, Any]) -> None:
    """Arms, the floor, and the breakdown where it was asked for."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=130)
    console.print(_arms(document))
    console.print(_note(document), highlight=False, markup=False)
    if "breakdown" in document:
        console.print(_pieces(document["breakdown"]))


def _arms(document: dict[str, Any]) -> Table:
    names = ("arm", "ms/token", "tokens/s", "over plain", "ms/round", "round ratio")
    table = Table(*names, "acceptance", "without loops", "same ids")
    prompts = document["num_prompts"]
    plain = document["plain"]
    table.add_row("bandwidth floor", _number(document["floor_ms"]))
    table.add_row("plain", *_speed(plain), "1.00", _number(plain["ms_per_round"]), "1.00", "", "")
    for width, arm in document["widths"].items():
        table.add_row(
            f"DFlash K={width}",
            *_speed(arm),
            _number(arm["speedup"], 2),
            _number(arm["ms_per_round"]),
            _number(arm["round_ratio"], 2),
            _number(arm["acceptance_length"], 2),
            _number(arm["acceptance_length_without_loops"], 2),
            f"{arm['same_answers']} of {prompts}",
        )
    for name, arm in document["transformers"].items():
        ratio = arm["plain_speed_over_this"]
        slower = _number(1 / ratio if ratio else None, 2)
        agreed = f"{arm['same_answers']} of {prompts}"
        table.add_row(name, *_speed(arm), slower, "", "", "", "", agreed)
    return table


def _note(document: dict[str, Any]) -> str:
    torch = [
        f"{_number(arm['plain_speed_over_this'], 2)} x {name}"
        for name, arm in document["transformers"].items()
    ]
    rates = [f"{name} {rate:.1f}" for name, rate in document["bandwidth_gb_per_s"].items()]
    looping = [f"{arm['looping_tokens']} of {arm['tokens']}" for arm in document["widths"].values()]
    lines = [
        f"plain is {_number(document['plain']['floor_ratio'], 2)} x the floor"
        + "".join(f", {text}'s speed" for text in torch),
        f"streaming reads, GB/s: {', '.join(rates)}",
        f"weights read by a plain step: {document['weight_bytes'] / 1e6:.0f} MB",
        f"not in the times: {document['left_out']}",
        f"medians of {document['repeats']} repeats of {document['num_prompts']} prompts, up to "
        f"{document['max_tokens']} tokens each; sha256 {document['prompts_sha256']}",
        f"compiles while measuring: {document['compiles_in_service']}",
    ]
    if looping:
        lines.append(f"loops: {document['loop_rule']}; tokens in loops: {looping[-1]}")
    return "\n".join(lines)


def _pieces(parts: dict[str, Any]) -> Table:
    table = Table("piece, compiled alone", "ms", "share of its round")
    for title, pieces in parts.items():
        table.add_row(title, _number(pieces["whole_ms"]), "100 %", style="bold")
        for name, milliseconds in pieces["pieces_ms"].items():
            share = milliseconds / pieces["whole_ms"]
            table.add_row(f"  {name}", _number(milliseconds, 2), f"{100 * share:.0f} %")
    return table


def _speed(arm: dict[str, Any]) -> tuple[str, str]:
    return _number(arm["ms_per_token"]), _number(arm["tokens_per_second"])


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
