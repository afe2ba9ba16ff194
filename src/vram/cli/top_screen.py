"""The full screen of `vram top`, in Textual: redraws the tables of `top_tables`.

Names from the watched process are shown as plain text, never interpreted as markup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Sparkline, Static, TabbedContent, TabPane

from vram.errors import VramError

from .console import one_line
from .top_tables import TABLES, Status, Table, device_line, heading

__all__ = ["TopScreen", "show"]

BAR = (
    ("pools", "█", "green"),
    ("libraries", "▓", "yellow"),
    ("processes", "▒", "magenta"),
    ("unknown", "▒", "red"),
)
"""The parts of a device's bar, and how each is drawn."""
BAR_WIDTH = 24


def show(look: Callable[[], Status], every: float, wanted: str) -> None:
    """Show what `look` returns, refreshed every `every` seconds, until the user quits."""
    TopScreen(look, every=every, wanted=wanted).run()


class TopScreen(App[None]):
    """Pools, streams and holders of one process and other processes, below the devices and the history."""

    TITLE = "vram top"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = f"#{TABLES[0].name}-rows"
    CSS = """
    #heading { text-style: bold; height: 1; }
    #devices { height: auto; }
    #history { height: 3; margin: 0 0 1 0; }
    #state { height: 1; color: $text-warning; }
    #wanted { display: none; }
    #wanted.open { display: block; }
    TabbedContent { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p,space", "pause", "Pause"),
        Binding("s", "sort", "Sort by next column"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "clear", "Clear filter", show=False),
        *(Binding(str(number), f"table({number - 1})", show=False) for number in range(1, len(TABLES) + 1)),
    ]

    def __init__(self, look: Callable[[], Status], *, every: float = 1.0, wanted: str = "") -> None:
        """Draw what `look` returns; `wanted` is the initial filter."""
        super().__init__()
        self._look = look
        self._every = every
        self.wanted = wanted
        self.paused = False
        self._asking = False
        self.ended = ""
        self.status: Status | None = None
        self.sorted_by = {table.name: table.sort for table in TABLES}
        self.reversed = {table.name: False for table in TABLES}

    def compose(self) -> ComposeResult:
        """Build the screen from top to bottom."""
        yield Static(id="heading")
        yield Static(id="devices")
        yield Sparkline([], id="history")
        yield Static(id="state")
        with TabbedContent():
            for table in TABLES:
                with TabPane(table.name, id=table.name):
                    yield DataTable[Text](id=f"{table.name}-rows", cursor_type="row", zebra_stripes=True)
        yield Input(placeholder="show only rows that contain…", id="wanted")
        yield Footer()

    def on_mount(self) -> None:
        """Update now, then at a fixed interval."""
        self.set_interval(self._every, self._ask)
        self._ask()

    # ---- updating -----------------------------------------------------------------------------------------

    def _ask(self) -> None:
        if not (self.paused or self.ended or self._asking):
            self._asking = True
            self._ask_aside()

    @work(thread=True, exit_on_error=False)
    def _ask_aside(self) -> None:
        """Update on another thread, one request at a time: a stopped process makes its clients wait."""
        try:
            status = self._look()
        except VramError as error:
            self.call_from_thread(self._end, str(error))
        else:
            self.call_from_thread(self._take, status)

    def _take(self, status: Status) -> None:
        self._asking = False
        self.status = status
        self.draw()

    def _end(self, why: str) -> None:
        self.ended = why
        self.draw()

    # ---- drawing ------------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Redraw everything from the last status."""
        self.query_one("#state", Static).update(Text(self._state()))
        if self.status is None:
            return
        status = self.status
        self.query_one("#heading", Static).update(Text(one_line(heading(status)), no_wrap=True))
        bars = Text("\n").join(_bar(device) for device in status["devices"])
        self.query_one("#devices", Static).update(bars)
        self.query_one("#history", Sparkline).data = [float(row[1]) for row in status["history"]]
        for table in TABLES:
            self._fill(table, status)

    def _state(self) -> str:
        words = [one_line(self.ended)] if self.ended else ["paused"] if self.paused else []
        if self.wanted:
            words.append(f"only rows with {one_line(self.wanted)!r}")
        return "; ".join(words)

    def _fill(self, table: Table, status: Status) -> None:
        widget: DataTable[Text] = self.query_one(f"#{table.name}-rows", DataTable)
        cursor, place = widget.cursor_row, widget.scroll_offset
        by, backwards = self.sorted_by[table.name], self.reversed[table.name]
        rows = table.rows(status, wanted=self.wanted, sort=by, reverse=backwards)
        widget.clear(columns=True)
        for number, title in enumerate(table.titles):
            arrow = (" ▲" if backwards else " ▼") if number == by else ""
            widget.add_column(Text(title + arrow))
        right = [title.startswith(">") for title in table.columns.split("|")]
        for row in rows:
            widget.add_row(
                *(Text(one_line(cell), justify="right" if right[i] else "left") for i, cell in enumerate(row))
            )
        if rows:
            widget.move_cursor(row=min(cursor, len(rows) - 1), animate=False, scroll=False)
            widget.scroll_to(place.x, place.y, animate=False)

    # ---- keys ---------------------------------------------------------------------------------------------

    @property
    def _shown(self) -> str:
        return self.query_one(TabbedContent).active

    def action_pause(self) -> None:
        """Pause or resume updates."""
        self.paused = not self.paused
        self.draw()
        self._ask()

    def action_sort(self) -> None:
        """Sort the visible table by its next column."""
        table = next(each for each in TABLES if each.name == self._shown)
        self.sorted_by[table.name] = (self.sorted_by[table.name] + 1) % len(table.titles)
        self.draw()

    def action_reverse(self) -> None:
        """Reverse the order of the visible table."""
        self.reversed[self._shown] = not self.reversed[self._shown]
        self.draw()

    def action_table(self, number: int) -> None:
        """Switch to another table."""
        self.query_one(TabbedContent).active = TABLES[number].name

    def action_filter(self) -> None:
        """Open the filter field."""
        field = self.query_one("#wanted", Input)
        field.add_class("open")
        field.value = self.wanted
        field.focus()

    def action_clear(self) -> None:
        """Clear the filter."""
        self.query_one("#wanted", Input).value = ""
        self.wanted = ""
        self._close_field()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self.wanted = event.value
        self.draw()

    def on_input_submitted(self) -> None:
        """Keep the filter and return the focus to the tables."""
        self._close_field()

    def _close_field(self) -> None:
        self.query_one("#wanted", Input).remove_class("open")
        self.query_one(f"#{self._shown}-rows", DataTable).focus()
        self.draw()


def _bar(device: Status) -> Text:
    """Draw a device's memory as a bar followed by text. Each part gets its rounded share of the cells."""
    total = max(1, device["total"])
    bar = Text()
    for part, letter, colour in BAR:
        bar.append(letter * round(BAR_WIDTH * device[part] / total), style=colour)
    bar.truncate(BAR_WIDTH)
    bar.append("░" * (BAR_WIDTH - len(bar)), style="dim")
    return bar + Text(" " + one_line(device_line(device)))
