// Why: the explanation of `vram explain` for the selected moment: what happened, the evidence, and what to do next.

import { useEffect, useState } from "preact/hooks";
import type { Remedy, Why as Answer } from "./answers";
import { functionFirst, plural, share, size } from "./format";
import { AccountBar, Copy, Frames, Meter } from "./parts";
import { message, show, source, update, useStore } from "./state";

export function Why() {
  const { about, file, event } = useStore();
  const [answer, setAnswer] = useState<Answer | null>(null);
  useEffect(() => {
    if (!about) return;
    const asking = new AbortController();
    source.ask<Answer>("why", { file, event }, asking.signal).then(
      (found) => setAnswer(found),
      (error: unknown) => asking.signal.aborted || update({ error: message(error) }, "join"),
    );
    return () => asking.abort();
  }, [about, file, event]);
  if (!answer) return <section class="view why"><p class="dim">Loading …</p></section>;
  return (
    <section class="view why" aria-label="Why">
      <article tabIndex={0}>
        <h1 class="headline">{headline(answer)}</h1>
        <p class="verdict"><span class={`badge ${answer.request ? "alarm" : ""}`} id="verdict">{answer.verdict}</span>
          <span class="lead">{capital(answer.reason)}</span></p>
        <NextStep answer={answer} />
        <Evidence answer={answer} />
        <Holders answer={answer} />
      </article>
    </section>
  );
}

function headline({ request, at, allocated, reserved }: Answer): string {
  const held = `with ${size(allocated)} allocated and ${size(reserved)} reserved`;
  if (request) return `Out of memory: failed to allocate ${size(request.size)}, ${held}`;
  return `${at.kind === "peak" ? "The peak" : `Event ${at.event}`}: ${size(allocated)} allocated, ${size(reserved)} reserved`;
}

function capital(text: string): string {
  return text.startsWith("vram") ? text : text.charAt(0).toUpperCase() + text.slice(1);
}

function NextStep(props: { answer: Answer }) {
  const [first, ...others] = props.answer.remedies;
  return (
    <section class="next" aria-label="Next step">
      <h2>Next step</h2>
      {first ? <ul class="remedies first"><RemedyLine remedy={first} /></ul> : <p>Nothing to change here. Look at another moment, or at the largest holders below.</p>}
      {others.length > 0 && (
        <details open={others.length < 7}><summary>{plural(others.length, "more option")}</summary>
          <ul class="remedies">{others.map((each, index) => <RemedyLine key={index} remedy={each} />)}</ul></details>
      )}
      <p><button type="button" class="small" onClick={() => show("whatif")}>Try other allocators</button>{" "}
        <button type="button" class="small" onClick={() => show("flame")}>See who holds memory</button></p>
    </section>
  );
}

function Evidence(props: { answer: Answer }) {
  const { answer } = props;
  return (
    <section aria-label="Evidence">
      <h2>Evidence</h2>
      <p class="text">{answer.headline}</p>
      <AccountBar parts={near(answer.bytes)} meanings={answer.meanings} legend={false} />
      <table class="wide">
        <thead><tr><th>memory</th><th class="number">size</th><th class="number">of usable</th><th>meaning</th></tr></thead>
        <tbody>
          {Object.entries(answer.bytes).filter(([, bytes]) => bytes > 0).map(([name, bytes]) => (
            <tr key={name}><td>{name}</td><td class="number">{size(bytes)}</td><td class="number">{shareOf(answer.shares[name] ?? null)}</td>
              <td class="dim">{answer.meanings[name]}</td></tr>
          ))}
          {answer.request && <tr class="request"><td>request</td><td class="number">{size(answer.request.size)}</td><td /><td class="dim">failed; the largest free block has {size(answer.largest_free)}</td></tr>}
        </tbody>
      </table>
      {answer.doubts.map((each) => <p key={each} class="text dim">{each}</p>)}
      {answer.request && answer.request.frames.length > 0 && (
        <details><summary>Stack of the request</summary><Frames frames={answer.request.frames} /></details>
      )}
    </section>
  );
}

function Holders(props: { answer: Answer }) {
  const { answer } = props;
  const [by, setBy] = useState("stack");
  return (
    <section aria-label="Holders">
      <h2>What holds memory</h2>
      <div class="segmented" role="group" aria-label="Group by">
        {Object.keys(answer.holders).map((each) => (
          <button key={each} type="button" class="small" aria-pressed={each === by} onClick={() => setBy(each)}>{each}</button>
        ))}
      </div>
      <table class="wide holders">
        <thead><tr><th>{by}</th><th class="number">size</th><th class="number">blocks</th></tr></thead>
        <tbody>
          {(answer.holders[by] ?? []).slice(0, 30).map((each, index) => (
            <tr key={index}><td><Meter share={each.bytes / Math.max(1, answer.allocated)}>{functionFirst(each.group)}</Meter></td>
              <td class="number">{size(each.bytes)}</td><td class="number">{each.blocks}</td></tr>
          ))}
        </tbody>
      </table>
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
      <span>{capital(what)}{evidence && `: ${evidence}`}</span>
      {setting && <><code>{setting}</code><Copy text={setting} /></>}
    </li>
  );
}
