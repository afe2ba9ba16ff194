// Compare: two recordings side by side on the same scale, and where the memory at their peaks differs.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Difference, Level, Summary } from "./answers";
import { css } from "./colors";
import { functionFirst, plural, share, signed, size, time } from "./format";
import { drawSteps, topOf } from "./overview";
import { Choice, prepared, useSize, useTheme } from "./parts";
import { message, nameOf, openFile, source, update, useStore } from "./state";

const HEIGHT = 180;
const BY = [["line", "line"], ["module", "module"], ["tag", "tag"], ["stream", "stream"]] as const;

interface Side { file: number; summary: Summary; level: Level }

async function read(file: number, signal: AbortSignal): Promise<Side> {
  const summary = await source.ask<Summary>("summary", { file }, signal);
  const axis = summary.timed ? "time" : "event";
  const high = Math.max(1, summary.timed ? summary.span_us : summary.events);
  return { file, summary, level: await source.ask<Level>("level", { file, axis, low: 0, high, columns: 600 }, signal) };
}

export function Compare() {
  const { start, file, other } = useStore();
  const files = start?.files ?? [];
  const second = other !== null && other !== file ? other : (files.find((each) => each.file !== file)?.file ?? file);
  const [sides, setSides] = useState<[Side, Side] | null>(null);
  const [by, setBy] = useState<(typeof BY)[number][0]>("line");
  const [found, setFound] = useState<Difference | null>(null);
  useEffect(() => {
    const asking = new AbortController();
    const load = async (): Promise<void> => {
      const one = await read(file, asking.signal); // one after the other: reading is what takes long
      setSides([one, await read(second, asking.signal)]);
    };
    setSides(null);
    load().catch((error: unknown) => asking.signal.aborted || update({ error: message(error) }, "join"));
    return () => asking.abort();
  }, [file, second]);
  useEffect(() => {
    const asking = new AbortController();
    setFound(null);
    source.ask<Difference>("difference", { file: second, against_file: file, by }, asking.signal)
      .then(setFound, (error: unknown) => asking.signal.aborted || update({ error: message(error) }, "join"));
    return () => asking.abort();
  }, [file, second, by]);
  const options = files.filter((each) => each.file !== file).map((each) => [String(each.file), each.name] as const);
  const top = sides ? Math.max(topOf(sides[0].level), topOf(sides[1].level)) : 1;
  return (
    <section class="view compare" aria-label="Compare">
      <article tabIndex={0}>
        <div class="tools">
          <b>{nameOf(file)}</b>
          <Choice label="with" value={String(second)} options={options} onChange={(next) => update({ other: Number(next) })} />
          <button type="button" class="small" onClick={() => void swap(second, file)}>Swap</button>
        </div>
        {!sides && <p class="dim" role="status">Reading …</p>}
        {sides && (
          <>
            <div class="sides">{sides.map((each) => <Panel key={each.file} side={each} top={top} />)}</div>
            <Numbers sides={sides} />
          </>
        )}
        {found && (
          <>
            <h2>What holds more or less at the peak</h2>
            <div class="tools"><Choice label="By" value={by} options={BY} onChange={setBy} />
              <span>{size(found.before)} → {size(found.after)} <b id="gap">{signed(found.gap)}</b></span></div>
            <table class="wide differences">
              <thead><tr><th>{by}</th><th class="number">first</th><th class="number">second</th><th class="number">difference</th></tr></thead>
              <tbody>
                {found.groups.map((each) => (
                  <tr key={each.group}><td>{functionFirst(each.group)}</td><td class="number">{size(each.before)}</td>
                    <td class="number">{size(each.after)}</td><td class={`number ${each.gap > 0 ? "more" : "less"}`}>{signed(each.gap)}</td></tr>
                ))}
                {found.groups.length === 0 && <tr><td colSpan={4} class="dim">Both hold the same.</td></tr>}
              </tbody>
            </table>
          </>
        )}
      </article>
    </section>
  );
}

async function swap(next: number, before: number): Promise<void> {
  update({ other: before }, "join");
  await openFile(next, new URLSearchParams({ view: "compare" }));
  update({ other: before }, "join");
}

function Panel(props: { side: Side; top: number }) {
  const { side: { file, summary, level }, top } = props;
  const theme = useTheme();
  const [box, width] = useSize<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    if (!canvas.current || width < 40) return;
    const context = prepared(canvas.current, width, HEIGHT);
    const end = Math.max(1, summary.timed ? summary.span_us : summary.events);
    drawSteps(context, level, (value) => (value / end) * width, top, HEIGHT, end);
    if (summary.failed !== null) {
      context.fillStyle = css("alarm");
      context.fillRect(width - 2, 0, 2, HEIGHT);
    }
  }, [level, top, width, theme]);
  const words = `${nameOf(file)}: peak ${size(summary.most["allocated"] ?? 0)}, most reserved ${size(summary.most["reserved"] ?? 0)}`;
  return (
    <figure ref={box}>
      <figcaption><button type="button" class="link" onClick={() => void openFile(file, undefined, true)}>{nameOf(file)}</button>
        {" "}<span class={`badge ${summary.failed === null ? "quiet" : "alarm"}`}>{summary.failed === null ? "completed" : "out of memory"}</span></figcaption>
      <canvas ref={canvas} role="img" aria-label={words} />
      <p class="keys"><span><i class="dot live-soft" />allocated</span><span><i class="dot reserved-soft" />reserved</span>
        <span>scale to {size(top)}</span></p>
    </figure>
  );
}

function Numbers(props: { sides: [Side, Side] }) {
  const [one, two] = props.sides.map((each) => each.summary) as [Summary, Summary];
  const bytes = (name: string, of: (each: Summary) => number): [string, string, string, string] =>
    [name, size(of(one)), size(of(two)), signed(of(two) - of(one))];
  const rows = [
    bytes("peak allocated", (each) => each.most["allocated"] ?? 0),
    bytes("most reserved", (each) => each.most["reserved"] ?? 0),
    ["fragmented", share(one.fragmentation, 1), share(two.fragmentation, 1), ""],
    ["verdict", one.verdict, two.verdict, ""],
    ["events", plural(one.events, "event"), plural(two.events, "event"), ""],
    ["duration", one.timed ? time(one.span_us) : "–", two.timed ? time(two.span_us) : "–", ""],
  ];
  return (
    <table class="wide numbers">
      <thead><tr><th><span class="hidden">quantity</span></th><th class="number">first</th><th class="number">second</th><th class="number">difference</th></tr></thead>
      <tbody>{rows.map(([name, ...cells]) => <tr key={name}><th scope="row">{name}</th>{cells.map((each, index) => <td key={index} class="number">{each}</td>)}</tr>)}</tbody>
    </table>
  );
}
