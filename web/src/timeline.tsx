// Timeline: the chart, its controls, the legend of its bands, and a tooltip at the pointer.

import { useEffect, useRef, useState } from "preact/hooks";
import { Chart, type LegendEntry, type Pointed } from "./chart";
import { count, functionFirst, size, time } from "./format";
import { Choice, useSize, useTheme } from "./parts";
import {
  type Axis, LINES, type Line, type Split, chooseAt, current, extent, message, stackOf, update, useStore,
} from "./state";

const NAMES: readonly (readonly [Split, string])[] = [
  ["allocations", "single allocations"], ["stream", "stream"], ["tag", "tag"], ["module", "module"], ["line", "line"],
  ["none", "nothing"],
];

export function Timeline() {
  const state = useStore();
  const { about, axis, file, split, lines } = state;
  const theme = useTheme();
  const [box, width, height] = useSize<HTMLDivElement>();
  const [entries, setEntries] = useState<LegendEntry[]>([]);
  const chart = useRef<Chart | null>(null);
  const tip = useRef<HTMLDivElement>(null);
  const host = useRef<HTMLDivElement>(null);

  useEffect(() => {
    if (!about || !host.current || width < 40 || height < 40) return;
    const { low, high } = current();
    chart.current = new Chart(host.current, about, { file, axis, split, lines }, width, height, [low, high], {
      onStretch: (from, to, entry) => update({ low: from, high: to }, entry),
      onMoment: (x, band, group) => {
        const named = split === "stream" ? { stream: group.replace(/^stream /, "") || null } : { group: group || null };
        update(band ? { stack: band.stack } : { stack: null, ...named }, "join");
        void chooseAt(x);
      },
      onHover: (pointed) => tip.current && showTip(tip.current, pointed, axis, width, height),
      onDetail: () => setEntries(chart.current?.legend() ?? []),
      onError: (error) => update({ error: message(error) }, "join"),
    });
    mark();
    return () => {
      const ended = chart.current;
      chart.current = null;
      // A chart of another size shows the same range; one for another axis or file starts again.
      const same = current().about === about && current().file === file && current().axis === axis;
      if (ended?.destroy() && same) update({ low: ended.low, high: ended.high }, "join");
    };
  }, [about, file, axis, split, lines, width, height, theme]);

  const mark = (): void => {
    const { moment, stack, stream, group, stacks } = current();
    const at = current().axis === "time" ? (moment?.what?.time_us ?? null) : current().event;
    chart.current?.mark(at, stack, stream, group, stacks);
    if (chart.current?.ready) setEntries(chart.current.legend());
  };
  useEffect(mark, [state.event, state.moment, state.stack, state.stream, state.group, state.stacks, state.low, state.high]);

  useEffect(() => {
    const { low, high } = current(); // the last drawing may be older than what the chart has reported since
    chart.current?.follow(low, high);
  }, [state.low, state.high]);

  if (!about) return null;
  const setAxis = (next: Axis): void => update({ axis: next, low: 0, high: extent(about, next) });
  const toggle = (name: Line): void => update({ lines: LINES.filter((each) => lines.includes(each) !== (each === name)) });
  return (
    <section class="view timeline" aria-label="Timeline">
      <div class="tools">
        <Choice label="Over" value={axis} onChange={setAxis}
          options={about.timed ? [["time", "time"], ["event", "events"]] as const : [["event", "events"]] as const} />
        <Choice label="Bands" value={split} options={NAMES} onChange={(next) => update({ split: next, group: null })} />
        <fieldset class="toggles">
          <legend class="hidden">Lines</legend>
          {LINES.filter((name) => name in about.most).map((name) => (
            <label key={name} class={`toggle ${name}`}>
              <input type="checkbox" checked={lines.includes(name)} onChange={() => toggle(name)} />
              <i class={`stroke ${name}`} />{name}
            </label>
          ))}
        </fieldset>
        <span class="spread" />
        <span class="group">
        <button type="button" onClick={() => chart.current?.zoom(0.5)} title="Zoom in (W)" aria-label="Zoom in">+</button>
        <button type="button" onClick={() => chart.current?.zoom(2)} title="Zoom out (S)" aria-label="Zoom out">−</button>
        <button type="button" onClick={() => chart.current?.whole()} title="Show the whole run (0)">Whole run</button>
        </span>
      </div>
      <div class="chart" ref={box} tabIndex={0} role="application" aria-label="Memory over time"
        onKeyDown={(event) => onKey(event, chart.current)}>
        <div ref={host} class="plot" />
        <div ref={tip} class="tip" hidden />
      </div>
      {split !== "none" && <Legend entries={entries} split={split} />}
    </section>
  );
}

/** What the colors of the bands mean. An entry selects its stack, its stream or its group. */
function Legend(props: { entries: LegendEntry[]; split: Split }) {
  const { stack, stream, group } = useStore();
  const { entries, split } = props;
  const pressed = (key: number | string): boolean =>
    typeof key === "number" ? key === stack : split === "stream" ? key === `stream ${stream}` : key === group;
  const press = (key: number | string): void => {
    if (typeof key === "number") update({ stack: pressed(key) ? null : key });
    else if (split === "stream") update({ stream: pressed(key) ? null : key.replace(/^stream /, "") });
    else update({ group: pressed(key) ? null : key });
  };
  return (
    <div class="bands" role="group" aria-label="Legend of the bands">
      {entries.map((each) => (
        <button key={each.key} type="button" class="small entry" aria-pressed={pressed(each.key)} title={each.name} onClick={() => press(each.key)}>
          <Dot color={each.color} /><span class="what">{each.name}</span> <span class="dim">{size(each.bytes)}</span>
        </button>
      ))}
      {split === "allocations" && <span class="entry"><i class="dot rest" />smaller allocations</span>}
    </div>
  );
}

function Dot(props: { color: string }) {
  const box = useRef<HTMLElement>(null);
  useEffect(() => {
    if (box.current) box.current.style.background = props.color;
  }, [props.color]);
  return <i ref={box} class="dot" />;
}

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

// ---- tooltip ----

/** Pixels between the pointer and the tooltip. */
const ASIDE = 14;

/** Show what is at the pointer, beside it and inside the chart. */
function showTip(tip: HTMLElement, pointed: Pointed | null, axis: Axis, width: number, height: number): void {
  tip.hidden = pointed === null;
  if (!pointed) return;
  tip.replaceChildren(...told(axis, pointed).map(([name, value, kind]) => {
    const line = document.createElement("div");
    line.className = kind;
    const [left, right] = [document.createElement("span"), document.createElement("b")];
    [left.textContent, right.textContent] = [name, value];
    line.append(left, right);
    return line;
  }));
  const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
  const [right, before] = [pointed.left + ASIDE, pointed.left - ASIDE - wide];
  const beside = right + wide <= width || before >= 0;
  const left = right + wide <= width ? right : beside ? before : Math.max(0, Math.min(pointed.left - wide / 2, width - wide));
  const above = pointed.top - ASIDE - high;
  const top = beside ? Math.min(Math.max(0, pointed.top - high / 2), Math.max(0, height - high)) : above >= 0 ? above : pointed.top + ASIDE;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

function told(axis: Axis, pointed: Pointed): [name: string, value: string, kind: string][] {
  const { x, values, band, group } = pointed;
  const rows: [string, string, string][] = [[axis === "time" ? "time" : "event", axis === "time" ? time(x) : count(Math.floor(x)), ""]];
  for (const name of LINES) {
    const value = values[name];
    if (value !== undefined) rows.push([name, size(value), ""]);
  }
  if (band) {
    const until = band.freed < (current().about?.events ?? 0) ? `event ${count(band.freed)}` : "the end";
    rows.push(["allocation", size(band.size), "more"]);
    rows.push(["lives", `${band.start < 0 ? "before the recording" : `event ${count(band.start)}`} to ${until}`, ""]);
    rows.push(["", functionFirst(stackOf(band.stack)?.label ?? ""), "place"]);
  } else if (group) rows.push([group, size(pointed.groupBytes), "more"]);
  return rows;
}
