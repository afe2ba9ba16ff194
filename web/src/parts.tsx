// Small components shared by several views.

import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { PARTS, onTheme } from "./colors";
import { share, size } from "./format";

/** A bar of the parts of a whole, with a legend. */
export function AccountBar(props: { parts: Record<string, number>; meanings: Record<string, string>; legend?: boolean }) {
  const entries = Object.entries(props.parts).filter(([, bytes]) => bytes > 0);
  const whole = entries.reduce((sum, [, bytes]) => sum + bytes, 0);
  return (
    <div class="account">
      <div class="bar" role="img" aria-label={entries.map(([name, bytes]) => `${name} ${size(bytes)}`).join(", ")}>
        {entries.map(([name, bytes]) => (
          <Slice key={name} share={bytes / whole} color={PARTS[name] ?? "unused"} title={`${name}: ${size(bytes)}`} />
        ))}
      </div>
      {props.legend !== false && (
        <table class="legend">
          <thead class="hidden"><tr><th>memory</th><th>size</th><th>share of usable</th></tr></thead>
          <tbody>
            {entries.map(([name, bytes]) => (
              <tr key={name} title={props.meanings[name] ?? ""}>
                <td><i class={`dot ${PARTS[name] ?? "unused"}`} />{name}</td>
                <td class="number">{size(bytes)}</td>
                <td class="number dim">{share(bytes, whole)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </div>
  );
}

export function Slice(props: { share: number; color: string; title: string }) {
  const box = useRef<HTMLSpanElement>(null);
  useLayoutEffect(() => {
    if (box.current) box.current.style.flexGrow = String(Math.max(props.share, 0.002));
  });
  return <span ref={box} class={`slice ${props.color}`} title={props.title} />;
}

/** A horizontal bar behind a number in a table. */
export function Meter(props: { share: number; color?: string; children?: ComponentChildren }) {
  const box = useRef<HTMLSpanElement>(null);
  useLayoutEffect(() => {
    if (box.current) box.current.style.width = `${Math.min(100, Math.max(0, 100 * props.share))}%`;
  });
  return (
    <span class="meter"><span ref={box} class={`fill ${props.color ?? "live"}`} /><span class="text">{props.children}</span></span>
  );
}

export function Copy(props: { text: string }) {
  const [done, setDone] = useState(false);
  const copy = async (): Promise<void> => {
    await navigator.clipboard.writeText(props.text).catch(() => select(props.text));
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return <button type="button" class="small" onClick={() => void copy()}>{done ? "Copied" : "Copy"}</button>;
}

/** Select the text if the clipboard is unavailable, for example in a local file. */
function select(text: string): void {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A choice between a few options. */
export function Choice<T extends string>(props: {
  label: string; value: T; options: readonly (readonly [T, string])[]; onChange: (value: T) => void;
}) {
  return (
    <label class="choice">
      <span>{props.label}</span>
      <select aria-label={props.label} value={props.value} onChange={(event) => props.onChange(event.currentTarget.value as T)}>
        {props.options.map(([value, name]) => <option key={value} value={value}>{name}</option>)}
      </select>
    </label>
  );
}

/** The size of an element, updated when it changes. */
export function useSize<T extends HTMLElement>(): [{ current: T | null }, number, number] {
  const box = useRef<T>(null);
  const [measured, setMeasured] = useState<[number, number]>([0, 0]);
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    const measure = (): void => setMeasured([element.clientWidth, element.clientHeight]);
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    return () => observer.disconnect();
  }, []);
  return [box, ...measured];
}

/** Redraw when the theme changes; returns the number of changes. */
export function useTheme(): number {
  const [count, setCount] = useState(0);
  useEffect(() => onTheme(() => setCount((each) => each + 1)), []);
  return count;
}

/** Prepare a canvas with the given size in CSS pixels, sharp on every screen. */
export function prepared(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

export function Frames(props: { frames: string[] }) {
  return <ol class="frames">{props.frames.map((frame, index) => <li key={index}>{frame}</li>)}</ol>;
}
