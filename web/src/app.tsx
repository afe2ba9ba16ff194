// The frame around the views: header, overview of the whole run, current view, selection, keys and dropped files.

import { useEffect, useState } from "preact/hooks";
import { setTheme } from "./colors";
import { Compare } from "./compare";
import { Details } from "./details";
import { Files } from "./files";
import { Flame } from "./flame";
import { count, plural, size, time } from "./format";
import { Live } from "./live";
import { MemoryMap } from "./map";
import { Overview } from "./overview";
import { type State, type View, VIEWS, choose, openDropped, openFile, show, source, stepBy, update, useStore } from "./state";
import { Timeline } from "./timeline";
import { WhatIf } from "./whatif";
import { Why } from "./why";

const NAMES: Record<View, string> = {
  timeline: "Timeline", map: "Map", flame: "Flame graph", why: "Why", whatif: "What if", compare: "Compare", files: "Files", live: "Live",
};

const KEYS: readonly (readonly [string, string])[] = [
  ["1 … 8", "select a view"], ["← →", "previous and next event; with shift by a hundred"], ["P", "select the peak"],
  ["O", "select the out-of-memory error"], ["W S", "zoom the timeline in and out"], ["A D", "pan the timeline"],
  ["0", "show the whole run"], ["/", "search the flame graph"], ["Esc", "clear the selection"], ["?", "show these keys"],
];

function viewsOf({ start }: State): View[] {
  const files = start?.files.length ?? 0;
  return VIEWS.filter((each) => (each === "live" ? start?.live : each === "files" || each === "compare" ? files > 1 : files));
}

export function App() {
  const state = useStore();
  const { start, about, view } = state;
  const [help, setHelp] = useState(false);
  useKeys(() => setHelp((shown) => !shown), () => setHelp(false));
  const dropping = useDrop();
  const wide = view === "live" || view === "files" || view === "compare";
  return (
    <div class="app">
      <header>
        <strong class="brand">vram</strong>
        {start && start.files.length > 1 && (
          <select class="file" aria-label="Recording" value={String(state.file)}
            onChange={(event) => void openFile(Number(event.currentTarget.value))}>
            {start.files.map((each) => <option key={each.file} value={String(each.file)}>{each.name}</option>)}
          </select>
        )}
        {start && start.files.length === 1 && <span class="file">{start.files[0]!.name}</span>}
        {about && <Facts />}
        <span class="spread" />
        <button type="button" class="small quiet" onClick={() => setHelp(true)} title="Keys (?)" aria-label="Keys">?</button>
        <Theme />
      </header>
      <nav aria-label="Views">
        <div role="tablist" aria-label="Views">
          {viewsOf(state).map((each, index) => (
            <button key={each} type="button" role="tab" id={`tab-${each}`} aria-selected={each === view}
              onClick={() => show(each)} title={`${NAMES[each]} (${index + 1})`}>
              {NAMES[each]}
            </button>
          ))}
        </div>
      </nav>
      {state.error && (
        <div class="error" role="alert">
          {state.error} <button type="button" class="small" onClick={() => update({ error: "" }, "join")}>Dismiss</button>
        </div>
      )}
      {state.busy && <Busy />}
      {wide ? (
        <main class="single">
          {view !== "files" && <h1 class="hidden">{NAMES[view]}</h1>}
          {view === "live" && <Live />}
          {view === "files" && <Files />}
          {view === "compare" && !state.busy && <Compare />}
        </main>
      ) : (
        about && (
          <main>
            <div class="stage">
              {view !== "why" && <h1 class="hidden">{NAMES[view]}</h1>}
              <Overview />
              {view === "timeline" && <Timeline />}
              {view === "map" && <MemoryMap />}
              {view === "flame" && <Flame />}
              {view === "why" && <Why />}
              {view === "whatif" && <WhatIf />}
            </div>
            <Details />
          </main>
        )
      )}
      {help && <Help close={() => setHelp(false)} />}
      {dropping && <div class="drop">Drop a recording to open it</div>}
    </div>
  );
}

/** How far reading is. After the whole file is read, its events are indexed. */
function Busy() {
  const { busy, read } = useStore();
  const done = read !== null && read >= 1;
  return (
    <div class="busy" role="status">
      <p>{done ? "Indexing the events …" : `${busy} …`}</p>
      <progress aria-label="Progress of reading" max={1} {...(read === null || done ? {} : { value: read })} />
    </div>
  );
}

function Facts() {
  const { about } = useStore();
  if (!about) return null;
  return (
    <span class="facts">
      <span>{plural(about.events, "event")}</span>
      {about.timed && <span>{time(about.span_us)}</span>}
      <span>peak <span id="peak">{size(about.most["allocated"] ?? 0)}</span></span>
      <span>most reserved {size(about.most["reserved"] ?? 0)}</span>
      {about.devices.length > 1 && <span>device {about.device} of {about.devices.join(", ")}</span>}
      {about.dropped > 0 && <span class="warn">{count(about.dropped)} events lost</span>}
      {about.truncated && <span class="warn">truncated</span>}
      {source.embedded && <span>report</span>}
    </span>
  );
}

const THEMES = [["", "Auto"], ["light", "Light"], ["dark", "Dark"]] as const;

function Theme() {
  const [place, setPlace] = useState(0);
  const next = (): void => {
    const chosen = (place + 1) % THEMES.length;
    setPlace(chosen);
    setTheme(THEMES[chosen]![0]);
  };
  return <button type="button" class="small quiet" onClick={next} title="Switch between light and dark" aria-label={`Theme: ${THEMES[place]![1]}`}>{THEMES[place]![1]}</button>;
}

function Help(props: { close: () => void }) {
  return (
    <div class="veil" onClick={props.close}>
      <div class="help" role="dialog" aria-modal="true" aria-label="Keys" onClick={(event) => event.stopPropagation()}>
        <h2>Keys</h2>
        <dl>{KEYS.map(([keys, what]) => <><dt><kbd>{keys}</kbd></dt><dd>{what}</dd></>)}</dl>
        <p class="dim">In the timeline, drag or use the wheel to zoom, shift-drag to pan, click to select a moment. Back undoes a change. Drop a recording onto the page to open it.</p>
        <button type="button" ref={(button) => button?.focus()} onClick={props.close}>Close</button>
      </div>
    </div>
  );
}

/** Opens files that are dropped onto the page; returns whether one is being dragged over it. */
function useDrop(): boolean {
  const [over, setOver] = useState(false);
  useEffect(() => {
    if (source.embedded) return;
    const drag = (event: DragEvent): void => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      setOver(true);
    };
    const leave = (event: DragEvent): void => void (event.relatedTarget === null && setOver(false));
    const drop = (event: DragEvent): void => {
      event.preventDefault();
      setOver(false);
      const file = event.dataTransfer?.files[0];
      if (file) void openDropped(file);
    };
    addEventListener("dragover", drag);
    addEventListener("dragleave", leave);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", drag);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", drop);
    };
  }, []);
  return over;
}

/** Keyboard shortcuts, active unless the user is typing in a field. */
function useKeys(toggleHelp: () => void, closeHelp: () => void): void {
  const state = useStore();
  const { about } = state;
  useEffect(() => {
    const onKey = (event: KeyboardEvent): void => {
      const target = event.target as HTMLElement;
      if (target.closest("input:not([type=checkbox]), select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      const step = event.shiftKey ? 100 : 1;
      if (event.key === "?") toggleHelp();
      else if (event.key === "ArrowRight") stepBy(step);
      else if (event.key === "ArrowLeft") stepBy(-step);
      else if (event.key === "p" && about) void choose(about.peak);
      else if (event.key === "o" && about?.failures.length) void choose(about.failures.at(-1)!.event);
      else if (event.key === "/") search();
      else if (event.key === "Escape") {
        closeHelp();
        update({ stack: null, stream: null, group: null });
      } else if (/^[1-8]$/.test(event.key)) {
        const view = viewsOf(state)[Number(event.key) - 1];
        if (view) show(view);
      } else return;
      event.preventDefault();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [state.start, about]);
}

function search(): void {
  show("flame");
  setTimeout(() => document.querySelector<HTMLInputElement>("input[type=search]")?.focus());
}
