// Number formats: sizes as in `vram.format_size`, times, counts.

const UNITS = ["KiB", "MiB", "GiB", "TiB"];

export function size(bytes: number): string {
  const sign = bytes < 0 ? "−" : "";
  const value = Math.abs(bytes);
  if (value < 1024) return `${sign}${Math.round(value)} B`;
  let power = Math.min(Math.floor(Math.log2(value) / 10), UNITS.length);
  if (power < UNITS.length && Number((value / 1024 ** power).toFixed(2)) >= 1024) power += 1;
  return `${sign}${trimmed(value / 1024 ** power, 2)} ${UNITS[power - 1]}`;
}

export function signed(bytes: number): string {
  return bytes > 0 ? `+${size(bytes)}` : size(bytes);
}

function trimmed(value: number, digits: number): string {
  return value.toFixed(digits).replace(/\.?0+$/, "");
}

export function time(us: number): string {
  const value = Math.abs(us);
  if (value < 1000) return `${trimmed(us, 1)} µs`;
  if (value < 1e6) return `${trimmed(us / 1e3, 3)} ms`;
  return `${trimmed(us / 1e6, 4)} s`;
}

export function count(value: number): string {
  return value.toLocaleString("en-US").replaceAll(",", "\u202f");
}

export function share(part: number, whole: number): string {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–";
}

export function plural(value: number, what: string): string {
  return `${count(value)} ${what}${value === 1 ? "" : "s"}`;
}

/** A place such as `model/net.py:12 forward`, split into function, file and line; null for other names. */
export function placeParts(name: string): { what: string; where: string } | null {
  const found = /^(.*):(\d+) (.+)$/.exec(name);
  return found ? { what: found[3]!, where: `${found[1]}:${found[2]}` } : null;
}

/** The same place with the function first: `forward  model/net.py:12`. A label may join two places by an arrow. */
export function functionFirst(label: string): string {
  return label.split(" ← ").map((name) => {
    const parts = placeParts(name);
    return parts ? `${parts.what}  ${parts.where}` : name;
  }).join(" ← ");
}

/** A label in little room: the innermost place first, without folders, then the function that led to it. */
export function shortLabel(label: string): string {
  const places = label.split(" ← ").map((name) => placeParts(name) ?? { what: name, where: "" }).reverse();
  const [inner, outer] = places;
  const where = inner!.where.replace(/^.*[/\\]/, "");
  return [`${inner!.what}  ${where}`.trim(), ...(outer ? [outer.what] : [])].join(" ← ");
}
