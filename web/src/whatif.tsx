// What if: a sweep over allocators and their settings, with the settings to copy.

import { useEffect, useState } from "preact/hooks";
import type { SweepState } from "./answers";
import { count, plural, size, time } from "./format";
import { Copy, Meter } from "./parts";
import { message, source, useStore } from "./state";

const POLICIES = ["torch", "torch-expandable", "cuda-async", "vram", "bfc", "rmm-pool", "rmm-arena"];
const FIRST = ["torch", "torch-expandable", "cuda-async", "vram"];

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
  const widest = Math.max(1, ...(answer?.ranked ?? []).map((each) => each.smallest_capacity ?? 0));
  return (
    <section class="view whatif" aria-label="What if">
      <article>
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
        {answer && (
          <>
            <p class="dim">The program allocates {size(answer.peak_allocated)} at its peak. No allocator can need less.</p>
            <table class="wide ranked">
              <thead><tr><th class="number">rank</th><th>allocator</th><th>smallest device</th><th class="number">peak reserved</th>
                <th class="number">retries</th><th class="number">driver</th><th>setting</th></tr></thead>
              <tbody>
                {answer.ranked.map((each) => (
                  <tr key={each.rank}>
                    <td class="number">{each.rank}</td><td class="name">{each.policy}</td>
                    <td>{each.smallest_capacity === null ? "none of those tried" : (
                      <Meter share={0.03 + (0.97 * (each.smallest_capacity - answer.peak_allocated)) / Math.max(1, widest - answer.peak_allocated)}
                        color={each.rank === 1 ? "good" : "live"}>
                        {size(each.smallest_capacity)} <span class="dim">+{(100 * (each.smallest_capacity / answer.peak_allocated - 1)).toFixed(1)} %</span>
                      </Meter>
                    )}</td>
                    <td class="number">{size(each.peak_reserved)}</td><td class="number">{count(each.retries)}</td>
                    <td class="number">{time(each.driver_us)}</td>
                    <td class="setting">{each.environment ? <><code>{each.environment}</code><Copy text={each.environment} /></> : <span class="dim">default</span>}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </>
        )}
      </article>
    </section>
  );
}
