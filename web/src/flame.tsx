// Flame graph: memory by stack at the selected moment, outermost call first, or the difference to another moment.

import flamegraph, { type Box, type FlameGraph } from "d3-flame-graph";
import { select } from "d3-selection";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { About, Holder } from "./answers";
import { css, isDark, placeColor } from "./colors";
import { pinnedName } from "./details";
import { count, functionFirst, plural, share, signed, size } from "./format";
import { Choice, useSize, useTheme } from "./parts";
import { TREES, message, source, update, useStore } from "./state";
import { inverted, matched, withoutFramework } from "./tree";

const BY = TREES.map((each) => [each, each] as const);

/** A node as drawn: its width is the larger of the bytes before and now. */
interface Node { name: string; value: number; bytes: number; before: number; blocks: number; stacks: number[]; children: Node[] }

export function Flame() {
  const { about, file, event, start, stack, by, against, term, hidden, inverted: turned } = useStore();
  const theme = useTheme();
  const [box, width] = useSize<HTMLDivElement>();
  const [found, setFound] = useState<{ compared: boolean; tree: Holder } | null>(null);
  const [over, setOver] = useState<Node | null>(null);
  const graph = useRef<FlameGraph<Node> | null>(null);
  const host = useRef<HTMLDivElement>(null);

  useEffect(() => {
    if (!about) return;
    const asking = new AbortController();
    const load = async (): Promise<void> => {
      const given = { file, event, by, ...(await other(against, asking.signal)) };
      setFound(await source.ask<{ compared: boolean; tree: Holder }>("holders", given, asking.signal));
    };
    load().catch((error: unknown) => asking.signal.aborted || update({ error: message(error) }, "join"));
    return () => asking.abort();
  }, [about, file, event, by, against]);

  const answer = useMemo(() => {
    if (!found) return null;
    const kept = hidden ? withoutFramework(found.tree) : found.tree;
    return { compared: found.compared, tree: widened(turned ? inverted(kept, by === "stack" ? 0 : 1) : kept) };
  }, [found, hidden, turned, by]);

  useEffect(() => {
    if (!answer || !host.current || width < 60) return;
    const chart = (graph.current = flamegraph<Node>()
      .width(width)
      .cellHeight(19)
      .minFrameSize(0.6)
      .inverted(true)
      .selfValue(false)
      .transitionDuration(0)
      .sort((one, two) => two.data.value - one.data.value)
      .getName((each) => functionFirst(each.data.name))
      .setLabelHandler((each) => told(each.data, answer))
      .setColorMapper((each) => color(each, answer.compared, stack))
      .setSearchMatch((each, wanted) => each.data.name.toLowerCase().includes(wanted.toLowerCase()))
      .onHover((each) => setOver(each.data))
      .onClick((each) => each.data.stacks.length === 1 && update({ stack: each.data.stacks[0]! })));
    select<HTMLElement, unknown>(host.current).datum(answer.tree).call(chart as never);
    if (term) chart.search(term);
    reachable(host.current);
    return () => {
      chart.destroy();
      host.current?.replaceChildren();
    };
  }, [answer, width, theme, stack]);

  useEffect(() => {
    if (term) graph.current?.search(term);
    else graph.current?.clear();
  }, [term]);

  if (!about) return null;
  const choices: [string, string][] = [["", "nothing"]];
  if (/^\d+:\d+$/.test(against)) choices.push([against, pinnedName(against)]);
  if (!source.embedded) {
    choices.push(["start", "the beginning"]);
    for (const each of start?.files ?? []) choices.push([`peak:${each.file}`, `peak of ${each.name}`]);
  }
  return (
    <section class="view flame" aria-label="Flame graph">
      <div class="tools">
        <Choice label="By" value={by} options={BY} onChange={(next) => update({ by: next })} />
        {choices.length > 1 && <Choice label="Compare with" value={against} options={choices} onChange={(next) => update({ against: next })} />}
        <label class="toggle"><input type="checkbox" checked={hidden} onChange={() => update({ hidden: !hidden })} />hide framework</label>
        <label class="toggle"><input type="checkbox" checked={turned} onChange={() => update({ inverted: !turned })} />innermost first</label>
        <input type="search" placeholder="Search" aria-label="Search" value={term} onInput={(typed) => update({ term: typed.currentTarget.value }, "join")} />
        {answer && term && <span id="matched" role="status">{matchedText(answer.tree, term)}</span>}
        <span class="spread" />
        {answer && <span class="dim">{summary(answer)}</span>}
        <button type="button" onClick={() => graph.current?.resetZoom()}>Reset zoom</button>
      </div>
      <div class="readout">{over && answer ? told(over, answer) : "Width shows bytes, color shows the package. Click to zoom; click the innermost frame to select its stack in all views."}</div>
      <div class="boxes" ref={box}><div ref={host} /></div>
    </section>
  );
}

async function other(against: string, signal: AbortSignal): Promise<Record<string, number>> {
  const pinned = /^(\d+):(\d+)$/.exec(against);
  if (pinned) return { against_file: Number(pinned[1]), against: Number(pinned[2]) };
  if (against === "start") return { against: 0 };
  if (!/^peak:\d+$/.test(against)) return {};
  const file = Number(against.slice(5));
  const about = await source.ask<About>("about", { file }, signal);
  return { against_file: file, against: about.peak };
}

/** Make every node as wide as itself and its children need. */
function widened(holder: Holder): Node {
  const children = holder.children.map(widened);
  const below = children.reduce((sum, each) => sum + each.value, 0);
  return { ...holder, children, value: Math.max(holder.bytes, holder.before, below) };
}

function color(box: Box<Node>, compared: boolean, stack: number | null): string {
  const { data } = box;
  if (data.highlight || box.highlight) return css("accent-soft");
  if (!compared) {
    if (box.depth === 0) return css("root");
    const apart = stack !== null && !holds(data, stack);
    return apart ? css("rest") : placeColor(data.name);
  }
  const gap = data.bytes - data.before;
  if (gap === 0) return css("rest");
  const strength = Math.min(1, Math.abs(gap) / Math.max(1, data.before, data.bytes));
  const hue = gap > 0 ? 8 : 212;
  return isDark() ? `hsl(${hue} ${20 + 40 * strength}% 44%)` : `hsl(${hue} ${25 + 55 * strength}% ${82 - 18 * strength}%)`;
}

function holds(node: Node, stack: number): boolean {
  return node.stacks.includes(stack) || node.children.some((each) => holds(each, stack));
}

function matchedText(tree: Node, term: string): string {
  const bytes = matched(tree, term);
  return bytes ? `${size(bytes)} matched, ${share(bytes, tree.bytes)}` : "nothing matched";
}

function told(node: Node, answer: { compared: boolean; tree: Node }): string {
  const name = functionFirst(node.name);
  if (answer.compared) return `${name}   ·   ${size(node.before)} → ${size(node.bytes)} (${signed(node.bytes - node.before)})`;
  return `${name}   ·   ${size(node.bytes)}   ·   ${share(node.bytes, answer.tree.bytes)}   ·   ${plural(node.blocks, "block")}`;
}

function summary(answer: { compared: boolean; tree: Node }): string {
  const { tree } = answer;
  return answer.compared
    ? `${size(tree.before)} → ${size(tree.bytes)} (${signed(tree.bytes - tree.before)})`
    : `${size(tree.bytes)} in ${count(tree.blocks)} blocks`;
}

/** Make frames focusable, and open them by keyboard. */
function reachable(host: HTMLElement): void {
  for (const box of host.querySelectorAll<SVGGElement>("g.frame")) {
    box.setAttribute("tabindex", "0");
    box.setAttribute("role", "button");
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") box.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    });
    box.addEventListener("focus", () => box.dispatchEvent(new MouseEvent("mouseover", { bubbles: true })));
  }
}
