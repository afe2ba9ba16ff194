// One selection for all views: recording, moment, range of time, stack, stream and what is compared. The address
// has all of it, so that a link shows the same and Back undoes a change.

import { useEffect, useState } from "preact/hooks";
import type { About, FileName, Moment, Reading, Stack, Start } from "./answers";
import { openSource } from "./source";

export const source = openSource();

export const VIEWS = ["timeline", "map", "flame", "why", "whatif", "compare", "files", "live"] as const;
export type View = (typeof VIEWS)[number];
export type Axis = "time" | "event";
export const SPLITS = ["allocations", "stream", "tag", "module", "line", "none"] as const;
export type Split = (typeof SPLITS)[number];
export const LINES = ["reserved", "allocated", "pending", "cached", "free"] as const;
export type Line = (typeof LINES)[number];
export const TREES = ["stack", "module", "tag", "stream"] as const;
export type Tree = (typeof TREES)[number];

export interface State {
  start: Start | null;
  file: number;
  /** The recording to compare with. */
  other: number | null;
  about: About | null;
  view: View;
  axis: Axis;
  /** The visible range of the axis. */
  low: number;
  high: number;
  split: Split;
  lines: readonly Line[];
  /** The selected moment is after this event. */
  event: number;
  moment: Moment | null;
  stack: number | null;
  stream: string | null;
  /** The selected group of the bands. */
  group: string | null;
  /** The flame graph: first level, moment to compare with (`start`, `peak:FILE` or `FILE:EVENT`), search. */
  by: Tree;
  against: string;
  term: string;
  inverted: boolean;
  hidden: boolean;
  /** The number of stacks that are known. */
  stacks: number;
  error: string;
  busy: string;
  /** How much of the file is read, from 0 to 1. */
  read: number | null;
}

const FIRST_LINES: readonly Line[] = ["reserved", "allocated", "pending"];
const CHOICES = {
  split: "allocations", lines: FIRST_LINES, by: "stack", against: "", term: "", inverted: false, hidden: false, other: null,
} as const;

let state: State = {
  start: null, file: 0, about: null, view: "timeline", axis: "time", low: 0, high: 1, event: -1, moment: null,
  stack: null, stream: null, group: null, stacks: 0, error: "", busy: "", read: null, ...CHOICES,
};
const listeners = new Set<() => void>();

export function current(): State {
  return state;
}

/** How a change enters the history: as an entry of its own, or as part of the last one. */
export type Entry = "push" | "join";

export function update(change: Partial<State>, entry: Entry = "push"): void {
  state = { ...state, ...change };
  remember(entry);
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

// ---- the address ----

let token = "";
let written = "";

function round(value: number): string {
  return String(Math.round(value * 100) / 100);
}

/** The selection as the part of the address after #; what has its default is left out. */
function address(): string {
  const { about } = state;
  const kept = new URLSearchParams();
  if (token) kept.set("token", token);
  kept.set("view", state.view);
  if (state.start?.files.length) kept.set("file", String(state.file));
  if (about) {
    kept.set("event", String(state.event));
    if (state.axis !== firstAxis(about)) kept.set("axis", state.axis);
    if (state.low > 0 || state.high < extent(about, state.axis)) kept.set("range", `${round(state.low)},${round(state.high)}`);
  }
  for (const name of ["stack", "stream", "group", "other"] as const) {
    if (state[name] !== null) kept.set(name, String(state[name]));
  }
  for (const name of ["split", "by", "against", "term"] as const) {
    if (state[name] !== CHOICES[name]) kept.set(name, state[name]);
  }
  if (state.lines.join() !== FIRST_LINES.join()) kept.set("lines", state.lines.join("."));
  for (const name of ["inverted", "hidden"] as const) if (state[name]) kept.set(name, "1");
  return `#${kept}`;
}

function remember(entry: Entry): void {
  if (!state.start || (state.start.files.length && !state.about && state.view !== "files" && state.view !== "live")) return;
  const next = address();
  if (next === written) return;
  // The first state of a file is no change of the user's: it completes the address.
  if (entry === "push" && written) history.pushState(null, "", next);
  else history.replaceState(null, "", next);
  written = next;
}

function among<T extends string>(all: readonly T[], wish: string | null, otherwise: T): T {
  return all.find((each) => each === wish) ?? otherwise;
}

function numberOf(wish: string | null): number | null {
  return wish !== null && /^\d{1,12}$/.test(wish) ? Number(wish) : null;
}

/** What an address says that does not depend on the recording. */
function choicesOf(wish: URLSearchParams): Partial<State> {
  const lines = wish.get("lines");
  const other = numberOf(wish.get("other"));
  return {
    stack: numberOf(wish.get("stack")), stream: wish.get("stream"), group: wish.get("group"),
    other: other !== null && state.start?.files[other] ? other : null,
    split: among(SPLITS, wish.get("split"), CHOICES.split), by: among(TREES, wish.get("by"), CHOICES.by),
    lines: lines === null ? FIRST_LINES : LINES.filter((each) => lines.split(".").includes(each)),
    against: wish.get("against") ?? "", term: wish.get("term") ?? "",
    inverted: wish.get("inverted") === "1", hidden: wish.get("hidden") === "1",
  };
}

/** What an address says about one recording. */
function placeOf(wish: URLSearchParams, about: About): Pick<State, "axis" | "low" | "high"> {
  const axis = about.timed ? among(["time", "event"] as const, wish.get("axis"), "time") : "event";
  const end = extent(about, axis);
  const [low = NaN, high = NaN] = (wish.get("range") ?? "").split(",").map(Number);
  return low >= 0 && low < high ? { axis, low, high: Math.min(high, end) } : { axis, low: 0, high: end };
}

/** Show what the address says: the user went back or forward, or changed it. */
async function restore(): Promise<void> {
  if (location.hash === written) return;
  const wish = new URLSearchParams(location.hash.slice(1));
  written = location.hash;
  const file = numberOf(wish.get("file")) ?? 0;
  const view = among(VIEWS, wish.get("view"), state.view);
  if (state.start?.files[file] && (file !== state.file || !state.about)) {
    update({ view, ...choicesOf(wish) }, "join");
    await openFile(file, wish);
  } else if (state.about) {
    update({ view, ...choicesOf(wish), ...placeOf(wish, state.about) }, "join");
    await choose(numberOf(wish.get("event")) ?? state.event, "join");
  } else update({ view, ...choicesOf(wish) }, "join");
}

// ---- selection ----

export async function begin(): Promise<void> {
  try {
    const wish = new URLSearchParams(location.hash.slice(1));
    token = wish.get("token") ?? "";
    const start = await source.ask<Start>("start");
    state = { ...state, start };
    addEventListener("popstate", () => void restore());
    const index = Boolean(start.folder) && start.files.length > 1 && !wish.has("file");
    const first: View = !start.files.length && start.live ? "live" : index ? "files" : "timeline";
    update({ view: among(VIEWS, wish.get("view"), first), ...choicesOf(wish) }, "join");
    const file = numberOf(wish.get("file")) ?? 0;
    if (start.files.length && (state.view !== "files" || wish.has("file"))) await openFile(start.files[file] ? file : 0, wish);
  } catch (error) {
    update({ error: message(error) }, "join");
  }
}

/** Open a recording: at its out-of-memory or its peak, or where `wish` says. If it should `land`, in its first view. */
export async function openFile(file: number, wish?: URLSearchParams, land = state.view === "files"): Promise<void> {
  const name = state.start?.files[file]?.name ?? "";
  const left: Partial<State> = wish ? {} : { stack: null, stream: null, group: null, term: "", other: state.other === file ? null : state.other };
  state = { ...state, file, about: null, moment: null, stacks: 0, ...left };
  update({ error: "", busy: `Reading ${name}`, read: 0 }, "join");
  stacks.clear();
  const watching = new AbortController();
  void watchReading(file, watching.signal);
  try {
    const about = await source.ask<About>("about", { file });
    watching.abort();
    if (state.file !== file) return;
    const given = wish ?? new URLSearchParams();
    const landing: View = about.failures.length ? "why" : "timeline";
    const view = wish?.has("view") || !(wish || land) ? state.view : landing;
    const event = numberOf(given.get("event"));
    state = { ...state, event: event !== null && event < about.events ? event : about.start };
    update({ about, view, ...placeOf(given, about), busy: "", read: null }, wish ? "join" : "push");
    await choose(state.event, "join");
  } catch (error) {
    watching.abort();
    if (state.file === file) update({ busy: "", read: null, error: message(error) }, "join");
  }
}

const LOOK_MS = 120;

/** Follow how much of a file is read. */
async function watchReading(file: number, signal: AbortSignal): Promise<void> {
  while (!source.embedded && !signal.aborted) {
    const found = await source.ask<Reading>("reading", { file }, signal).catch(() => null);
    if (signal.aborted || state.file !== file) return;
    if (found) update({ read: found.bytes ? found.done / found.bytes : 0 }, "join");
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
  }
}

/** Send a file that was dropped onto the page, and open it. */
export async function openDropped(file: File): Promise<void> {
  update({ error: "", busy: `Sending ${file.name}`, read: null }, "join");
  try {
    const answer = await source.send(file);
    state = { ...state, start: { ...state.start!, files: answer.files } };
    if (state.view === "live") state = { ...state, view: "files" };
    await openFile(answer.file);
  } catch (error) {
    update({ busy: "", error: message(error) }, "join");
  }
}

function firstAxis(about: About): Axis {
  return about.timed ? "time" : "event";
}

export function extent(about: About, axis: Axis): number {
  return Math.max(1, axis === "time" ? about.span_us : about.events);
}

let waiting: number | null = null;
let running = false;

/** Select a moment. While one is being fetched, only the last request is kept. */
export async function choose(event: number, entry: Entry = "push"): Promise<void> {
  const { about } = state;
  if (!about) return;
  const wish = Math.max(Math.min(event, about.events - 1), about.events ? 0 : -1);
  update({ event: wish }, entry);
  if (running) {
    waiting = wish;
    return;
  }
  running = true;
  try {
    const moment = await source.ask<Moment>("moment", { file: state.file, event: wish });
    if (state.about === about) update({ moment, error: "", event: waiting === null ? moment.event : state.event }, "join");
  } catch (error) {
    update({ error: message(error) }, "join");
  }
  running = false;
  if (waiting !== null) {
    const next = waiting;
    waiting = null;
    await choose(next, "join");
  }
}

/** Move by some events; in a report, to the next moment that it contains. */
export function stepBy(count: number): void {
  void choose(state.event + count, "join");
}

export async function chooseAt(x: number, entry: Entry = "push"): Promise<void> {
  const { event } = await source.ask<{ event: number }>("event", { file: state.file, axis: state.axis, x });
  await choose(event, entry);
}

export function show(view: View): void {
  update({ view });
  if (!state.about && !state.busy && state.start?.files.length && view !== "files" && view !== "live") void openFile(state.file);
}

export function nameOf(file: number | null): string {
  return state.start?.files.find((each: FileName) => each.file === file)?.name ?? "";
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
  update({ stacks: stacks.size }, "join");
}
