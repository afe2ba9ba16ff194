// The selection: the moment with its event and account, and the stack.

import { count, share, size, time } from "./format";
import { AccountBar, Frames } from "./parts";
import { choose, nameOf, source, stackOf, stepBy, update, useStore } from "./state";

const USABLE = ["true-demand", "rounding", "pending", "fragmentation", "cached", "unused"];

/** The parts that the allocator could use, as in the explanation, which shows the rest of the device as well. */
function usable(parts: Record<string, number>): Record<string, number> {
  return Object.fromEntries(USABLE.map((name) => [name, parts[name] ?? 0]));
}

/** The name of a pinned moment such as `0:1234`. */
export function pinnedName(against: string): string {
  const [file = 0, event = 0] = against.split(":").map(Number);
  return `event ${count(event)} of ${nameOf(file)}`;
}

export function Details() {
  const { about, moment, event, stack, stream, against, file } = useStore();
  if (!about) return null;
  const what = moment?.what;
  const chosen = stack ?? null;
  const found = chosen === null ? undefined : stackOf(chosen);
  return (
    <aside aria-label="Selection" tabIndex={0}>
      <section>
        <h2>Moment</h2>
        <div class="moment">
          <button type="button" class="small" onClick={() => stepBy(-1)} aria-label="Previous event">◀</button>
          <label>event <input type="number" min={0} max={about.events - 1} value={event}
            onChange={(changed) => void choose(Number(changed.currentTarget.value))} /></label>
          <button type="button" class="small" onClick={() => stepBy(1)} aria-label="Next event">▶</button>
        </div>
        <div class="jumps">
          <button type="button" class="small" onClick={() => void choose(about.peak)}>Peak</button>
          {about.failures.length > 0 && (
            <button type="button" class="small alarm" onClick={() => void choose(about.failures.at(-1)!.event)}>Out of memory</button>
          )}
          {!source.embedded && (
            <button type="button" class="small" title="Compare with this moment in the flame graph"
              onClick={() => update({ against: `${file}:${event}` })}>
              Pin
            </button>
          )}
        </div>
        {source.embedded && <p class="dim">This report contains only some moments; the nearest one is shown.</p>}
        {what && (
          <dl>
            <dt>{what.action.replaceAll("_", " ")}</dt><dd>{what.size ? size(what.size) : ""}</dd>
            {about.timed && <><dt>time</dt><dd>{time(what.time_us)}</dd></>}
            {what.step !== null && <><dt>step</dt><dd>{count(what.step)}</dd></>}
            {about.streams.length > 1 && <><dt>stream</dt><dd>{what.stream}</dd></>}
            {what.tag && <><dt>tag</dt><dd>{what.tag}</dd></>}
          </dl>
        )}
        {/^\d+:\d+$/.test(against) && (
          <p class="dim">Pinned: {pinnedName(against)} <button type="button" class="small" onClick={() => update({ against: "" })}>Unpin</button></p>
        )}
      </section>
      {moment && (
        <section>
          <h2>Memory</h2>
          <dl>
            <dt>allocated</dt><dd id="allocated">{size(moment.allocated)}</dd>
            <dt>reserved</dt><dd>{size(moment.reserved)}</dd>
            <dt>fragmented, of reserved</dt><dd id="fragmentation">{share(moment.fragmentation, 1)}</dd>
            <dt>largest free block</dt><dd>{size(moment.largest_free)}</dd>
          </dl>
          <AccountBar parts={usable(moment.parts)} meanings={moment.meanings} />
        </section>
      )}
      {about.streams.length > 1 && (
        <section>
          <h2>Stream</h2>
          <select aria-label="Stream" value={stream ?? ""} onChange={(changed) => update({ stream: changed.currentTarget.value || null })}>
            <option value="">all</option>
            {about.streams.map((each) => <option key={each} value={each}>{each}</option>)}
          </select>
        </section>
      )}
      <section class="stack">
        <h2>Stack</h2>
        {chosen === null ? (
          <p class="dim">Select an allocation, a block or a frame of the flame graph.</p>
        ) : (
          <>
            <p id="stack-label">{found?.label ?? "…"}</p>
            <Frames frames={found?.frames ?? []} />
            <button type="button" class="small" onClick={() => update({ stack: null })}>Clear (Esc)</button>
          </>
        )}
      </section>
    </aside>
  );
}
