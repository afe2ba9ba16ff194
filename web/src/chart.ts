// The chart of the timeline: lines over time by uPlot, and below them single allocations or groups as colored
// bands. It requests detail for the visible range and half as much on both sides, so that panning needs no
// request. Bands are drawn once into an image; panning moves the image.

import uPlot from "uplot";
import type { About, Band, Level } from "./answers";
import { css, holderColor } from "./colors";
import { count, shortLabel, size, time } from "./format";
import { type Axis, type Entry, type Line, type Split, LINES, extent, source, stackOf } from "./state";

/** What is at the pointer. `left` and `top` are in pixels of the chart. */
export interface Pointed {
  x: number; left: number; top: number;
  values: Partial<Record<Line, number>>; band: Band | null; group: string; groupBytes: number;
}

/** One entry of the legend: a stack of the bands, or a group. */
export interface LegendEntry { key: number | string; name: string; color: string; bytes: number }

/** Events of the chart. The chart decides only what it draws. */
export interface Listener {
  onStretch(low: number, high: number, entry: Entry): void;
  onMoment(x: number, band: Band | null, group: string): void;
  onHover(pointed: Pointed | null): void;
  onDetail(): void;
  onError(error: unknown): void;
}

export interface Shown { file: number; axis: Axis; split: Split; lines: readonly Line[] }

interface Detail { low: number; high: number; columns: number; level: Level; bands: Band[]; groups: Level | null }
interface Image { canvas: HTMLCanvasElement; low: number; high: number; top: number; span: number }

const ASIDE = 1; // number of screens to request on each side
const MOST_COLUMNS = 6000;
const SETTLE_MS = 70;
const STEP_LANE = 16;
/** The chart's margins, which the strip above shares. */
export const PLOT_LEFT = 66;
export const PLOT_RIGHT = 12;
const LABEL_HEIGHT = 13;
const MOST_ENTRIES = 14;

export class Chart {
  private readonly plot: uPlot;
  private detail: Detail | null = null;
  private image: Image | null = null;
  private asking: AbortController | null = null;
  private asked: { low: number; high: number } | null = null;
  private timer = 0;
  private told = 0;
  private frame = 0;
  private top = 1;
  low: number;
  high: number;
  private heard: [number, number]; // the range that the listener knows
  private momentX: number | null = null;
  private stack: number | null = null;
  private stream: string | null = null;
  private group: string | null = null;
  private known = 0;
  private entry: Entry = "join";
  private readonly labels = document.createElement("div");

  constructor(
    private readonly host: HTMLElement,
    private readonly about: About,
    private readonly shown: Shown,
    width: number,
    height: number,
    stretch: [number, number],
    private readonly listener: Listener,
  ) {
    [this.low, this.high] = this.heard = stretch;
    host.setAttribute("aria-busy", "true");
    this.plot = new uPlot(this.options(width, height), [[], ...LINES.map(() => [])] as uPlot.AlignedData, host);
    this.labels.className = "labels";
    this.plot.over.append(this.labels);
    this.plot.over.addEventListener("wheel", this.onWheel, { passive: false });
    this.plot.over.addEventListener("mousedown", this.onPress, { capture: true });
    this.plot.over.addEventListener("click", this.onClick);
    this.ensure(0);
  }

  /** Close the chart. Returns whether the listener does not know the current range yet. */
  destroy(): boolean {
    this.asking?.abort();
    clearTimeout(this.timer);
    clearTimeout(this.told);
    cancelAnimationFrame(this.frame);
    this.plot.destroy();
    return this.low !== this.heard[0] || this.high !== this.heard[1];
  }

  // ---- selection ----

  /** Show the selection. `known` is the number of known stacks: labels appear as they become known. */
  mark(momentX: number | null, stack: number | null, stream: string | null, group: string | null, known: number): void {
    if (stack !== this.stack || stream !== this.stream || group !== this.group || known !== this.known) this.image = null;
    [this.momentX, this.stack, this.stream, this.group, this.known] = [momentX, stack, stream, group, known];
    this.redraw();
  }

  /** Whether there is something to draw. */
  get ready(): boolean {
    return this.detail !== null;
  }

  /** What the colors mean: bytes at the selected moment, or at the right edge if it is not visible. */
  legend(): LegendEntry[] {
    const { detail } = this;
    if (!detail) return [];
    const visible = this.momentX !== null && this.momentX >= this.low && this.momentX <= this.high;
    const at = visible ? this.momentX! : this.high;
    return detail.groups ? groupEntries(detail.groups, at) : bandEntries(detail.bands, at, this.low, this.high);
  }

  /** Show the range of the listener, unless the listener already knows it from this chart. */
  follow(low: number, high: number): void {
    if (low === this.heard[0] && high === this.heard[1]) return; // the chart may have moved in the meantime
    this.heard = [low, high];
    this.stretch(low, high, "join");
  }

  /** Show another range; the listener is notified once the range is stable. */
  stretch(low: number, high: number, entry: Entry = "push"): void {
    const end = extent(this.about, this.shown.axis);
    const least = this.shown.axis === "time" ? 1 : 2;
    const span = Math.min(Math.max(high - low, Math.min(least, end)), end);
    const start = Math.min(Math.max(low, 0), end - span);
    if (start === this.low && start + span === this.high) return;
    [this.low, this.high] = [start, start + span];
    this.redraw();
    this.ensure(SETTLE_MS);
    if (entry === "push") this.entry = "push";
    clearTimeout(this.told);
    this.told = window.setTimeout(() => {
      this.heard = [this.low, this.high];
      this.listener.onStretch(this.low, this.high, this.entry);
      this.entry = "join";
    }, SETTLE_MS);
  }

  pan(screens: number): void {
    const by = (this.high - this.low) * screens;
    this.stretch(this.low + by, this.high + by, "join");
  }

  zoom(factor: number, at = (this.low + this.high) / 2, entry: Entry = "push"): void {
    this.stretch(at - (at - this.low) * factor, at + (this.high - at) * factor, entry);
  }

  whole(): void {
    this.stretch(0, extent(this.about, this.shown.axis));
  }

  // ---- detail ----

  private ensure(delay: number): void {
    clearTimeout(this.timer);
    if (this.enough(this.detail)) return;
    this.timer = window.setTimeout(() => void this.fetch(), delay);
  }

  private enough(detail: Detail | null): boolean {
    if (!detail || (source.embedded && detail)) return !!detail;
    const end = extent(this.about, this.shown.axis);
    const margin = 0.25 * (this.high - this.low);
    const covers =
      detail.low <= Math.max(0, this.low - margin) && detail.high >= Math.min(end, this.high + margin);
    const perColumn = (detail.high - detail.low) / detail.columns;
    const wanted = (this.high - this.low) / this.columns();
    return covers && (perColumn <= 1.6 * wanted) && perColumn >= 0.2 * wanted;
  }

  private columns(): number {
    return Math.max(50, Math.round(this.plot.bbox.width / (devicePixelRatio || 1)));
  }

  private async fetch(): Promise<void> {
    const span = this.high - this.low;
    const end = extent(this.about, this.shown.axis);
    const low = Math.max(0, this.low - ASIDE * span);
    const high = Math.min(end, this.high + ASIDE * span);
    if (this.asked && this.asked.low === low && this.asked.high === high) return;
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    this.asked = { low, high };
    const columns = Math.min(MOST_COLUMNS, Math.round((this.columns() * (high - low)) / span));
    const { file, axis, split } = this.shown;
    const given = { file, axis, low, high };
    try {
      const [level, bands, groups] = await Promise.all([
        source.ask<Level>("level", { ...given, columns }, asking.signal),
        split === "allocations"
          ? source.ask<{ bands: Band[] }>("bands", { ...given, most: 2000 }, asking.signal).then((each) => each.bands)
          : [],
        split === "allocations" || split === "none"
          ? null
          : source.ask<Level>("level", { ...given, columns, by: split }, asking.signal),
      ]);
      this.use({ low, high, columns, level, bands, groups });
    } catch (error) {
      if (!asking.signal.aborted) this.listener.onError(error);
    } finally {
      if (this.asking === asking) this.asked = null;
    }
  }

  private use(detail: Detail): void {
    this.detail = detail;
    this.image = null;
    this.host.setAttribute("aria-busy", "false");
    const { level } = detail;
    const known = new Map(level.series.map((each) => [each.name, each.values]));
    const { axis, lines } = this.shown;
    this.top = 1;
    for (const name of lines) for (const value of known.get(name) ?? []) this.top = Math.max(this.top, value);
    if (axis === "time" || !level.exact) this.top *= 1.04;
    const values = LINES.map((name) => (lines.includes(name) && known.get(name)) || level.x.map(() => null));
    this.plot.setData([level.x, ...values] as uPlot.AlignedData, false);
    this.listener.onDetail();
    this.redraw();
    this.ensure(0);
  }

  private redraw(): void {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.plot.batch(() => {
        this.plot.setScale("x", { min: this.low, max: this.high });
        this.plot.setScale("y", { min: 0, max: this.top });
      });
    });
  }

  // ---- pointer ----

  private readonly onWheel = (event: WheelEvent): void => {
    event.preventDefault();
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
    if (sideways) this.pan((sideways / Math.max(1, this.plot.over.clientWidth)) * 1.2);
    else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))), this.plot.posToVal(event.offsetX, "x"), "join");
  };

  /** Dragging with shift or the middle button pans; otherwise uPlot's brush zooms. */
  private readonly onPress = (event: MouseEvent): void => {
    if (!event.shiftKey && event.button !== 1) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    let last = event.clientX;
    const move = (moved: MouseEvent): void => {
      this.pan((last - moved.clientX) / Math.max(1, this.plot.over.clientWidth));
      last = moved.clientX;
    };
    const end = (): void => {
      removeEventListener("mousemove", move);
      removeEventListener("mouseup", end);
    };
    addEventListener("mousemove", move);
    addEventListener("mouseup", end);
  };

  private readonly onClick = (event: MouseEvent): void => {
    if (event.shiftKey) return;
    const x = this.plot.posToVal(event.offsetX, "x");
    const y = this.plot.posToVal(event.offsetY, "y");
    this.listener.onMoment(x, this.bandAt(x, y), this.groupAt(x, y)[0]);
  };

  private hover(): void {
    const { left, top, idx } = this.plot.cursor;
    if (left === undefined || left < 0 || idx === null || idx === undefined || !this.detail) {
      this.listener.onHover(null);
      return;
    }
    const x = this.plot.posToVal(left, "x");
    const y = this.plot.posToVal(top ?? 0, "y");
    const values: Partial<Record<Line, number>> = {};
    for (const { name, values: known } of this.detail.level.series) {
      values[name as Line] = this.detail.level.exact
        ? known[lastUpTo(this.detail.level.x, x)]
        : Math.max(known[idx - (idx % 2)] ?? 0, known[idx - (idx % 2) + 1] ?? 0);
    }
    const [group, groupBytes] = this.groupAt(x, y);
    const { offsetLeft, offsetTop } = this.plot.over;
    const place = { x, left: left + offsetLeft, top: (top ?? 0) + offsetTop };
    this.listener.onHover({ ...place, values, band: this.bandAt(x, y), group, groupBytes });
  }

  bandAt(x: number, y: number): Band | null {
    for (const band of this.detail?.bands ?? []) {
      if (x < band.path[0]! || x >= band.end) continue;
      const bottom = heightAt(band, x);
      if (y >= bottom && y < bottom + band.held) return band;
    }
    return null;
  }

  private groupAt(x: number, y: number): [name: string, bytes: number] {
    const groups = this.detail?.groups;
    if (!groups) return ["", 0];
    const index = lastUpTo(groups.x, x);
    let bottom = 0;
    for (const { name, values } of groups.series) {
      const bytes = valueAt(groups, values, index);
      bottom += bytes;
      if (y < bottom) return [name, bytes];
    }
    return ["", 0];
  }

  // ---- drawing ----

  private options(width: number, height: number): uPlot.Options {
    const axis = { stroke: () => css("dim"), grid: { stroke: () => css("grid"), width: 1 }, ticks: { show: false }, font: css("axis-font") };
    const format = this.shown.axis === "time" ? time : count;
    return {
      width, height,
      legend: { show: false },
      cursor: { drag: { x: true, y: false, setScale: false, dist: 6 }, points: { show: false }, y: false },
      scales: { x: { time: false, auto: false, range: () => [this.low, this.high] }, y: { auto: false, range: () => [0, this.top] } },
      series: [{}, ...LINES.map((name) => ({
        label: name,
        stroke: () => css(`${name}-line`),
        width: name === "reserved" || name === "allocated" ? 1.5 : 1,
        points: { show: false },
        paths: uPlot.paths.stepped!({ align: 1 }),
        ...(name === "allocated" && this.shown.split === "none" ? { fill: () => css("live-soft") } : {}),
      }))],
      axes: [
        { ...axis, size: 28, space: 90, values: (plot, splits) => splits.map((each) => (fits(plot, each) ? format(each) : "")) },
        { ...axis, size: PLOT_LEFT, gap: 6, splits: (_plot, _index, _low, high) => binarySteps(high), values: (_plot, splits) => splits.map(size) },
      ],
      padding: [STEP_LANE + 4, PLOT_RIGHT, 0, 0],
      hooks: {
        drawAxes: [() => this.drawBands()],
        draw: [() => this.drawMarks()],
        setCursor: [() => this.hover()],
        setSelect: [() => this.onBrush()],
      },
    };
  }

  private onBrush(): void {
    const { left, width } = this.plot.select;
    if (width < 6) return;
    const [low, high] = [this.plot.posToVal(left, "x"), this.plot.posToVal(left + width, "x")];
    this.plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.stretch(low, high);
  }

  private drawBands(): void {
    const { ctx, bbox } = this.plot;
    if (!this.detail) return;
    const span = this.high - this.low;
    const fits = this.image && this.image.low <= this.low && this.image.high >= this.high && this.image.top === this.top;
    const sharp = fits && Math.abs(this.image!.span / span - 1) < 1e-6;
    if (!sharp) this.image = this.paint();
    const { canvas, low, high } = this.image!;
    const scale = canvas.width / (high - low);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(canvas, Math.round((this.low - low) * scale), 0, bbox.width, bbox.height, bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.restore();
  }

  /** Paint the visible range and half a screen on both sides, at the current scale. */
  private paint(): Image {
    const { bbox } = this.plot;
    const span = this.high - this.low;
    const low = this.low - 0.5 * span;
    const high = this.high + 0.5 * span;
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(2 * bbox.width));
    canvas.height = Math.max(1, Math.round(bbox.height));
    const context = canvas.getContext("2d")!;
    const xScale = canvas.width / (high - low);
    const yScale = canvas.height / this.top;
    const place = { low, high, xScale, yScale, height: canvas.height };
    const { split } = this.shown;
    if (split === "allocations") this.paintBands(context, place);
    else if (this.detail!.groups) this.paintGroups(context, place, this.detail!.groups);
    return { canvas, low, high, top: this.top, span };
  }

  private paintBands(context: CanvasRenderingContext2D, place: Place): void {
    this.paintRest(context, place);
    const edge = css("band-edge");
    for (const band of this.detail!.bands) {
      if (band.path[0]! > place.high || band.end < place.low) continue;
      const apart =
        (this.stack !== null && band.stack !== this.stack) || (this.stream !== null && band.stream !== this.stream);
      context.globalAlpha = apart ? 0.22 : 1;
      context.fillStyle = holderColor(band.stack);
      const height = band.held * place.yScale;
      const thick = height > 4;
      const { path } = band;
      let x = (Math.max(path[0]!, place.low) - place.low) * place.xScale;
      for (let index = 0; index < path.length; index += 2) {
        const until = Math.min(index + 2 < path.length ? path[index + 2]! : band.end, place.high);
        const end = (until - place.low) * place.xScale;
        if (end - x < 0.5 && index + 2 < path.length) continue; // too narrow to be visible: the next one is drawn instead
        if (end <= x) continue;
        const y = place.height - path[index + 1]! * place.yScale - height;
        context.fillRect(x, y, Math.max(end - x, 0.6), Math.max(height, 0.4));
        if (thick) {
          context.fillStyle = edge;
          context.fillRect(x, y, end - x, 1);
          context.fillStyle = holderColor(band.stack);
        }
        x = end;
      }
      if (height >= LABEL_HEIGHT * (devicePixelRatio || 1)) this.paintLabel(context, place, band, height);
    }
    context.globalAlpha = 1;
  }

  /** Write what a band is where it stays at one height for long enough. */
  private paintLabel(context: CanvasRenderingContext2D, place: Place, band: Band, height: number): void {
    const stack = stackOf(band.stack);
    if (!stack) return;
    const ratio = devicePixelRatio || 1;
    const { path } = band;
    let [best, widest] = [-1, 60 * ratio];
    const left = (index: number): number => (Math.max(path[index]!, this.low) - place.low) * place.xScale;
    const right = (index: number): number =>
      (Math.min(index + 2 < path.length ? path[index + 2]! : band.end, this.high) - place.low) * place.xScale;
    for (let index = 0; index < path.length; index += 2) {
      if (right(index) - left(index) > widest) [best, widest] = [index, right(index) - left(index)];
    }
    if (best < 0) return;
    const y = place.height - path[best + 1]! * place.yScale - height / 2;
    context.save();
    context.beginPath();
    context.rect(left(best), y - height / 2, widest - 4 * ratio, height);
    context.clip();
    context.font = css("axis-font").replace(/^\d+/, (pixels) => String(Number(pixels) * ratio));
    context.textBaseline = "middle";
    context.fillStyle = css("text");
    context.fillText(`${size(band.size)}  ${shortLabel(stack.label)}`, left(best) + 4 * ratio, y);
    context.restore();
  }

  /** Paint allocated memory below all bands: what the bands do not cover are smaller allocations. */
  private paintRest(context: CanvasRenderingContext2D, place: Place): void {
    const { level } = this.detail!;
    const allocated = level.series.find((each) => each.name === "allocated")?.values ?? [];
    context.fillStyle = css("rest");
    area(context, place, level, allocated, null);
  }

  private paintGroups(context: CanvasRenderingContext2D, place: Place, groups: Level): void {
    let below: number[] | null = null;
    for (const [order, { name, values }] of groups.series.entries()) {
      const settled = groups.exact ? values : smooth(values);
      const base: number[] | null = below;
      const above: number[] = settled.map((value, index) => value + (base?.[index] ?? 0));
      context.fillStyle = groupColor(name, order);
      const apart = this.shown.split === "stream" && this.stream !== null && name !== `stream ${this.stream}`;
      context.globalAlpha = apart || (this.group !== null && name !== this.group) ? 0.25 : 1;
      area(context, place, groups, above, below);
      below = above;
    }
    context.globalAlpha = 1;
  }

  private drawMarks(): void {
    const { ctx, bbox } = this.plot;
    const ratio = devicePixelRatio || 1;
    const x = (value: number): number => this.plot.valToPos(value, "x", true);
    const inside = (value: number): boolean => value >= this.low && value <= this.high;
    const wanted: Label[] = [];
    ctx.save();
    for (const failure of this.about.failures) {
      const at = this.shown.axis === "time" ? failure.x : failure.event;
      if (!inside(at)) continue;
      ctx.fillStyle = css("alarm");
      ctx.fillRect(x(at) - ratio, bbox.top, 2 * ratio, bbox.height);
      wanted.push({ text: "out of memory", kind: "alarm", x: (x(at) - bbox.left) / ratio, y: 2, room: Infinity });
    }
    this.drawSteps(ctx, x, ratio, wanted);
    this.drawSpans(ctx, x, ratio, wanted);
    if (this.momentX !== null && inside(this.momentX)) {
      ctx.fillStyle = css("accent");
      ctx.fillRect(Math.round(x(this.momentX)), bbox.top, 1.5 * ratio, bbox.height);
      ctx.beginPath();
      ctx.arc(Math.round(x(this.momentX)) + 0.75 * ratio, bbox.top, 3.5 * ratio, 0, 7);
      ctx.fill();
    }
    ctx.restore();
    placeLabels(this.labels, wanted, bbox.width / ratio, ctx);
  }

  /** Steps of the program: a lane above the chart with one block for each, and a line where it begins. */
  private drawSteps(ctx: CanvasRenderingContext2D, x: (value: number) => number, ratio: number, wanted: Label[]): void {
    const { bbox } = this.plot;
    const { steps } = this.about;
    const place = (index: number): number => {
      const step = steps[index];
      return step ? (this.shown.axis === "time" ? step[2] : step[1]) : extent(this.about, this.shown.axis);
    };
    let drawn = -Infinity;
    for (const [index, [number]] of steps.entries()) {
      if (place(index + 1) < this.low || place(index) > this.high) continue;
      const left = Math.max(bbox.left, Math.round(x(place(index))));
      const right = Math.min(bbox.left + bbox.width, Math.round(x(place(index + 1))));
      if (right <= left) continue;
      ctx.fillStyle = css(index % 2 ? "step-odd" : "step-even");
      ctx.fillRect(left, bbox.top - STEP_LANE * ratio, right - left, (STEP_LANE - 2) * ratio);
      if (left - drawn >= 4 * ratio) {
        ctx.fillStyle = css("step");
        ctx.fillRect(left, bbox.top, ratio, bbox.height);
        drawn = left;
      }
      wanted.push({ text: `step ${number}`, kind: "step", x: (left - bbox.left) / ratio, y: -STEP_LANE, room: (right - left) / ratio });
    }
  }

  private drawSpans(ctx: CanvasRenderingContext2D, x: (value: number) => number, ratio: number, wanted: Label[]): void {
    if (this.shown.axis !== "time") return;
    const { bbox } = this.plot;
    for (const mark of this.about.marks) {
      if (mark.to < this.low || mark.from > this.high) continue;
      const left = Math.max(x(Math.max(mark.from, this.low)), bbox.left);
      const right = Math.min(x(Math.min(mark.to, this.high)), bbox.left + bbox.width);
      const top = bbox.top + bbox.height - (mark.depth + 1) * 5 * ratio;
      ctx.fillStyle = css("span");
      ctx.fillRect(left, top, Math.max(right - left, ratio), 4 * ratio);
      const y = (top - bbox.top) / ratio - LABEL_HEIGHT;
      if (mark.depth === 0) wanted.push({ text: mark.name, kind: "span", x: (left - bbox.left) / ratio, y, room: (right - left) / ratio });
    }
  }
}

/** Whether the label of an axis has room at a value: one at the right edge would be cut. */
function fits(plot: uPlot, value: number): boolean {
  return plot.valToPos(value, "x") < plot.bbox.width / (devicePixelRatio || 1) - 18;
}

interface Label { text: string; kind: string; x: number; y: number; room: number }
const MOST_LABELS = 60;

/** Show labels as far as they fit into their room and do not overlap; the first ones have priority. */
function placeLabels(host: HTMLElement, wanted: Label[], width: number, ctx: CanvasRenderingContext2D): void {
  const taken: [left: number, right: number, y: number][] = [];
  const made: HTMLElement[] = [];
  ctx.save();
  ctx.font = css("axis-font");
  for (const { text, kind, x, y, room } of wanted) {
    const wide = ctx.measureText(text).width + 8;
    if (wide > room || made.length >= MOST_LABELS) continue;
    const left = Math.max(0, x + wide > width ? x - wide - 2 : x);
    if (left + wide > width + 1) continue;
    if (taken.some(([from, to, at]) => left < to && left + wide > from && Math.abs(at - y) < LABEL_HEIGHT)) continue;
    taken.push([left, left + wide, y]);
    const label = document.createElement("span");
    label.className = kind;
    label.textContent = text;
    label.style.transform = `translate(${left}px, ${y}px)`;
    made.push(label);
  }
  ctx.restore();
  host.replaceChildren(...made);
}

/** The color of a group by its place: groups that are shown together differ. */
function groupColor(name: string, place: number): string {
  return name === "(others)" ? css("rest") : holderColor(place + 1);
}

function groupEntries(groups: Level, at: number): LegendEntry[] {
  const index = lastUpTo(groups.x, at);
  return groups.series.map(({ name, values }, place) => (
    { key: name, name, color: groupColor(name, place), bytes: valueAt(groups, values, index) }));
}

/** A value of a level; a column that is not exact has its minimum and its maximum. */
function valueAt(level: Level, values: number[], index: number): number {
  if (index < 0) return 0;
  return level.exact ? (values[index] ?? 0) : Math.max(values[index - (index % 2)] ?? 0, values[index - (index % 2) + 1] ?? 0);
}

/** The stacks that hold most at a place, then those that hold most anywhere in view. */
function bandEntries(bands: Band[], at: number, low: number, high: number): LegendEntry[] {
  const held = new Map<number, number>();
  const ever = new Map<number, number>();
  for (const band of bands) {
    if (band.path[0]! > high || band.end < low) continue;
    ever.set(band.stack, Math.max(ever.get(band.stack) ?? 0, band.held));
    if (band.path[0]! <= at && at <= band.end) held.set(band.stack, (held.get(band.stack) ?? 0) + band.held);
  }
  const bytes = (stack: number): number => held.get(stack) ?? 0;
  return [...ever.keys()]
    .sort((one, other) => bytes(other) - bytes(one) || ever.get(other)! - ever.get(one)!)
    .slice(0, MOST_ENTRIES)
    .map((stack) => ({ key: stack, name: shortLabel(stackOf(stack)?.label ?? "…"), color: holderColor(stack), bytes: bytes(stack) }));
}

interface Place { low: number; high: number; xScale: number; yScale: number; height: number }

/** Fill between two series over a range, as steps: a value holds until the next one. */
function area(context: CanvasRenderingContext2D, place: Place, level: Level, above: number[], below: number[] | null): void {
  const { x } = level;
  const first = Math.max(0, lastUpTo(x, place.low));
  let last = first;
  context.beginPath();
  let previous = place.height;
  for (let index = first; index < x.length; index++) {
    const left = (x[index]! - place.low) * place.xScale;
    const top = place.height - (above[index] ?? 0) * place.yScale;
    if (index === first) context.moveTo(left, place.height - (below?.[index] ?? 0) * place.yScale);
    if (index > first) context.lineTo(left, previous);
    context.lineTo(left, top);
    previous = top;
    last = index;
    if (x[index]! > place.high) break;
  }
  for (let index = last; index >= first; index--) {
    const left = (x[index]! - place.low) * place.xScale;
    const bottom = place.height - (below?.[index] ?? 0) * place.yScale;
    context.lineTo(left, bottom);
    if (index > first) context.lineTo(left, place.height - (below?.[index - 1] ?? 0) * place.yScale);
  }
  context.fill();
}

/** Merge minimum and maximum of each column into one value. */
function smooth(values: number[]): number[] {
  return values.map((_, index) => (values[index - (index % 2)]! + values[index - (index % 2) + 1]!) / 2);
}

/** Index of the last entry that is not greater than a value; -1 before the first. */
export function lastUpTo(sorted: ArrayLike<number>, value: number): number {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle]! <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function heightAt(band: Band, x: number): number {
  let low = 0;
  let high = band.path.length / 2;
  while (low + 1 < high) {
    const middle = (low + high) >> 1;
    if (band.path[2 * middle]! <= x) low = middle;
    else high = middle;
  }
  return band.path[2 * low + 1]!;
}

/** About five round sizes up to `high`. */
export function binarySteps(high: number): number[] {
  let step = 2 ** Math.floor(Math.log2(Math.max(high, 4) / 4));
  if (high / step > 7) step *= 2;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, index) => index * step);
}
