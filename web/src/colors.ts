// Colors by kind of memory and by holder, for the light and the dark theme.

const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();
let chosen: "light" | "dark" | "" = "";

export function isDark(): boolean {
  return document.documentElement.dataset["theme"] === "dark";
}

/** Set the light theme, the dark theme, or that of the system. */
export function setTheme(theme: "light" | "dark" | ""): void {
  chosen = theme;
  document.documentElement.dataset["theme"] = chosen || (dark.matches ? "dark" : "light");
  for (const listener of listeners) listener();
}

dark.addEventListener("change", () => setTheme(chosen));

export function onTheme(listener: () => void): () => void {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}

export function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Distinct hues of equal lightness, so that neighbors differ and none stands out.
const HUES = [212, 24, 152, 280, 48, 340, 186, 95, 258, 8, 128, 310, 200, 62, 168, 232];

/** The color of a stack, a line or a name, the same in every view. */
export function holderColor(key: number | string): string {
  const place = typeof key === "number" ? key : hash(key);
  const hue = HUES[place % HUES.length]!;
  const shift = Math.floor(place / HUES.length) % 3;
  if (place === 0 && typeof key === "number") return isDark() ? "hsl(220 6% 42%)" : "hsl(220 8% 68%)";
  return isDark() ? `hsl(${hue} 34% ${46 - 6 * shift}%)` : `hsl(${hue} 44% ${70 - 8 * shift}%)`;
}

// Colors of a flame graph show the package of the code.
const PACKAGE_HUES = [212, 268, 168, 40, 330, 95, 190, 300];

/** The color of a place such as `torch/nn/linear.py:9 forward`: one hue per package, warm for user code. */
export function placeColor(name: string): string {
  const [first = "", ...rest] = name.split("/");
  const shade = hash(name) % 5;
  if (name.startsWith("(")) return isDark() ? `hsl(220 6% ${36 + shade}%)` : `hsl(220 8% ${80 - shade}%)`;
  const own = !rest.length || !first;
  const hue = own ? 26 : PACKAGE_HUES[hash(first) % PACKAGE_HUES.length]!;
  return isDark() ? `hsl(${hue} ${own ? 46 : 28}% ${38 + 2 * shade}%)` : `hsl(${hue} ${own ? 74 : 48}% ${84 - 2 * shade}%)`;
}

function hash(text: string): number {
  let value = 7;
  for (let index = 0; index < text.length; index++) value = (value * 31 + text.charCodeAt(index)) >>> 0;
  return value;
}

/** The parts of an account; names are those of `vram.core.verdict`. */
export const PARTS: Record<string, string> = {
  "true-demand": "live", rounding: "rounding", pending: "pending", fragmentation: "hole", cached: "cached",
  unused: "unused", withheld: "withheld", foreign: "foreign",
};
