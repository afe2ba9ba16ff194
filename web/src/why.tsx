// Why: the explanation of `vram explain` for the selected moment.

import { useEffect, useState } from "preact/hooks";
import type { Remedy, Why as Answer } from "./answers";
import { share, size } from "./format";
import { AccountBar, Copy, Frames, Meter } from "./parts";
import { message, source, update, useStore } from "./state";

export function Why() {
  const { about, file, event } = useStore();
  const [answer, setAnswer] = useState<Answer | null>(null);
  const [by, setBy] = useState("stack");
  useEffect(() => {
    if (!about) return;
    const asking = new AbortController();
    source.ask<Answer>("why", { file, event }, asking.signal).then(
      (found) => setAnswer(found),
      (error: unknown) => asking.signal.aborted || update({ error: message(error) }),
    );
    return () => asking.abort();
  }, [about, file, event]);
  if (!answer) return <section class="view why"><p class="dim">Loading …</p></section>;
  const holders = answer.holders[by] ?? [];
  return (
    <section class="view why" aria-label="Why">
      <article>
        <p class="verdict"><span class={`badge ${answer.request ? "alarm" : ""}`} id="verdict">{answer.verdict}</span>
          <span class="dim">{answer.request ? `failed to allocate ${size(answer.request.size)}` : "no allocation failed here"}</span></p>
        <p class="text">{answer.text}</p>
        <h2>Where the memory is</h2>
        <AccountBar parts={near(answer.bytes)} meanings={answer.meanings} legend={false} />
        <table class="wide">
          <thead><tr><th>memory</th><th class="number">size</th><th class="number">share</th><th>meaning</th></tr></thead>
          <tbody>
            {Object.entries(answer.bytes).filter(([, bytes]) => bytes > 0).map(([name, bytes]) => (
              <tr key={name}><td>{name}</td><td class="number">{size(bytes)}</td><td class="number">{shareOf(answer.shares[name] ?? null)}</td>
                <td class="dim">{answer.meanings[name]}</td></tr>
            ))}
          </tbody>
        </table>
        {answer.remedies.length > 0 && (
          <>
            <h2>What would have helped</h2>
            <ul class="remedies">{answer.remedies.map((each, index) => <RemedyLine key={index} remedy={each} />)}</ul>
          </>
        )}
        {answer.request && answer.request.frames.length > 0 && (
          <details><summary>Stack of the request</summary><Frames frames={answer.request.frames} /></details>
        )}
        <h2>What holds memory</h2>
        <div class="segmented" role="group" aria-label="Group by">
          {Object.keys(answer.holders).map((each) => (
            <button key={each} type="button" class="small" aria-pressed={each === by} onClick={() => setBy(each)}>{each}</button>
          ))}
        </div>
        <table class="wide">
          <thead><tr><th>{by}</th><th class="number">size</th><th class="number">blocks</th></tr></thead>
          <tbody>
            {holders.slice(0, 30).map((each, index) => (
              <tr key={index}><td><Meter share={each.bytes / Math.max(1, answer.allocated)}>{each.group}</Meter></td>
                <td class="number">{size(each.bytes)}</td><td class="number">{each.blocks}</td></tr>
            ))}
          </tbody>
        </table>
      </article>
    </section>
  );
}

/** Omit parts that were never available to the program, which may be much larger than the rest. */
function near(parts: Record<string, number>): Record<string, number> {
  return Object.fromEntries(Object.entries(parts).filter(([name]) => name !== "withheld"));
}

function shareOf(part: number | null): string {
  return part === null ? "" : share(part, 1);
}

function RemedyLine(props: { remedy: Remedy }) {
  const { what, setting, fits, evidence } = props.remedy;
  return (
    <li>
      {evidence && <span class={`badge ${fits ? "good" : "quiet"}`}>{fits === null ? "may fit" : fits ? "fits" : "does not fit"}</span>}
      <span>{what}{evidence && `: ${evidence}`}</span>
      {setting && <><code>{setting}</code><Copy text={setting} /></>}
    </li>
  );
}
