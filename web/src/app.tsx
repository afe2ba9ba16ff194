// The frame around the views: header, overview of the whole run, current view, and selection.

import { useEffect, useState } from "preact/hooks";
import { setTheme } from "./colors";
import { Details } from "./details";
import { Flame } from "./flame";
import { count, plural, size, time } from "./format";
import { Live } from "./live";
import { MemoryMap } from "./map";
import { Overview } from "./overview";
import { choose, openFile, show, source, stepBy, update, useStore, type View } from "./state";
import { Timeline } from "./timeline";
import { WhatIf } from "./whatif";
import { Why } from "./why";

const NAMES: Record<View, string> = {
  timeline: "Timeline", map: "Map", flame: "Flame graph", why: "Why", whatif: "What if", live: "Live",
};

export function App() {
  const state = useStore();
  const { start, about, view } = state;
  useKeys();
  const views = (Object.keys(NAMES) as View[]).filter((each) => (each === "live" ? start?.live : start?.files.length));
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
        <Theme />
      </header>
      <nav role="tablist" aria-label="Views">
        {views.map((each, index) => (
          <button key={each} type="button" role="tab" id={`tab-${each}`} aria-selected={each === view}
            onClick={() => show(each)} title={`${NAMES[each]} (${index + 1})`}>
            {NAMES[each]}
          </button>
        ))}
      </nav>
      {state.error && (
        <div class="error" role="alert">
          {state.error} <button type="button" class="small" onClick={() => update({ error: "" })}>Dismiss</button>
        </div>
      )}
      {state.busy && <div class="busy" role="status">{state.busy}</div>}
      {view === "live" ? (
        <main class="single"><Live /></main>
      ) : (
        about && (
          <>
            <Overview />
            <main>
              {view === "timeline" && <Timeline />}
              {view === "map" && <MemoryMap />}
              {view === "flame" && <Flame />}
              {view === "why" && <Why />}
              {view === "whatif" && <WhatIf />}
              <Details />
            </main>
          </>
        )
      )}
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
      <span>peak {size(about.most["allocated"] ?? 0)}</span>
      <span>reserved {size(about.most["reserved"] ?? 0)}</span>
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
  return <button type="button" class="small quiet" onClick={next} title="Switch between light and dark" aria-label="Theme">{THEMES[place]![1]}</button>;
}

/** Keyboard shortcuts, active unless the user is typing in a field. */
function useKeys(): void {
  const { start, about } = useStore();
  useEffect(() => {
    const onKey = (event: KeyboardEvent): void => {
      const target = event.target as HTMLElement;
      if (target.closest("input:not([type=checkbox]), select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      const step = event.shiftKey ? 100 : 1;
      if (event.key === "ArrowRight") stepBy(step);
      else if (event.key === "ArrowLeft") stepBy(-step);
      else if (event.key === "p" && about) void choose(about.peak);
      else if (event.key === "Escape") update({ stack: null, stream: null });
      else if (/^[1-6]$/.test(event.key) && start) {
        const views = (Object.keys(NAMES) as View[]).filter((each) => (each === "live" ? start.live : start.files.length));
        const view = views[Number(event.key) - 1];
        if (view) show(view);
      } else return;
      event.preventDefault();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [start, about]);
}
