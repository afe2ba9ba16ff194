"""Writes options.md from the table of options: python docs/reference/make_options.py"""

from __future__ import annotations

from pathlib import Path

from vram.config import ALIASES, OPTIONS, OTHER_NAMES, VARIABLES, Option
from vram.sizes import format_size

PAGE = Path(__file__).with_name("options.md")

HEAD = """\
# Options and environment variables

This page is written by `docs/reference/make_options.py` from the table that the program itself uses.

Pass options as keywords to `vram.Pool`, `vram.configure` or `vram.MemoryManager`, or set the variable
`VRAM_CONF`, for example `VRAM_CONF=limit:20GiB,stream_cache:1000`. A keyword takes precedence over
`VRAM_CONF`, and `VRAM_CONF` over the variables that set one option each. Nested values are in brackets:
`warmup_sizes:[4KiB:50,1MiB:10]`. `vram info` shows the values in force and where they come from.

*Live* options can change while a pool is in use: `pool.reconfigure({"stream_cache": 1000})`, or
`vram.configure(stream_cache=1000)` for the pools of the manager.
"""

SCOPES = {
    "core": ("Pools", "Options of `vram.Pool`, `vram.PinnedPool` and the manager."),
    "pool": ("Stacks", "Options of `vram.Pool` and `vram.PinnedPool`."),
    "manager": ("The memory manager", "Options of `vram.configure` and `vram.MemoryManager`."),
}

OTHERS = {
    "VRAM_CONF": "any options, as `key:value,key:value`",
    "VRAM_RUNTIME_DIR": "where `vram top` finds running programs; default: `$XDG_RUNTIME_DIR/vram`",
    "VRAM_TORCH_LIBRARIES": "where `vram.torch` finds libraries that `vram torch build --output` wrote",
}


def _default(option: Option) -> str:
    value = option.default
    if value in (None, (), {}, -1) or (option.name == "limit" and value == 0):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1 << 20:
        return format_size(value).replace(" ", "")
    return str(value)


def text() -> str:
    """The whole page."""
    lines = [HEAD]
    for scope, (title, about) in SCOPES.items():
        lines += [f"## {title}\n", f"{about}\n"]
        lines += ["| option | values | default | live | what it does |", "|---|---|---|---|---|"]
        for option in OPTIONS.values():
            if option.scope == scope:
                others = [other for other, name in OTHER_NAMES.items() if name == option.name]
                names = ", also ".join(f"`{name}`" for name in (option.name, *others))
                default = "" if option.name in ALIASES else _default(option)
                live = "yes" if option.live else "no"
                lines.append(f"| {names} | {option.takes} | {default} | {live} | {option.doc} |")
        lines.append("")
    lines += ["## Environment variables\n", "| variable | what it sets |", "|---|---|"]
    lines += [f"| `{name}` | {what} |" for name, what in OTHERS.items()]
    for variable, name in VARIABLES.items():
        also = ", or the sizes themselves: `4KiB:50,1MiB:10`" if variable == "VRAM_WARMUP" else ""
        lines.append(f"| `{variable}` | the option `{name}`{also} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
