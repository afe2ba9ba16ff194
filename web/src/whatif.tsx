// What if: a sweep over allocators and their settings, with the settings to copy.

import { useEffect, useState } from "preact/hooks";
import type { Limit, Ranked, SweepAnswer, SweepState } from "./answers";
import { count, plural, size, time } from "./format";
import { Copy, Meter } from "./parts";
import { message, source, useStore } from "./state";

const POLICIES = ["torch", "torch-expandable", "cuda-async", "vram", "bfc", "rmm-pool", "rmm-arena"];
const FIRST = ["torch", "torch-expandable", "cuda-async", "vram"];

const GIB = 2 ** 30;

/** Kept while the page is open, so that switching views does not lose results. */
const known = new Map<number, SweepState>();

export function WhatIf() {
  const { about, file } = useStore();
  const [policies, setPolicies] = useState(FIRST);
  const [state, setState] = useState<SweepState | null>(known.get(file) ?? null);
  useEffect(() => {
    setState(known.get(file) ?? null);
    if (source.embedded && about) void run();
  }, [file, about]);
  if (!about) return null;
  const run = async (): Promise<void> => {
    const tell = (told: SweepState): void => {
      known.set(file, told);
      setState(told);
    };
    tell({ done: 0, count: 0 });
    await source.sweep(file, policies, tell).catch((error: unknown) => tell({ done: 0, count: 0, error: message(error) }));
  };
  const running = state !== null && !state.answer && state.error === undefined;
  const answer = state?.answer;
  return (
    <section class="view whatif" aria-label="What if">
      <article tabIndex={0}>
        {!source.embedded && (
          <>
            <p class="text">Replay this recording with other allocators and settings, and rank them by the smallest device on which the job completes.</p>
            <fieldset class="toggles">
              <legend class="hidden">Allocators</legend>
              {POLICIES.map((each) => (
                <label key={each} class="toggle">
                  <input type="checkbox" checked={policies.includes(each)} disabled={running}
                    onChange={() => setPolicies(policies.includes(each) ? policies.filter((other) => other !== each) : [...policies, each])} />
                  {each}
                </label>
              ))}
              <button type="button" class="primary" disabled={running || !policies.length} onClick={() => void run()}>
                {running ? "Running …" : answer ? "Run again" : "Run"}
              </button>
            </fieldset>
          </>
        )}
        {running && (
          <p role="status" class="progress">
            <progress value={state.done} max={Math.max(1, state.count)} />
            <span>{state.count ? `${state.done} of ${plural(state.count, "setting")}` : "starting"}</span>
          </p>
        )}
        {state?.error !== undefined && <p class="error" role="alert">{state.error}</p>}
        {answer && <Results answer={answer} limit={about.limit} />}
      </article>
    </section>
  );
}

/** Whether a setting fits: known, or open because only a range of the limit is known. */
type Fit = "fits" | "may fit" | "does not fit";

function fitOf(needs: number | null, lowest: number, below: number | null): Fit {
  if (needs === null) return "does not fit";
  if (needs <= lowest) return "fits";
  return below !== null && needs < below ? "may fit" : "does not fit";
}

/** One row for each allocator, with its best setting; the others are collapsed. */
function Results(props: { answer: SweepAnswer; limit: Limit }) {
  const { answer, limit } = props;
  const [typed, setTyped] = useState("");
  const wish = Number(typed.replace(",", "."));
  const own = typed.trim() !== "" && wish > 0;
  const lowest = own ? wish * GIB : limit.bytes;
  const below = own || limit.known ? null : limit.below;
  const policies = [...new Set(answer.ranked.map((each) => each.policy))];
  const widest = Math.max(1, ...answer.ranked.map((each) => each.smallest_capacity ?? 0));
  const fit = (each: Ranked): Fit | null => (lowest === null ? null : fitOf(each.smallest_capacity, lowest, below));
  const known = lowest === null ? "" : below !== null ? `${size(lowest)} to ${size(below)}` : size(lowest);
  return (
    <>
      <p>The program requests {size(answer.peak_allocated)} at its peak. No allocator can need less.</p>
      <p class="tools fit"><label class="choice">Fit to a device or limit of <input type="number" aria-label="Limit in GiB" min="0" step="any" value={typed}
        placeholder={limit.bytes === null ? "" : (limit.bytes / GIB).toFixed(2)} onInput={(event) => setTyped(event.currentTarget.value)} /> GiB</label>
        <span class="dim" id="limit">{known ? `compared with ${own ? "" : "the recorded limit, "}${known}` : "the recording has no limit; enter one"}</span></p>
      <table class="wide ranked">
        <thead><tr><th class="number">rank</th><th>allocator</th><th>smallest device</th><th>fit</th><th class="number">peak reserved</th>
          <th class="number">retries</th><th class="number">driver</th><th>setting</th></tr></thead>
        {policies.map((policy) => {
          const rows = answer.ranked.filter((each) => each.policy === policy);
          return <Policy key={policy} rows={rows} answer={answer} widest={widest} fit={fit} />;
        })}
      </table>
    </>
  );
}

function Policy(props: { rows: Ranked[]; answer: SweepAnswer; widest: number; fit: (each: Ranked) => Fit | null }) {
  const { rows, answer, widest, fit } = props;
  const [open, setOpen] = useState(false);
  const least = answer.peak_allocated;
  return (
    <tbody>
      {(open ? rows : rows.slice(0, 1)).map((each, index) => (
        <tr key={each.rank} class={index ? "other" : "best"}>
          <td class="number">{each.rank}</td>
          <td class="name">{index ? "" : each.policy}{index === 0 && rows.length > 1 && (
            <button type="button" class="small more" aria-expanded={open} onClick={() => setOpen(!open)}>
              {open ? "fewer" : `${plural(rows.length - 1, "more setting")}`}</button>)}</td>
          <td>{each.smallest_capacity === null ? "none of those tried" : (
            <Meter share={0.03 + (0.97 * (each.smallest_capacity - least)) / Math.max(1, widest - least)} color={each.rank === 1 ? "good" : "live"}>
              {size(each.smallest_capacity)} <span class="dim">+{(100 * (each.smallest_capacity / least - 1)).toFixed(1)} %</span>
            </Meter>
          )}</td>
          <td>{fit(each) && <span class={`badge ${fit(each) === "fits" ? "good" : "quiet"}`}>{fit(each)}</span>}</td>
          <td class="number">{size(each.peak_reserved)}</td><td class="number">{count(each.retries)}</td>
          <td class="number">{time(each.driver_us)}</td>
          <td class="setting">{each.environment ? <><code>{each.environment}</code><Copy text={each.environment} /></> : <span class="dim">default</span>}</td>
        </tr>
      ))}
    </tbody>
  );
}
