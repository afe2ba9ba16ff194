// Map: segments by address, laid out like lines of text, with live and pending blocks, rounding and holes.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { ListedEvent, Moment, Piece, Segment } from "./answers";
import { css, holderColor } from "./colors";
import { count, functionFirst, plural, share, size } from "./format";
import { prepared, useSize, useTheme } from "./parts";
import { choose, source, stackOf, update, useStore } from "./state";

const LINE = 17;
const GAP = 3;
const HEADING = 20;
/** Room for the address at which a line begins. */
const LEFT = 104;
const LISTED = 60;

/** A part of a segment on one line. */
interface Run { segment: Segment; from: number; to: number; x: number; y: number }
interface Heading { text: string; y: number }
interface Layout { runs: Run[]; headings: Heading[]; height: number; perPixel: number }

export function MemoryMap() {
  const { moment, about, stack, stream } = useStore();
  const theme = useTheme();
  const [box, width, height] = useSize<HTMLDivElement>();
  const [zoom, setZoom] = useState(1);
  const [scroll, setScroll] = useState(0);
  const [over, setOver] = useState<Hit | null>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const layout = useMemo(() => (moment && width > 60 ? layOut(moment, width, height, zoom) : null), [moment, width, height, zoom]);

  useEffect(() => {
    if (!layout || !canvas.current || !moment) return;
    const context = prepared(canvas.current, width, height);
    draw(context, layout, moment, scroll, height, stack, stream);
  }, [layout, scroll, stack, stream, theme, moment, width, height]);

  if (!about) return null;
  const hit = (event: MouseEvent): Hit | null => (layout ? find(layout, event.offsetX, event.offsetY + scroll) : null);
  return (
    <section class="view map" aria-label="Map">
      <div class="tools">
        <span><b>{moment ? share(moment.fragmentation, 1) : "–"}</b> fragmentation</span>
        <span class="dim">{moment ? `${plural(moment.segments.length, "segment")}, largest free block ${size(moment.largest_free)}` : ""}</span>
        <Legend />
        <span class="spread" />
        <button type="button" onClick={() => setZoom(Math.min(4096, zoom * 2))} aria-label="Zoom in">+</button>
        <button type="button" onClick={() => setZoom(Math.max(1, zoom / 2))} aria-label="Zoom out">−</button>
        <button type="button" onClick={() => { setZoom(1); setScroll(0); }}>All</button>
      </div>
      <div class="readout">{over ? told(over) : "Point at a block to see its address, size and holder. Click it to select its stack."}</div>
      <div class="canvas" ref={box} tabIndex={0} role="img"
        aria-label={moment ? `${moment.segments.length} segments, ${size(moment.reserved)} reserved` : ""}
        onScroll={(event) => setScroll(event.currentTarget.scrollTop)}>
        <div class="sticky">
          <canvas ref={canvas} onMouseMove={(event) => setOver(hit(event))} onMouseLeave={() => setOver(null)}
            onClick={(event) => {
              const found = hit(event);
              update({ stack: found?.piece ? found.piece[6] : null });
            }} />
        </div>
        <Filler height={layout?.height ?? 0} below={height} />
      </div>
      {!source.embedded && <Events />}
    </section>
  );
}

/** The events around the selected one; a row selects its event, and the map shows the memory after it. */
function Events() {
  const { about, file, event, stream } = useStore();
  const [rows, setRows] = useState<ListedEvent[]>([]);
  const list = useRef<HTMLDivElement>(null);
  const first = Math.max(0, event - LISTED / 2);
  useEffect(() => {
    const asking = new AbortController();
    source.ask<{ events: ListedEvent[] }>("events", { file, first, count: LISTED }, asking.signal)
      .then((found) => setRows(found.events), () => undefined);
    return () => asking.abort();
  }, [about, file, first]);
  useEffect(() => {
    const box = list.current;
    const row = box?.querySelector<HTMLElement>("tr[aria-selected=true]");
    if (box && row) box.scrollTop = row.offsetTop - box.clientHeight / 2;
  }, [rows, event]);
  return (
    <div class="events" ref={list} tabIndex={0} role="region" aria-label="Events">
      <table class="wide" role="grid" aria-label="Events around the selected one">
        <thead><tr><th class="number">event</th><th>action</th><th class="number">size</th><th>address</th><th>stream</th><th>by</th></tr></thead>
        <tbody>
          {rows.filter((each) => stream === null || each.stream === stream || each.event === event).map((each) => (
            <tr key={each.event} aria-selected={each.event === event} onClick={() => void choose(each.event)}>
              <td class="number"><button type="button" class="link">{count(each.event)}</button></td><td>{each.action.replaceAll("_", " ")}</td>
              <td class="number">{size(each.size)}</td><td class="mono">{each.address || free(each)}</td><td>{each.stream}</td><td class="what">{functionFirst(each.label)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Makes the scroll area as tall as the whole map. */
function Filler(props: { height: number; below: number }) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (box.current) box.current.style.height = `${Math.max(0, props.height - props.below)}px`;
  });
  return <div ref={box} />;
}

function Legend() {
  return (
    <span class="keys">
      <span><i class="dot live" />in use</span><span><i class="dot rounding" />rounding</span>
      <span><i class="dot pending" />pending</span><span><i class="dot hole" />hole</span><span><i class="dot cached" />idle segment</span>
    </span>
  );
}

function layOut(moment: Moment, width: number, height: number, zoom: number): Layout {
  const lineWidth = width - LEFT - 14;
  const streams = new Map<string, Segment[]>();
  for (const segment of moment.segments) streams.set(segment.stream, [...(streams.get(segment.stream) ?? []), segment]);
  const lines = Math.max(3, Math.floor((height - streams.size * HEADING) / (LINE + GAP)) - streams.size - 1);
  // Segments break lines, so try scales until everything fits.
  let perPixel = moment.reserved / lineWidth / lines;
  let found = flow(streams, lineWidth, perPixel);
  for (let attempt = 0; attempt < 12 && found.height > height; attempt++) {
    perPixel *= 1.08;
    found = flow(streams, lineWidth, perPixel);
  }
  return zoom === 1 ? found : flow(streams, lineWidth, perPixel / zoom);
}

function flow(streams: Map<string, Segment[]>, width: number, perPixel: number): Layout {
  const runs: Run[] = [];
  const headings: Heading[] = [];
  let y = 4;
  for (const [stream, segments] of streams) {
    const bytes = segments.reduce((sum, each) => sum + each.size, 0);
    headings.push({ text: `stream ${stream} · ${plural(segments.length, "segment")} · ${size(bytes)}`, y });
    y += HEADING;
    let x = 0;
    for (const segment of segments) {
      let from = 0;
      if (x > 0 && x + Math.min(segment.size / perPixel, 24) > width) [x, y] = [0, y + LINE + GAP];
      while (from < segment.size) {
        const to = Math.min(segment.size, from + Math.max(1, Math.round((width - x) * perPixel)));
        runs.push({ segment, from, to, x: LEFT + x, y });
        x += (to - from) / perPixel;
        from = to;
        if (from < segment.size || x > width - 4) [x, y] = [0, y + LINE + GAP];
      }
      if (x > 0) x += Math.max(3, 0);
    }
    if (x > 0) y += LINE + GAP;
    y += 4;
  }
  return { runs, headings, height: y + 4, perPixel };
}

function draw(
  context: CanvasRenderingContext2D, layout: Layout, moment: Moment, scroll: number, height: number,
  stack: number | null, stream: string | null,
): void {
  const { perPixel } = layout;
  const names = ["pending", "rounding", "edge", "accent", "text"] as const;
  const colors: Colors = Object.fromEntries(names.map((name) => [name, css(name)]));
  colors["hole"] = hatched(context, css("hole"), css("hatch"), 1);
  colors["cached"] = hatched(context, css("cached"), css("hatch"), -1);
  context.font = css("axis-font");
  context.textBaseline = "middle";
  context.fillStyle = css("dim");
  for (const heading of layout.headings) context.fillText(heading.text, 8, heading.y - scroll + HEADING / 2);
  drawAddresses(context, layout, scroll, height);
  const [address, changed] = [moment.what?.address ?? "", moment.event];
  for (const run of layout.runs) {
    const y = run.y - scroll;
    if (y > height || y + LINE < 0) continue;
    const end = run.x + (run.to - run.from) / perPixel;
    const apart = stream !== null && run.segment.stream !== stream;
    context.globalAlpha = apart ? 0.2 : 1;
    context.fillStyle = colors[run.segment.pieces.length ? "hole" : "cached"]!;
    context.fillRect(run.x, y, Math.max(end - run.x, 1), LINE);
    for (const piece of within(run)) {
      const left = run.x + Math.max(0, (piece[0] - run.from) / perPixel);
      const right = Math.min(end, run.x + (piece[0] + piece[1] - run.from) / perPixel);
      context.globalAlpha = apart ? 0.2 : stack !== null && piece[6] !== stack ? 0.25 : 1;
      paint(context, piece, left, Math.max(right, left + 0.4), y, colors);
      const touched = piece[7] === changed || hex(run.segment.address, piece[0]) === address;
      if (touched) {
        context.globalAlpha = 1;
        context.strokeStyle = colors["accent"]!;
        context.lineWidth = 2;
        context.strokeRect(left + 0.5, y + 1, Math.max(right - left - 1, 2), LINE - 2);
      }
    }
    context.globalAlpha = 1;
    context.fillStyle = colors["edge"]!;
    if (run.from === 0) context.fillRect(run.x - 1, y, 1, LINE);
    if (run.to === run.segment.size) context.fillRect(end, y, 1, LINE);
  }
}

type Colors = Record<string, string | CanvasPattern>;

/** A fill of diagonal lines, so that free memory differs from blocks by more than its color. */
function hatched(context: CanvasRenderingContext2D, ground: string, lines: string, slope: 1 | -1): CanvasPattern | string {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const inside = tile.getContext("2d")!;
  inside.fillStyle = ground;
  inside.fillRect(0, 0, 6, 6);
  inside.strokeStyle = lines;
  inside.lineWidth = 1.2;
  inside.beginPath();
  for (const shift of [-6, 0, 6]) {
    inside.moveTo(shift, slope > 0 ? 6 : 0);
    inside.lineTo(shift + 6, slope > 0 ? 0 : 6);
  }
  inside.stroke();
  return context.createPattern(tile, "repeat") ?? ground;
}

/** The address at the beginning of each line. */
function drawAddresses(context: CanvasRenderingContext2D, layout: Layout, scroll: number, height: number): void {
  context.save();
  context.font = css("mono-font");
  for (const run of layout.runs) {
    const y = run.y - scroll;
    if (run.x > LEFT || y > height || y + LINE < 0) continue;
    context.fillText(hex(run.segment.address, run.from), 8, y + LINE / 2 + 1);
  }
  context.restore();
}

function paint(
  context: CanvasRenderingContext2D, piece: Piece, left: number, right: number, y: number, colors: Colors,
): void {
  const [, bytes, held, requested, pending] = piece;
  const width = right - left;
  context.fillStyle = pending > held / 2 ? colors["pending"]! : holderColor(piece[6]);
  context.fillRect(left, y, width, LINE);
  const lost = (held - requested) / Math.max(1, bytes);
  if (lost * width > 0.5) {
    context.fillStyle = colors["rounding"]!;
    context.fillRect(right - lost * width, y, lost * width, LINE);
  }
  const free = (bytes - held) / Math.max(1, bytes); // several small blocks and the gaps between them
  if (free > 0.02 && piece[5] > 1) {
    context.fillStyle = colors["hole"]!;
    context.fillRect(left, y, width, LINE * free);
  }
  if (width > 3) {
    context.fillStyle = colors["edge"]!;
    context.fillRect(right - 0.5, y, 0.5, LINE);
  }
  const text = size(held);
  if (piece[5] === 1 && width > 7 * text.length + 8) {
    context.fillStyle = colors["text"]!;
    context.fillText(text, left + 4, y + LINE / 2 + 1);
  }
}

/** The pieces of a run, in order of address. */
function* within(run: Run): Generator<Piece> {
  const { pieces } = run.segment;
  let low = 0;
  let high = pieces.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (pieces[middle]![0] + pieces[middle]![1] <= run.from) low = middle + 1;
    else high = middle;
  }
  for (let index = low; index < pieces.length && pieces[index]![0] < run.to; index++) yield pieces[index]!;
}

interface Hit { segment: Segment; offset: number; piece: Piece | null; free: number }

function find(layout: Layout, x: number, y: number): Hit | null {
  for (const run of layout.runs) {
    const end = run.x + (run.to - run.from) / layout.perPixel;
    if (y < run.y || y >= run.y + LINE || x < run.x || x > end) continue;
    const offset = run.from + (x - run.x) * layout.perPixel;
    const { pieces } = run.segment;
    const after = pieces.findIndex((piece) => piece[0] + piece[1] > offset);
    const piece = after >= 0 ? pieces[after]! : null;
    if (piece && piece[0] <= offset) return { segment: run.segment, offset, piece, free: 0 };
    const before = pieces[(after >= 0 ? after : pieces.length) - 1];
    const start = before ? before[0] + before[1] : 0;
    return { segment: run.segment, offset, piece: null, free: (piece ? piece[0] : run.segment.size) - start };
  }
  return null;
}

/** What a failed request has in place of an address. */
function free(event: ListedEvent): string {
  return event.device_free === undefined || event.device_free === null ? "" : `${size(event.device_free)} free`;
}

function hex(address: string, offset: number): string {
  return `0x${(BigInt(address) + BigInt(Math.round(offset))).toString(16)}`;
}

function told(hit: Hit): string {
  const { segment, piece } = hit;
  const where = `${segment.kind} segment ${segment.address} of ${size(segment.size)}, stream ${segment.stream}`;
  if (!piece) return `${segment.pieces.length ? "hole" : "idle"}: ${size(hit.free)}   ·   ${where}`;
  const [offset, bytes, held, requested, pending, blocks, stack, event] = piece;
  if (blocks > 1) return `${plural(blocks, "small block")} in ${size(bytes)}, ${size(held)} in use   ·   ${where}`;
  const rounding = held > requested ? `, ${size(requested)} requested` : "";
  const since = event < 0 ? "allocated before the recording" : `since event ${count(event)}`;
  const holder = functionFirst(stackOf(stack)?.label ?? "");
  return [`${pending ? "pending" : "live"} ${size(bytes)}${rounding} at ${hex(segment.address, offset)}`, since, holder, where]
    .filter(Boolean).join("   ·   ");
}

