// Timeline: the chart, its controls, and a line that describes what the pointer is over.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Band } from "./answers";
import { Chart, LINES, type Line, type Split } from "./chart";
import { count, size, time } from "./format";
import { Choice, useSize, useTheme } from "./parts";
import { type Axis, chooseAt, current, extent, message, stackOf, update, useStore } from "./state";

const SPLITS: readonly (readonly [Split, string])[] = [
  ["allocations", "single allocations"], ["stream", "stream"], ["tag", "tag"], ["module", "module"], ["line", "line"],
  ["none", "nothing"],
];

export function Timeline() {
  const state = useStore();
  const { about, axis, file } = state;
  const theme = useTheme();
  const [box, width, height] = useSize<HTMLDivElement>();
  const [split, setSplit] = useState<Split>("allocations");
  const [lines, setLines] = useState<readonly Line[]>(["reserved", "allocated", "pending"]);
  const chart = useRef<Chart | null>(null);
  const readout = useRef<HTMLDivElement>(null);
  const host = useRef<HTMLDivElement>(null);

  useEffect(() => {
    if (!about || !host.current || width < 40 || height < 40) return;
    const { low, high } = current();
    chart.current = new Chart(host.current, about, { file, axis, split, lines }, width, height, [low, high], {
      onStretch: (from, to) => update({ low: from, high: to }),
      onMoment: (x, band) => {
        update({ stack: band ? band.stack : null });
        void chooseAt(x);
      },
      onHover: (x, values, band, group) => {
        if (readout.current) readout.current.textContent = x === null ? HELP : told(axis, x, values, band, group);
      },
      onError: (error) => update({ error: message(error) }),
    });
    mark();
    return () => {
      const ended = chart.current;
      chart.current = null;
      // A chart of another size shows the same range; one for another axis or file starts again.
      const same = current().about === about && current().file === file && current().axis === axis;
      if (ended?.destroy() && same) update({ low: ended.low, high: ended.high });
    };
  }, [about, file, axis, split, lines, width, height, theme]);

  const mark = (): void => {
    const { moment, stack, stream } = current();
    const at = current().axis === "time" ? (moment?.what?.time_us ?? null) : current().event;
    chart.current?.mark(at, stack, stream);
  };
  useEffect(mark, [state.event, state.moment, state.stack, state.stream]);

  useEffect(() => {
    const { low, high } = current(); // the last drawing may be older than what the chart has reported since
    chart.current?.follow(low, high);
  }, [state.low, state.high]);

  if (!about) return null;
  const setAxis = (next: Axis): void => update({ axis: next, low: 0, high: extent(about, next) });
  return (
    <section class="view timeline" aria-label="Timeline">
      <div class="tools">
        <Choice label="Over" value={axis} onChange={setAxis}
          options={about.timed ? [["time", "time"], ["event", "events"]] as const : [["event", "events"]] as const} />
        <Choice label="Bands" value={split} options={SPLITS} onChange={setSplit} />
        <fieldset class="toggles">
          <legend class="hidden">Lines</legend>
          {LINES.filter((name) => name in about.most).map((name) => (
            <label key={name} class={`toggle ${name}`}>
              <input type="checkbox" checked={lines.includes(name)}
                onChange={() => setLines(lines.includes(name) ? lines.filter((each) => each !== name) : [...lines, name])} />
              <i class={`stroke ${name}`} />{name}
            </label>
          ))}
        </fieldset>
        <span class="spread" />
        <button type="button" onClick={() => chart.current?.zoom(0.5)} title="Zoom in (W)" aria-label="Zoom in">+</button>
        <button type="button" onClick={() => chart.current?.zoom(2)} title="Zoom out (S)" aria-label="Zoom out">−</button>
        <button type="button" onClick={() => chart.current?.whole()} title="Show the whole run (0)">Whole run</button>
      </div>
      <div class="readout" ref={readout} aria-live="off">{HELP}</div>
      <div class="chart" ref={box} tabIndex={0} role="application" aria-label="Memory over time"
        onKeyDown={(event) => onKey(event, chart.current)}>
        <div ref={host} class="plot" />
      </div>
    </section>
  );
}

const HELP = "Drag to zoom, wheel to zoom, shift-drag to pan, click to select a moment. Keys: W S zoom, A D pan, 0 whole run, ← → step.";

function onKey(event: KeyboardEvent, chart: Chart | null): void {
  if (!chart || event.ctrlKey || event.metaKey || event.altKey) return;
  const actions: Record<string, () => void> = {
    a: () => chart.pan(-0.2), d: () => chart.pan(0.2), w: () => chart.zoom(0.7), s: () => chart.zoom(1 / 0.7),
    "+": () => chart.zoom(0.7), "-": () => chart.zoom(1 / 0.7), "0": () => chart.whole(), Home: () => chart.whole(),
  };
  const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function told(axis: Axis, x: number, values: Partial<Record<Line, number>>, band: Band | null, group: string): string {
  const parts = [axis === "time" ? time(x) : `event ${count(Math.floor(x))}`];
  for (const name of LINES) {
    const value = values[name];
    if (value !== undefined) parts.push(`${name} ${size(value)}`);
  }
  if (band) {
    const until = band.freed < (current().about?.events ?? 0) ? `event ${count(band.freed)}` : "the end";
    parts.push(`${size(band.size)} from ${band.start < 0 ? "before the recording" : `event ${count(band.start)}`} to ${until}`);
    parts.push(stackOf(band.stack)?.label ?? "");
  } else if (group) parts.push(group);
  return parts.filter(Boolean).join("   ·   ");
}
