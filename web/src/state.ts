// One selection for all views: recording, moment, range of time, stack and stream.

import { useEffect, useState } from "preact/hooks";
import type { About, Moment, Stack, Start } from "./answers";
import { openSource } from "./source";

export const source = openSource();

export const VIEWS = ["timeline", "map", "flame", "why", "whatif", "live"] as const;
export type View = (typeof VIEWS)[number];
export type Axis = "time" | "event";

/** A moment to compare with. */
export interface Pinned { file: number; event: number; name: string }

export interface State {
  start: Start | null;
  file: number;
  about: About | null;
  view: View;
  axis: Axis;
  /** The visible range of the axis. */
  low: number;
  high: number;
  /** The selected moment is after this event. */
  event: number;
  moment: Moment | null;
  stack: number | null;
  stream: string | null;
  pinned: Pinned | null;
  error: string;
  busy: string;
}

let state: State = {
  start: null, file: 0, about: null, view: "timeline", axis: "time", low: 0, high: 1, event: -1, moment: null,
  stack: null, stream: null, pinned: null, error: "", busy: "",
};
const listeners = new Set<() => void>();

export function current(): State {
  return state;
}

export function update(change: Partial<State>): void {
  state = { ...state, ...change };
  for (const listener of listeners) listener();
}

export function useStore(): State {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = (): void => again((count) => count + 1);
    listeners.add(listener);
    listener(); // the state may have changed since the last draw
    return () => void listeners.delete(listener);
  }, []);
  return state;
}

// ---- selection ----

export async function begin(): Promise<void> {
  try {
    const start = await source.ask<Start>("start");
    const wish = new URLSearchParams(location.hash.slice(1));
    const view = VIEWS.find((each) => each === wish.get("view"));
    update({ start, view: view ?? (start.files.length || !start.live ? "timeline" : "live") });
    const file = Number(wish.get("file") ?? 0);
    if (start.files.length) await openFile(start.files[file] ? file : 0, Number(wish.get("event") ?? -1));
  } catch (error) {
    update({ error: message(error) });
  }
}

export async function openFile(file: number, event = -1): Promise<void> {
  const name = state.start?.files[file]?.name ?? "";
  update({ file, about: null, moment: null, stack: null, stream: null, error: "", busy: `Reading ${name} …` });
  stacks.clear();
  try {
    const about = await source.ask<About>("about", { file });
    if (state.file !== file) return;
    const axis: Axis = about.timed ? "time" : "event";
    update({ about, axis, low: 0, high: extent(about, axis), busy: "" });
    await choose(event >= 0 && event < about.events ? event : about.start);
  } catch (error) {
    update({ busy: "", error: message(error) });
  }
}

export function extent(about: About, axis: Axis): number {
  return Math.max(1, axis === "time" ? about.span_us : about.events);
}

let asked = 0;
let waiting: number | null = null;
let running = false;

/** Select a moment. While one is being fetched, only the last request is kept. */
export async function choose(event: number): Promise<void> {
  const { about } = state;
  if (!about) return;
  const wish = Math.max(Math.min(event, about.events - 1), about.events ? 0 : -1);
  update({ event: wish });
  remember();
  if (running) {
    waiting = wish;
    return;
  }
  running = true;
  const number = ++asked;
  try {
    const moment = await source.ask<Moment>("moment", { file: state.file, event: wish });
    if (number === asked && state.about === about) {
      update({ moment, error: "", event: waiting === null ? moment.event : state.event });
    }
  } catch (error) {
    update({ error: message(error) });
  }
  running = false;
  if (waiting !== null) {
    const next = waiting;
    waiting = null;
    await choose(next);
  }
}

/** Move by some events; in a report, to the next moment that it contains. */
export function stepBy(count: number): void {
  void choose(state.event + count);
}

export async function chooseAt(x: number): Promise<void> {
  const { event } = await source.ask<{ event: number }>("event", { file: state.file, axis: state.axis, x });
  await choose(event);
}

export function show(view: View): void {
  update({ view });
  remember();
}

/** Store the view and the moment in the address, so that a reload shows the same. */
function remember(): void {
  const kept = new URLSearchParams(location.hash.slice(1));
  kept.set("view", state.view);
  kept.set("file", String(state.file));
  kept.set("event", String(state.event));
  history.replaceState(null, "", `#${kept}`);
}

export function message(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

// ---- stacks, fetched once ----

const stacks = new Map<number, Stack>();
let wanted = new Set<number>();

export function stackOf(number: number): Stack | undefined {
  const found = stacks.get(number);
  if (!found && state.about) {
    if (!wanted.size) queueMicrotask(fetchStacks);
    wanted.add(number);
  }
  return found;
}

async function fetchStacks(): Promise<void> {
  const numbers = [...wanted].slice(0, 500);
  const { file } = state;
  const answer = await source.ask<{ stacks: Record<string, Stack> }>("stacks", { file, numbers: numbers.join(",") });
  wanted = new Set([...wanted].filter((each) => !numbers.includes(each)));
  if (wanted.size) queueMicrotask(fetchStacks);
  if (file !== state.file) return;
  for (const [number, stack] of Object.entries(answer.stacks)) stacks.set(Number(number), stack);
  update({});
}
