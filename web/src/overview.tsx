// The whole run as a strip above every view: the selected moment, and the range that the timeline shows.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Level } from "./answers";
import { PLOT_LEFT, PLOT_RIGHT } from "./chart";
import { css } from "./colors";
import { count, time } from "./format";
import { prepared, useSize, useTheme } from "./parts";
import { type Entry, chooseAt, extent, source, useStore } from "./state";

const HEIGHT = 44;

export function Overview() {
  const { about, axis, file, low, high, event, moment, view } = useStore();
  const theme = useTheme();
  const [box, outer] = useSize<HTMLDivElement>();
  const width = Math.max(0, outer - PLOT_LEFT - PLOT_RIGHT); // the same scale as the chart below
  const canvas = useRef<HTMLCanvasElement>(null);
  const [level, setLevel] = useState<Level | null>(null);

  useEffect(() => {
    if (!about || width < 40) return;
    const asking = new AbortController();
    source
      .ask<Level>("level", { file, axis, low: 0, high: extent(about, axis), columns: Math.min(width, 1200) }, asking.signal)
      .then(setLevel, () => undefined);
    return () => asking.abort();
  }, [about, file, axis, width > 40]);

  useEffect(() => {
    if (!about || !canvas.current || width < 40) return;
    const context = prepared(canvas.current, width, HEIGHT);
    const end = extent(about, axis);
    const x = (value: number): number => (value / end) * width;
    if (level) drawSteps(context, level, x, topOf(level), HEIGHT, end);
    for (const failure of about.failures) {
      context.fillStyle = css("alarm");
      context.fillRect(x(axis === "time" ? failure.x : failure.event) - 1, 0, 2, HEIGHT);
    }
    if (view === "timeline" && (low > 0 || high < end)) {
      context.fillStyle = css("veil");
      context.fillRect(0, 0, x(low), HEIGHT);
      context.fillRect(x(high), 0, width - x(high), HEIGHT);
    }
    const at = axis === "time" ? moment?.what?.time_us : event;
    if (at !== undefined) {
      context.fillStyle = css("accent");
      context.fillRect(Math.round(x(at)) - 0.5, 0, 2, HEIGHT);
    }
  }, [about, axis, level, width, low, high, event, moment, view, theme]);

  if (!about) return null;
  const pick = (clientX: number, entry: Entry): void => {
    const left = canvas.current!.getBoundingClientRect().left;
    const x = ((clientX - left) / width) * extent(about, axis);
    void chooseAt(Math.max(0, x), entry);
  };
  const place = axis === "time" ? time(moment?.what?.time_us ?? 0) : count(event);
  return (
    <div class="overview" ref={box}>
      <canvas ref={canvas} role="slider" tabIndex={0} aria-label="Selected moment" aria-valuenow={event} aria-valuemin={0}
        aria-valuemax={Math.max(0, about.events - 1)} aria-valuetext={place}
        onPointerDown={(pressed) => {
          pressed.currentTarget.setPointerCapture(pressed.pointerId);
          pick(pressed.clientX, "push");
        }}
        onPointerMove={(moved) => moved.buttons === 1 && pick(moved.clientX, "join")} />
    </div>
  );
}

export function topOf(level: Level): number {
  const shown = level.series.filter((each) => each.name === "reserved" || each.name === "allocated");
  return shown.reduce((most, { values }) => values.reduce((top, value) => Math.max(top, value), most), 1);
}

/** Fill reserved and allocated memory as steps: a value holds until the next one. */
export function drawSteps(
  context: CanvasRenderingContext2D, level: Level, x: (value: number) => number, top: number, height: number, end: number,
): void {
  const known = new Map(level.series.map((each) => [each.name, each.values]));
  const y = (value: number): number => height - (value / top) * (height - 3);
  for (const name of ["reserved", "allocated"]) {
    const values = known.get(name) ?? [];
    context.fillStyle = css(name === "reserved" ? "reserved-soft" : "live-soft");
    context.beginPath();
    context.moveTo(x(level.x[0] ?? 0), height);
    let last = height;
    for (let index = 0; index < values.length; index++) {
      const high = level.exact ? values[index]! : Math.max(values[index]!, values[index ^ 1]!);
      const left = x(level.x[index]!);
      context.lineTo(left, last);
      context.lineTo(left, (last = y(high)));
    }
    context.lineTo(x(end), last);
    context.lineTo(x(end), height);
    context.fill();
  }
}
