// The chart of the timeline: lines over time by uPlot, and below them single allocations or groups as colored
// bands. It requests detail for the visible range and half as much on both sides, so that panning needs no
// request. Bands are drawn once into an image; panning moves the image.

import uPlot from "uplot";
import type { About, Band, Level } from "./answers";
import { css, holderColor } from "./colors";
import { count, size, time } from "./format";
import type { Axis } from "./state";
import { extent, source } from "./state";

export type Split = "allocations" | "stream" | "tag" | "module" | "line" | "none";
export const LINES = ["reserved", "allocated", "pending", "cached", "free"] as const;
export type Line = (typeof LINES)[number];

/** Events of the chart. The chart decides only what it draws. */
export interface Listener {
  onStretch(low: number, high: number): void;
  onMoment(x: number, band: Band | null): void;
  onHover(x: number | null, values: Partial<Record<Line, number>>, band: Band | null, group: string): void;
  onError(error: unknown): void;
}

export interface Shown { file: number; axis: Axis; split: Split; lines: readonly Line[] }

interface Detail { low: number; high: number; columns: number; level: Level; bands: Band[]; groups: Level | null }
interface Image { canvas: HTMLCanvasElement; low: number; high: number; top: number; span: number }

const ASIDE = 1; // number of screens to request on each side
const MOST_COLUMNS = 6000;
const SETTLE_MS = 70;
const STEP_LANE = 13;

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

  mark(momentX: number | null, stack: number | null, stream: string | null): void {
    if (stack !== this.stack || stream !== this.stream) this.image = null;
    [this.momentX, this.stack, this.stream] = [momentX, stack, stream];
    this.redraw();
  }

  /** Show the range of the listener, unless the listener already knows it from this chart. */
  follow(low: number, high: number): void {
    if (low === this.heard[0] && high === this.heard[1]) return; // the chart may have moved in the meantime
    this.heard = [low, high];
    this.stretch(low, high);
  }

  /** Show another range; the listener is notified once the range is stable. */
  stretch(low: number, high: number): void {
    const end = extent(this.about, this.shown.axis);
    const least = this.shown.axis === "time" ? 1 : 2;
    const span = Math.min(Math.max(high - low, Math.min(least, end)), end);
    const start = Math.min(Math.max(low, 0), end - span);
    if (start === this.low && start + span === this.high) return;
    [this.low, this.high] = [start, start + span];
    this.redraw();
    this.ensure(SETTLE_MS);
    clearTimeout(this.told);
    this.told = window.setTimeout(() => {
      this.heard = [this.low, this.high];
      this.listener.onStretch(this.low, this.high);
    }, SETTLE_MS);
  }

  pan(screens: number): void {
    const by = (this.high - this.low) * screens;
    this.stretch(this.low + by, this.high + by);
  }

  zoom(factor: number, at = (this.low + this.high) / 2): void {
    this.stretch(at - (at - this.low) * factor, at + (this.high - at) * factor);
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
    else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))), this.plot.posToVal(event.offsetX, "x"));
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
    this.listener.onMoment(x, this.bandAt(x, this.plot.posToVal(event.offsetY, "y")));
  };

  private hover(): void {
    const { left, top, idx } = this.plot.cursor;
    if (left === undefined || left < 0 || idx === null || idx === undefined || !this.detail) {
      this.listener.onHover(null, {}, null, "");
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
    this.listener.onHover(x, values, this.bandAt(x, y), this.groupAt(idx, y));
  }

  bandAt(x: number, y: number): Band | null {
    for (const band of this.detail?.bands ?? []) {
      if (x < band.path[0]! || x >= band.end) continue;
      const bottom = heightAt(band, x);
      if (y >= bottom && y < bottom + band.held) return band;
    }
    return null;
  }

  private groupAt(index: number, y: number): string {
    const { groups } = this.detail!;
    let bottom = 0;
    for (const { name, values } of groups?.series ?? []) {
      bottom += values[index] ?? 0;
      if (y < bottom) return name;
    }
    return "";
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
        { ...axis, size: 28, space: 90, values: (_plot, splits) => splits.map((each) => format(each)) },
        { ...axis, size: 66, gap: 6, splits: (_plot, _index, _low, high) => binarySteps(high), values: (_plot, splits) => splits.map(size) },
      ],
      padding: [STEP_LANE + 4, 12, 0, 0],
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
    }
    context.globalAlpha = 1;
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
    for (const { name, values } of groups.series) {
      const settled = groups.exact ? values : smooth(values);
      const base: number[] | null = below;
      const above: number[] = settled.map((value, index) => value + (base?.[index] ?? 0));
      context.fillStyle = name === "(others)" ? css("rest") : holderColor(name);
      context.globalAlpha = this.shown.split === "stream" && this.stream !== null && name !== `stream ${this.stream}` ? 0.25 : 1;
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
    ctx.save();
    ctx.font = css("axis-font");
    ctx.textBaseline = "bottom";
    this.drawSteps(ctx, x, ratio);
    this.drawSpans(ctx, x, ratio);
    for (const failure of this.about.failures) {
      const at = this.shown.axis === "time" ? failure.x : failure.event;
      if (!inside(at)) continue;
      ctx.fillStyle = css("alarm");
      ctx.fillRect(x(at) - ratio, bbox.top - STEP_LANE * ratio, 2 * ratio, bbox.height + STEP_LANE * ratio);
      ctx.textAlign = x(at) > bbox.left + bbox.width / 2 ? "right" : "left";
      ctx.fillText(" out of memory ", x(at), bbox.top + 14 * ratio);
    }
    if (this.momentX !== null && inside(this.momentX)) {
      ctx.fillStyle = css("accent");
      ctx.fillRect(Math.round(x(this.momentX)), bbox.top - 6 * ratio, 1.5 * ratio, bbox.height + 6 * ratio);
      ctx.beginPath();
      ctx.arc(Math.round(x(this.momentX)) + 0.75 * ratio, bbox.top - 6 * ratio, 3.5 * ratio, 0, 7);
      ctx.fill();
    }
    ctx.restore();
  }

  private drawSteps(ctx: CanvasRenderingContext2D, x: (value: number) => number, ratio: number): void {
    const { bbox } = this.plot;
    let labelled = -Infinity;
    let drawn = -Infinity;
    ctx.textAlign = "left";
    for (const [number, event, at] of this.about.steps) {
      const place = this.shown.axis === "time" ? at : event;
      if (place < this.low || place > this.high) continue;
      const left = Math.round(x(place));
      if (left - drawn < 4 * ratio) continue;
      drawn = left;
      ctx.fillStyle = css("step");
      ctx.fillRect(left, bbox.top - STEP_LANE * ratio, ratio, bbox.height + STEP_LANE * ratio);
      if (left - labelled > 56 * ratio && left < bbox.left + bbox.width - 40 * ratio) {
        ctx.fillStyle = css("dim");
        ctx.fillText(`step ${number}`, left + 3 * ratio, bbox.top - ratio);
        labelled = left;
      }
    }
  }

  private drawSpans(ctx: CanvasRenderingContext2D, x: (value: number) => number, ratio: number): void {
    if (this.shown.axis !== "time") return;
    const { bbox } = this.plot;
    ctx.textAlign = "left";
    for (const mark of this.about.marks) {
      if (mark.to < this.low || mark.from > this.high) continue;
      const left = Math.max(x(Math.max(mark.from, this.low)), bbox.left);
      const right = Math.min(x(Math.min(mark.to, this.high)), bbox.left + bbox.width);
      const top = bbox.top + bbox.height - (mark.depth + 1) * 5 * ratio;
      ctx.fillStyle = css("span");
      ctx.fillRect(left, top, Math.max(right - left, ratio), 4 * ratio);
      if (right - left > 8 * mark.name.length * ratio && mark.depth === 0) {
        ctx.fillStyle = css("text");
        ctx.fillText(mark.name, left + 3 * ratio, top - ratio);
      }
    }
  }
}

interface Place { low: number; high: number; xScale: number; yScale: number; height: number }

/** Fill between two series over a range; exact values hold until the next one. */
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
    if (level.exact && index > first) context.lineTo(left, previous);
    context.lineTo(left, top);
    previous = top;
    last = index;
    if (x[index]! > place.high) break;
  }
  for (let index = last; index >= first; index--) {
    const left = (x[index]! - place.low) * place.xScale;
    const bottom = place.height - (below?.[index] ?? 0) * place.yScale;
    context.lineTo(left, bottom);
    if (level.exact && index > first) context.lineTo(left, place.height - (below?.[index - 1] ?? 0) * place.yScale);
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
